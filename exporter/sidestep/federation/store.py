"""Store of records by source and engine: the sum of ended epochs, and the current record.

A record is cumulative within its epoch, so the newest one replaces all earlier ones. Epochs only
grow: the first record of a larger epoch ends the previous one permanently. Records of different
sources are never added up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence

from msgspec.structs import replace

from sidestep.errors import WireError
from sidestep.federation.aggregate import Aggregate, aggregate
from sidestep.federation.federated_engine import (
    FederatedEngine,
    SourceRecord,
    check_former,
    described,
    engine_for,
    is_same,
    name_of,
)
from sidestep.federation.messages import Forward, check_size, order_of
from sidestep.federation.pieces import Key, Pieces
from sidestep.metrics.engine import ORIGIN
from sidestep.metrics.record_codec import decode_in_parts, decode_record
from sidestep.metrics.registry import GAUGES_EXPIRE_SECONDS, Registry
from sidestep.metrics.validate_record import check, check_in_parts
from sidestep.protocol.records import Record

MAX_BYTES = 96 << 20
"""Maximum total bytes of all records."""
ENDED_EPOCH = "ended_epoch"
"""Rejection reason for records of an ended epoch."""


class Store:
    """Engines that other exporters count.

    Attributes:
        own: Source and epoch of this exporter; its own records are ignored.
        bytes: Total bytes of all records.
    """

    def __init__(self, registry: Registry) -> None:
        self.own = ("", 0)
        self.bytes = 0
        self._registry = registry
        self._engines: dict[Key, FederatedEngine] = {}
        self._pieces = Pieces()

    def __iter__(self) -> Iterator[FederatedEngine]:
        return iter(list(self._engines.values()))

    def find(self, source: str, engine: str) -> FederatedEngine | None:
        """Return the engine that ``source`` counts as ``engine``, or None."""
        known = self._engines.get((source, engine))
        if known is not None and not self._is_registered(known):
            self._drop((source, engine))
            return None
        return known

    def sources(self, now: float) -> int:
        """Return the number of sources last seen within 30 s."""
        return len({known.current.source for known in self if not known.is_silent(now)})

    def take(self, message: Forward, now: float) -> Iterator[None] | None:
        """Return the steps that apply ``message``, to be run before the next one is taken.

        Returns:
            None if the message is a duplicate, late, or a piece of a record that is incomplete.

        Raises:
            WireError: The epoch has ended, or the record is too large. The steps raise it if the
                record cannot be exposed, and the previous one stays, or if self-described
                families were left out.
        """
        if (message.source, message.epoch) == self.own:
            return None
        order = order_of(message)
        known = self.find(message.source, message.engine)
        if known is not None and order <= known.current.order:
            if order[0] < known.current.epoch and not known.has(order):
                raise WireError(ENDED_EPOCH, _ended(message.source))
            return None
        data = self._pieces.complete(message)
        if data is None:
            return None
        check_size(len(data))
        record = SourceRecord(
            message.source, message.engine, *order, data, message.standing, message.labels
        )
        sent_at = now - message.age
        return self._apply(record, sent_at if known is None else max(sent_at, known.sent_at), now)

    def restore(
        self,
        base: bytes,
        records: Sequence[SourceRecord],
        name: str,
        *,
        origin: bool,
        shown: bool,
        now: float,
    ) -> None:
        """Restore an engine from a snapshot; its gauges are hidden until its source sends a record.

        Args:
            base: See ``FederatedEngine``.
            records: See ``FederatedEngine.records``.
            name: Id of the engine in this exporter.
            origin: Whether it has the origin label.
            shown: Whether it was exposed.
            now: Monotonic seconds.

        Raises:
            WireError: The engine is invalid or over a limit.
        """
        *ended, current = records
        is_taken = name in self._registry.engines or name in self._registry.retired
        if is_taken or self.find(current.source, current.engine) is not None:
            raise WireError("engine_conflict", f"{name} exists already")
        record = decode_record(current.data)
        info = replace(described(self._registry, current, record.head), id=name)
        engine = engine_for(self._registry, info, None)
        check(engine, record)
        total = _run(aggregate(self._registry, engine, base, record))
        if origin:
            engine.labels[ORIGIN] = engine.id
        engine.seen_at = now
        made = FederatedEngine(engine, info, current, now - GAUGES_EXPIRE_SECONDS, base, *ended)
        self._put(None, made)
        made.show(self._registry, record.head, total)
        if shown:
            made.place(self._registry, now)

    def pass_time(self, now: float) -> None:
        """Hide gauges of engines whose source is silent, and drop engines that the registry has evicted."""
        for key, known in list(self._engines.items()):
            if not self._is_registered(known):
                self._drop(key)
            elif (known.engine.live or known.engine.streams) and known.is_silent(now):
                with contextlib.suppress(WireError):
                    known.place(self._registry, now)

    def clear(self) -> None:
        """Forget all engines; the registry has been cleared."""
        self._engines.clear()
        self._pieces = Pieces()
        self.bytes = 0

    def _apply(self, record: SourceRecord, sent_at: float, now: float) -> Iterator[None]:
        known = self.find(record.source, record.engine)
        if known is not None and known.repeats(record):
            known.current, known.sent_at = record, sent_at
            known.place(self._registry, now)
            return
        found = yield from decode_in_parts(record.data)
        if known is None:
            check_former(self._registry, record)
        name = name_of(self._registry, record) if known is None else known.engine.id
        info = replace(described(self._registry, record, found.head), id=name)
        engine = engine_for(self._registry, info, known)
        yield from check_in_parts(engine, found)
        base, ended = yield from self._before(known, record, found)
        total = yield from aggregate(self._registry, engine, base, found)
        if self.find(record.source, record.engine) is not known:
            # The engine was dropped between two steps; its source sends the record again.
            return
        goes_on = known is not None and is_same(known.info, info)
        shown = known.engine if known is not None and goes_on else engine
        made = FederatedEngine(shown, info, record, sent_at, base, ended)
        self._put(known, made)
        if shown is not engine:
            shown.update(info)
        refused = made.show(self._registry, found.head, total)
        made.place(self._registry, now)
        if refused is not None:
            raise refused

    def _before(
        self, known: FederatedEngine | None, record: SourceRecord, found: Record
    ) -> Generator[None, None, tuple[bytes, SourceRecord | None]]:
        """Return the base that ``record`` counts on top of, and the last record of the ended epoch."""
        if known is None or found.head.engine.dialect != known.info.dialect:
            return b"", None
        if record.epoch == known.current.epoch:
            return known.base, known.ended
        if found.totals.looked:
            # A polled server keeps its own totals, so each epoch includes all of them.
            return b"", known.current
        last = yield from decode_in_parts(known.current.data)
        total = yield from aggregate(self._registry, known.engine, known.base, last, gauges=False)
        return total.encoded(), known.current

    def _put(self, known: FederatedEngine | None, made: FederatedEngine) -> None:
        """Replace ``known`` by ``made``.

        Raises:
            WireError: The limit on total bytes is reached; ``known`` stays.
        """
        size = self.bytes + made.size - (0 if known is None else known.size)
        if size > MAX_BYTES:
            raise WireError(
                "over_limit", f"records of other exporters exceed {MAX_BYTES >> 20} MiB"
            )
        self.bytes = size
        self._engines[made.current.source, made.current.engine] = made
        if known is None or known.engine is not made.engine:
            if known is not None:
                self._registry.discard(known.engine)
            self._registry.retired[made.engine.id] = made.engine

    def _is_registered(self, known: FederatedEngine) -> bool:
        registered = self._registry.engines, self._registry.retired
        return any(engines.get(known.engine.id) is known.engine for engines in registered)

    def _drop(self, key: Key) -> None:
        self.bytes -= self._engines.pop(key).size


def _run(steps: Generator[None, None, Aggregate]) -> Aggregate:
    """Run all steps at once, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Aggregate = end.value
            return found


def _ended(source: str) -> str:
    text = "another process started later and ended this one's epoch: set a unique"
    return f"{source}: {text} --forward.source, or correct a clock that was set back and restart"
