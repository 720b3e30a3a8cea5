"""Where the time of an engine and of its requests went: the last minute, and its limits over ten minutes."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sidestep.catalog.dialect import Quotient
from sidestep.catalog.layout import Layout
from sidestep.exposition.live.answers import WINDOW
from sidestep.metrics.ended_counter import part_seconds
from sidestep.metrics.engine import Engine
from sidestep.metrics.series import NumberReader, number_reader
from sidestep.metrics.step_limits import binding_limit, limit_seconds
from sidestep.protocol.request_events import LIMITS

UNKNOWN_LIMIT = -1


class Totals(NamedTuple):
    """Totals of an engine at one time, without those that are 0.

    Attributes:
        limits: Seconds by the limit that held.
        parts: Seconds of ended requests by part.
        counters: Counters of the numbers that only engines of its kind have, by family.
        caught_up_at: The engine's; totals compare only with those of the same one.
    """

    at: float
    limits: Mapping[str, float]
    parts: Mapping[str, float]
    counters: Mapping[str, float]
    caught_up_at: float


class TimeSpent(NamedTuple):
    """Where time went within the window, and numbers that only engines of one kind have."""

    limits: Mapping[str, float] = {}
    parts: Mapping[str, float] = {}
    own: Mapping[str, float | None] = {}


NOTHING_KNOWN = TimeSpent()


@functools.cache
def _readers(layout: Layout) -> Mapping[str, tuple[NumberReader, float]]:
    """Return the readers of the counters of an engine's own numbers, and their divisors, by family."""
    own = layout.tables.key_series.own.values()
    series = [each for quotient in own for each in (quotient.counter, quotient.by) if each]
    return {
        each.family: (number_reader(layout, each), layout.find(each.family).row.unit_divisor)
        for each in series
    }


def totals(engine: Engine, now: float) -> Totals:
    """Return the totals of ``engine`` at ``now``."""
    return Totals(
        now,
        limit_seconds(engine),
        part_seconds(engine),
        {
            family: (read(engine) or 0) / divisor
            for family, (read, divisor) in _readers(engine.layout).items()
        },
        engine.feeds.caught_up_at,
    )


class TimeHistory:
    """Totals of the last minute, and the limit that held longest in each interval of ten minutes.

    Attributes:
        limits: Indices into ``LIMITS``, the newest last; -1: none is known.
    """

    def __init__(self, intervals: int) -> None:
        self.limits: deque[int] = deque(maxlen=intervals)
        self._totals: deque[Totals] = deque()

    def add(self, now: Totals) -> None:
        """Add the totals at the end of an interval."""
        known = self._totals
        if known and known[-1].caught_up_at != now.caught_up_at:
            known.clear()
        if known:
            spent = _increase(known[-1].limits, now.limits)
            longest = max(spent, key=lambda name: spent[name], default=None)
            self.limits.append(UNKNOWN_LIMIT if longest is None else LIMITS.index(longest))
        else:
            self.limits.append(UNKNOWN_LIMIT)
        known.append(now)
        while len(known) > 1 and known[1].at <= now.at - WINDOW:
            known.popleft()

    def last_minute(self, engine: Engine, now: float) -> TimeSpent:
        """Return where time went in the last minute."""
        found = totals(engine, now)
        if not self._totals or self._totals[0].caught_up_at != found.caught_up_at:
            return NOTHING_KNOWN
        then = self._totals[0]
        seconds = found.at - then.at
        counted = {name: found.counters[name] - then.counters[name] for name in found.counters}
        own = engine.layout.tables.key_series.own
        return TimeSpent(
            _increase(then.limits, found.limits),
            _increase(then.parts, found.parts),
            {name: _quotient(each, counted, seconds) for name, each in own.items()},
        )


def _increase(then: Mapping[str, float], now: Mapping[str, float]) -> Mapping[str, float]:
    """Return what was added to each total, in its order, without zeros."""
    added = ((name, round(total - then.get(name, 0.0), 6)) for name, total in now.items())
    return {name: seconds for name, seconds in added if seconds > 0.0}


def _quotient(each: Quotient, counted: Mapping[str, float], seconds: float) -> float | None:
    by = seconds if each.by is None else counted[each.by.family]
    return counted[each.counter.family] * each.unit / by if by else None


def row_fields(spent: TimeSpent) -> dict[str, Any]:
    """Return the fields of an ``EngineRow`` for where time went."""
    limit, share = binding_limit(spent.limits)
    if limit is None and spent.limits:
        limit, share = LIMITS[0], None
    return {
        "limit": limit,
        "limit_share": share,
        "parts": spent.parts or None,
        "own": spent.own or None,
    }


def merged(several: Iterable[TimeSpent]) -> TimeSpent:
    """Return the sum over several engines."""
    limits: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for each in several:
        limits.update(each.limits)
        parts.update(each.parts)
    return TimeSpent(limits, parts)
