"""The time of each limit on what an engine admits, of dialects that count it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from sidestep.catalog.dialect import Series
from sidestep.catalog.layout import Layout
from sidestep.metrics.engine import Engine
from sidestep.metrics.series import NumberReader, number_reader
from sidestep.protocol.request_events import LIMITS

FAMILY = "sidestep_step_limit_seconds_total"


@functools.cache
def _readers(layout: Layout) -> Mapping[str, tuple[NumberReader, int]]:
    """Return the reader of each limit's time, and the divisor that makes seconds of it."""
    rows = [each.row for each in layout.assignments if each.row.name == FAMILY]
    return {
        limit: (number_reader(layout, Series(FAMILY, limit)), row.unit_divisor)
        for row in rows
        for limit in LIMITS
    }


BINDS = 0.1
"""Least share of the busy time from which on a limit is worth showing."""


def binding_limit(seconds: Mapping[str, float]) -> tuple[str | None, float | None]:
    """Return the limit that held for longest while requests waited, and its share of the busy time."""
    busy = sum(seconds.values())
    waiting = {name: spent for name, spent in seconds.items() if name != LIMITS[0]}
    limit = max(waiting, key=lambda name: waiting[name], default=None)
    if busy <= 0 or limit is None or waiting[limit] < BINDS * busy:
        return None, None
    return limit, waiting[limit] / busy


def limit_seconds(engine: Engine) -> dict[str, float]:
    """Return the seconds in which each limit held, without limits that never held."""
    found = {
        limit: (read(engine) or 0) / divisor
        for limit, (read, divisor) in _readers(engine.layout).items()
    }
    return {limit: seconds for limit, seconds in found.items() if seconds}
