"""Store of records by source and engine: the sum of ended epochs, and the current record.

A record is cumulative within its epoch, so the newest one replaces all earlier ones. Epochs only
grow: the first record of a larger epoch ends the previous one permanently. Records of different
sources are never added up.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator, Sequence

from sidestep.errors import WireError
from sidestep.federation.aggregate import aggregate
from sidestep.federation.federated_engine import (
    FederatedEngine,
    SourceRecord,
    check_retired,
    describe,
    engine_for,
    has_same_series,
    new_id,
)
from sidestep.federation.messages import Forward, check_size, order_of
from sidestep.federation.pieces import Key, Pieces
from sidestep.metrics.engine import ORIGIN
from sidestep.metrics.record_codec import decode_in_parts, decode_record, run
from sidestep.metrics.registry import GAUGES_EXPIRE_SECONDS, Registry
from sidestep.metrics.validate_record import check_in_parts, check_record
from sidestep.protocol.records import Record

MAX_BYTES = 96 << 20
"""Maximum total bytes of all records."""
ENDED_EPOCH = "ended_epoch"
"""Rejection reason for records of an ended epoch."""


@dataclasses.dataclass(slots=True)
class OwnSource:
    """This exporter as a source of records.

    Attributes:
        name: Name under which it forwards; empty if it does not.
        epoch: Epoch of its counters, see ``messages.new_epoch``; a snapshot continues its own.
        run: Number of the process, larger for each process that continues the epoch.
    """

    name: str
    epoch: int
    run: int = 1


class Store:
    """Engines that other exporters count.

    Attributes:
        registry: Registry of the engines.
        own: This exporter; its own records are ignored.
        bytes: Total bytes of all records.
    """

    def __init__(self, registry: Registry, own: OwnSource) -> None:
        self.registry = registry
        self.own = own
        self.bytes = 0
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

    def accept(self, message: Forward, now: float) -> Iterator[None] | None:
        """Return the steps that apply ``message``, to be run before the next one is accepted.

        Returns:
            None if the message is a duplicate, late, or a piece of a record that is incomplete.

        Raises:
            WireError: The epoch has ended, or the record is too large. The steps raise it if the
                record cannot be exposed, and the previous one stays, or if self-described
                families were left out.
        """
        if (message.source, message.epoch) == (self.own.name, self.own.epoch):
            return None
        order = order_of(message)
        known = self.find(message.source, message.engine)
        if known is not None and order <= known.current.order:
            if order[0] < known.current.epoch and not known.includes(order):
                raise WireError(ENDED_EPOCH, _ended(message.source))
            return None
        data = self._pieces.add(message)
        if data is None:
            return None
        check_size(len(data))
        record = SourceRecord(
            message.source, message.engine, *order, data, message.status, message.labels
        )
        sent_at = now - message.age
        return self._apply(record, sent_at if known is None else max(sent_at, known.sent_at), now)

    def restore(
        self,
        base: bytes,
        records: Sequence[SourceRecord],
        name: str,
        *,
        has_origin: bool,
        is_exposed: bool,
        now: float,
    ) -> None:
        """Restore an engine from a snapshot; its gauges are hidden until its source sends a record.

        Args:
            base: See ``FederatedEngine``.
            records: See ``FederatedEngine.records``.
            name: Id of the engine in this exporter.
            has_origin: Whether it has the label ``origin``.
            is_exposed: Whether it was exposed.
            now: Monotonic seconds.

        Raises:
            WireError: The engine is invalid or over a limit.
        """
        *ended, current = records
        if name in self.registry or self.find(current.source, current.engine) is not None:
            raise WireError("engine_conflict", f"{name} exists already")
        record = decode_record(current.data)
        info = describe(self.registry, current, record.head, name)
        engine = engine_for(self.registry, info, None)
        check_record(engine, record)
        total = run(aggregate(self.registry, engine, base, record))
        if has_origin:
            engine.labels[ORIGIN] = engine.id
        engine.seen_at = now
        made = FederatedEngine(engine, info, current, now - GAUGES_EXPIRE_SECONDS, base, *ended)
        self._put(None, made)
        made.publish(self.registry, record.head, total)
        if is_exposed:
            made.update_exposure(self.registry, now)

    def expire(self, now: float) -> None:
        """Hide gauges of silent sources, and drop engines that the registry has evicted."""
        for key, known in list(self._engines.items()):
            if not self._is_registered(known):
                self._drop(key)
            elif (known.engine.live or known.engine.streams) and known.is_silent(now):
                with contextlib.suppress(WireError):
                    known.update_exposure(self.registry, now)

    def clear(self) -> None:
        """Forget all engines; the registry has been cleared."""
        self._engines.clear()
        self._pieces = Pieces()
        self.bytes = 0

    def _apply(self, record: SourceRecord, sent_at: float, now: float) -> Iterator[None]:
        known = self.find(record.source, record.engine)
        if known is not None and known.repeats(record):
            known.current, known.sent_at = record, sent_at
            known.update_exposure(self.registry, now)
            return
        found = yield from decode_in_parts(record.data)
        if known is None:
            check_retired(self.registry, record)
        name = new_id(self.registry, record) if known is None else known.engine.id
        info = describe(self.registry, record, found.head, name)
        engine = engine_for(self.registry, info, known)
        yield from check_in_parts(engine, found)
        base, ended = yield from self._base_for(known, record, found)
        total = yield from aggregate(self.registry, engine, base, found)
        if self.find(record.source, record.engine) is not known:
            # The engine was dropped between two steps; its source sends the record again.
            return
        continues = known is not None and has_same_series(known.info, info)
        target = known.engine if known is not None and continues else engine
        made = FederatedEngine(target, info, record, sent_at, base, ended)
        self._put(known, made)
        if target is not engine:
            target.update(info, self.registry.overrides)
        refused = made.publish(self.registry, found.head, total)
        made.update_exposure(self.registry, now)
        if refused is not None:
            raise refused

    def _base_for(
        self, known: FederatedEngine | None, record: SourceRecord, found: Record
    ) -> Generator[None, None, tuple[bytes, SourceRecord | None]]:
        """Return the base that ``record`` counts on top of, and the last record of the ended epoch."""
        if known is None or found.head.engine.dialect != known.info.dialect:
            return b"", None
        if record.epoch == known.current.epoch:
            return known.base, known.ended
        if found.totals.polled:
            # A polled server keeps its own totals, so each epoch includes all of them.
            return b"", known.current
        last = yield from decode_in_parts(known.current.data)
        total = yield from aggregate(self.registry, known.engine, known.base, last)
        return total.encode_counters(), known.current

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
                self.registry.discard(known.engine)
            self.registry.retired[made.engine.id] = made.engine

    def _is_registered(self, known: FederatedEngine) -> bool:
        return self.registry.find(known.engine.id) is known.engine

    def _drop(self, key: Key) -> None:
        self.bytes -= self._engines.pop(key).size


def _ended(source: str) -> str:
    text = "another process started later and ended this one's epoch: set a unique"
    return f"{source}: {text} --forward.source, or correct a clock that was set back and restart"
