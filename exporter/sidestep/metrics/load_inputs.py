"""What engines tell of their load, read from their series about once a second."""

from __future__ import annotations

import functools
from collections.abc import Callable

from sidestep.catalog.layout import Layout
from sidestep.metrics.engine import Engine
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry
from sidestep.metrics.saturation import Load, Saturation

INTERVAL = 1.0
"""Seconds between two looks at an engine, at least: one that is blocked is so for many."""
BATCH = 32
"""Engines between two turns of the loop: some microseconds each."""

LoadReader = Callable[[Engine], Load | None]
"""None where the engine does not tell."""


class LoadTracker:
    """Follows how saturated the engines of a registry are that are counted here.

    What another exporter counts that one follows, and tells the ratio.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._due: list[Engine] = []
        self._next = float("-inf")

    def look(self, now: float) -> None:
        """Look at the next engines, some at a time; call it often. ``now`` is monotonic."""
        if not self._due:
            if now < self._next:
                return
            self._next = now + INTERVAL
            self._due = [*self._registry.engines.values()]
        for engine in self._due[-BATCH:]:
            self._follow(engine, now)
        del self._due[-BATCH:]

    def _follow(self, engine: Engine, now: float) -> None:
        if engine.live and not engine.streams:
            # It may be back in a moment; until then its gauges are those of before.
            return
        reader = _reader(engine.layout)
        load = None
        if engine.live and not engine.federated and reader is not None:
            load = reader(engine)
        before = engine.saturation and engine.saturation.ratio
        if load is None:
            engine.saturation = None
        else:
            if engine.saturation is None:
                engine.saturation = Saturation()
            engine.saturation.look(now, load)
        if before != (engine.saturation and engine.saturation.ratio):
            self._registry.touch(engine)


@functools.cache
def _reader(layout: Layout) -> LoadReader | None:
    """Return what reads the load of the layout's engines; ``None`` where they do not tell theirs."""
    make = layout.tables.load_reader
    return None if make is None else make(layout)


def observation_count(found: float | Histogram | None) -> int | None:
    """Observations of a histogram."""
    return sum(found.counts) if isinstance(found, Histogram) else None
