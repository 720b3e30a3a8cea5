"""Readers of each kind of stream: decode its messages and apply them to their engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

from msgspec import Raw

from sidestep.errors import WireError
from sidestep.ingest.local_stream import RankFeed
from sidestep.metrics.engine import Engine
from sidestep.protocol.block_events import CacheChange, CacheEvents
from sidestep.protocol.limits import MAX_OBSERVATIONS
from sidestep_adapters.streams import kv_events, records
from sidestep_adapters.streams.rows import FORWARD_PASS, KV_EVENTS, LOAD
from sidestep_adapters.streams.sequence import Discontinuity

LOST = Discontinuity(1, restarted=False, from_start=False)


class Reader:
    """Reader of one stream: decodes its messages and applies them to their engine.

    Attributes:
        resume_values: Values that a restarted exporter needs to continue.
    """

    feature: ClassVar[str]

    def __init__(self, feed: RankFeed) -> None:
        self.resume_values: Sequence[int] = ()
        self._feed = feed

    def accept(self, payload: bytes, now: float) -> None:
        """Apply a message."""
        raise NotImplementedError

    def on_discontinuity(self, found: Discontinuity) -> None:
        """Handle a break: the next message does not continue the previous one."""


class KvEvents(Reader):
    """Applies changes of prefix caches, a piece of a message at a time."""

    feature = KV_EVENTS

    def __init__(self, feed: RankFeed) -> None:
        super().__init__(feed)
        self._source = 0
        """Increases with every discontinuity."""
        self._first_change: CacheChange | None = None
        """The first change to apply to each engine, for the current source."""
        self._announced: dict[str, int] = {}
        """The source whose first change was applied, by engine."""

    def accept(self, payload: bytes, now: float) -> None:
        """See ``Reader``; the changes of an invalid message are lost."""
        try:
            batch = kv_events.decode(payload)
        except WireError:
            self.on_discontinuity(LOST)
            raise
        engine = self._feed.engine(batch.rank)
        parts = kv_events.pieces(batch.events)
        if len(payload) <= kv_events.PIECE_BYTES and len(batch.events) <= kv_events.PIECE_EVENTS:
            for events in parts:
                self._apply_piece(engine, events, batch.stamp, now)
        else:
            self._feed.intake.insert([partial(self._apply_pieces, engine, parts, batch.stamp, now)])

    def on_discontinuity(self, found: Discontinuity) -> None:
        """Start a new source, with an empty cache or with unknown content."""
        self._source += 1
        self._first_change = CacheChange("begun" if found.from_start else "lost", 0.0)
        for engine in self._feed.engines:
            self._apply(engine, [], 0.0)

    def _apply_pieces(
        self, engine: Engine, parts: Iterator[Sequence[Raw]], stamp: float, now: float
    ) -> None:
        events = next(parts, None)
        if events is not None:
            rest = partial(self._apply_pieces, engine, parts, stamp, now)
            self._feed.intake.insert([partial(self._apply_piece, engine, events, stamp, now), rest])

    def _apply_piece(self, engine: Engine, events: Sequence[Raw], stamp: float, now: float) -> None:
        changes = kv_events.Changes(events, stamp)
        for reason, count in changes.rejected.items():
            self._feed.reject(reason, count)
        works = [partial(self._apply, engine, part, now) for part in _parts(changes.found)]
        if "bad_event" in changes.rejected:
            works.append(partial(self.on_discontinuity, LOST))
        if len(works) == 1:
            works[0]()
        else:
            self._feed.intake.insert(works)

    def _apply(self, engine: Engine, changes: list[CacheChange], now: float) -> None:
        first = self._first_change
        if first is not None and self._announced.get(engine.id) != self._source:
            self._announced[engine.id] = self._source
            changes = [first, *changes]
        self._feed.intake.put(engine, CacheEvents(0, now, self._source, changes))


class ForwardPasses(Reader):
    """Applies forward-pass metrics, of which each record is independent."""

    feature = FORWARD_PASS

    def accept(self, payload: bytes, now: float) -> None:
        """See ``Reader``."""
        item, rank = records.decode_forward_pass(payload, now)
        self._feed.intake.put(self._feed.engine(rank), item)


class Loads(Reader):
    """Applies load records, and the increases of their totals."""

    feature = LOAD

    def __init__(self, feed: RankFeed) -> None:
        super().__init__(feed)
        self.resume_values = feed.mark[1:]

    def accept(self, payload: bytes, now: float) -> None:
        """See ``Reader``."""
        item, rank, totals = records.decode_load(payload, now)
        engine = self._feed.engine(rank)
        is_known = len(self.resume_values) == len(totals)
        before = records.Totals(*self.resume_values) if is_known else None
        records.add_increase(item, totals, before)
        self.resume_values = totals
        self._feed.intake.put(engine, item)

    def on_discontinuity(self, found: Discontinuity) -> None:
        """If the publisher restarted, compare its next totals with 0."""
        if found.restarted:
            self.resume_values = records.Totals()


READERS: Mapping[str, type[Reader]] = {
    "kv-events": KvEvents,
    "forward-pass": ForwardPasses,
    "load": Loads,
}


def _parts(changes: list[CacheChange]) -> list[list[CacheChange]]:
    """Return ``changes`` in parts that take a fraction of a millisecond each."""
    if sum(len(change.hashes) for change in changes) > MAX_OBSERVATIONS:
        return [[change] for change in changes]
    return [changes] if changes else []
