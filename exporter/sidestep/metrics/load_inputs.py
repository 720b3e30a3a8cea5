"""Periodic update of the engines' saturation from their series."""

from __future__ import annotations

import functools
from collections.abc import Callable

from sidestep.catalog.layout import Layout
from sidestep.metrics.engine import Engine
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry
from sidestep.metrics.saturation import Load, Saturation

INTERVAL = 1.0
"""Least seconds between two updates of an engine; a full batch lasts for many seconds."""
BATCH = 32
"""Engines that one call updates, at some microseconds each."""

LoadReader = Callable[[Engine], Load | None]
"""Reads an engine's load; None where the engine does not report it."""


class LoadTracker:
    """Updates the saturation of the engines of a registry.

    Federated engines are excluded: their own exporter sends the ratio.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._due: list[Engine] = []
        self._next = float("-inf")

    def update(self, now: float) -> None:
        """Update the next batch of engines; call it often. ``now`` is in monotonic seconds."""
        if not self._due:
            if now < self._next:
                return
            self._next = now + INTERVAL
            self._due = [*self._registry.engines.values()]
        for engine in self._due[-BATCH:]:
            self._update(engine, now)
        del self._due[-BATCH:]

    def _update(self, engine: Engine, now: float) -> None:
        if engine.live and not engine.streams:
            # The engine may reconnect soon; until then its gauges are those of before.
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
            engine.saturation.update(now, load)
        if before != (engine.saturation and engine.saturation.ratio):
            self._registry.touch(engine)


@functools.cache
def _reader(layout: Layout) -> LoadReader | None:
    """Return the function that reads the load of the layout's engines, if the dialect has one."""
    make = layout.tables.load_reader
    return None if make is None else make(layout)


def observation_count(found: float | Histogram | None) -> int | None:
    """Return the number of observations of a histogram; None for any other value."""
    return sum(found.counts) if isinstance(found, Histogram) else None
