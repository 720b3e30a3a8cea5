"""What each source has counted of each engine: the sum of its ended epochs, and its current record.

A source's record is cumulative within its epoch, so the newest one replaces all before it. Epochs
only grow: the first record of a larger epoch ends the one before for good. Sources are never added
up with each other.
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
from sidestep.metrics.registry import SILENT, Registry
from sidestep.metrics.validate_record import check, check_in_parts
from sidestep.protocol.records import Record

MAX_BYTES = 96 << 20
"""Of all records."""
ENDED_EPOCH = "ended_epoch"
"""The reason for which records of an ended epoch are refused."""


class Store:
    """Engines that other exporters count.

    Attributes:
        own: Source and epoch of this exporter, whose records it does not take back.
        bytes: Of all records.
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
        """Return what ``source`` counts of ``engine``."""
        known = self._engines.get((source, engine))
        if known is not None and not self._is_kept(known):
            self._drop((source, engine))
            return None
        return known

    def sources(self, now: float) -> int:
        """Count the sources that were heard in the last 30 s."""
        return len({known.current.source for known in self if not known.is_silent(now)})

    def take(self, message: Forward, now: float) -> Iterator[None] | None:
        """Return the steps that apply ``message``, to be run before the next one is taken.

        Returns:
            None if the message is a duplicate, late, or a piece of a record that is incomplete.

        Raises:
            WireError: Its epoch has ended, or its record is too large; the steps raise it if the
                record cannot be shown, and the one before stands, or if self-described families
                were left out.
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
        heard = now - message.age
        return self._apply(record, heard if known is None else max(heard, known.heard), now)

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
        """Take over an engine from a snapshot; its gauges wait until its source is heard.

        Args:
            base: See ``FederatedEngine``.
            records: See ``FederatedEngine.records``.
            name: Its id here.
            origin: Whether it has a label ``origin``.
            shown: Whether it was on the page.
            now: Monotonic seconds.

        Raises:
            WireError: It cannot be shown.
        """
        *ended, current = records
        is_taken = name in self._registry.engines or name in self._registry.kept
        if is_taken or self.find(current.source, current.engine) is not None:
            raise WireError("engine_conflict", f"{name} is there already")
        record = decode_record(current.data)
        info = replace(described(self._registry, current, record.head), id=name)
        engine = engine_for(self._registry, info, None)
        check(engine, record)
        total = _run(aggregate(self._registry, engine, base, record))
        if origin:
            engine.labels[ORIGIN] = engine.id
        engine.heard = now
        made = FederatedEngine(engine, info, current, now - SILENT, base, *ended)
        self._put(None, made)
        made.show(self._registry, record.head, total)
        if shown:
            made.place(self._registry, now)

    def pass_time(self, now: float) -> None:
        """Hide gauges of engines whose source has been silent, and forget what was forgotten."""
        for key, known in list(self._engines.items()):
            if not self._is_kept(known):
                self._drop(key)
            elif (known.engine.live or known.engine.streams) and known.is_silent(now):
                with contextlib.suppress(WireError):
                    known.place(self._registry, now)

    def clear(self) -> None:
        """Forget all engines; the registry has been cleared."""
        self._engines.clear()
        self._pieces = Pieces()
        self.bytes = 0

    def _apply(self, record: SourceRecord, heard: float, now: float) -> Iterator[None]:
        known = self.find(record.source, record.engine)
        if known is not None and known.repeats(record):
            known.current, known.heard = record, heard
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
            # It was forgotten between two steps; the source repeats its record.
            return
        goes_on = known is not None and is_same(known.info, info)
        shown = known.engine if known is not None and goes_on else engine
        made = FederatedEngine(shown, info, record, heard, base, ended)
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
            # A server that keeps its own totals tells each epoch all of them.
            return b"", known.current
        last = yield from decode_in_parts(known.current.data)
        total = yield from aggregate(self._registry, known.engine, known.base, last, gauges=False)
        return total.encoded(), known.current

    def _put(self, known: FederatedEngine | None, made: FederatedEngine) -> None:
        """Let ``made`` take the place of ``known``.

        Raises:
            WireError: There is no room; ``known`` still stands.
        """
        size = self.bytes + made.size - (0 if known is None else known.size)
        if size > MAX_BYTES:
            raise WireError("over_limit", "other exporters send more than there is room for")
        self.bytes = size
        self._engines[made.current.source, made.current.engine] = made
        if known is None or known.engine is not made.engine:
            if known is not None:
                self._registry.discard(known.engine)
            self._registry.kept[made.engine.id] = made.engine

    def _is_kept(self, known: FederatedEngine) -> bool:
        there = self._registry.engines, self._registry.kept
        return any(engines.get(known.engine.id) is known.engine for engines in there)

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
    text = "another process began later and ended this one's epoch: give each its own"
    return f"{source}: {text} --forward.source, or correct a clock that was set back and restart"
