"""Periodic update of the engines' saturation from their series."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from sidestep.catalog.layout import Layout
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.metrics.saturation import Load, Saturation
from sidestep.metrics.series import number_reader

INTERVAL = 1.0
"""Least seconds between two updates of an engine."""
BATCH = 32
"""Engines that one call updates, at some microseconds each."""

LoadReader = Callable[[Engine], Load | None]
"""Reads an engine's load; None where the engine does not report it."""


class LoadTracker:
    """Updates the saturation of the engines of a registry."""

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
        if engine.live and not engine.is_up:
            # The engine may reconnect soon; until then its gauges have their last values.
            return
        reader = _reader(engine.layout)
        load = None
        if engine.live and not math.isnan(engine.feeds.caught_up_at) and reader is not None:
            load = reader(engine)
        before = _gauges(engine)
        if load is None:
            engine.parts.pop(Saturation, None)
        else:
            engine.part(Saturation).update(now, load)
        if before != _gauges(engine):
            self._registry.touch(engine)


def _gauges(engine: Engine) -> tuple[float | None, ...]:
    found = engine.find_part(Saturation)
    return () if found is None else (found.ratio, found.shortest.seconds)


@functools.cache
def _reader(layout: Layout) -> LoadReader | None:
    """Return the function that reads the load of the layout's engines, if the dialect names its series."""
    named = layout.tables.key_series
    if named.begun is None:
        return None
    # Requests that wait for an adapter or a transfer do not imply that the batch is full.
    running, waiting, blocked, begun, slots, usage, steps, prompt, generation = (
        number_reader(layout, series)
        for series in (
            named.running,
            named.waiting,
            named.blocked or named.waiting,
            named.begun,
            named.slots,
            named.kv_cache_usage,
            named.steps,
            named.prompt,
            named.generation,
        )
    )

    def read(engine: Engine) -> Load | None:
        in_batch, queued, held = running(engine), waiting(engine), blocked(engine)
        entered, most = begun(engine), slots(engine)
        if in_batch is None or queued is None or held is None or entered is None:
            return None
        return Load(
            running=in_batch,
            waiting=held,
            occupancy=max(in_batch / most if most else 0.0, usage(engine) or 0.0),
            begun=entered,
            arrived=entered + queued,
            steps=steps(engine),
            stamp=engine.gauge_stamp,
            seen=engine.last_seen,
            tokens=(prompt(engine) or 0) + (generation(engine) or 0),
            budget=engine.max_step_tokens or 0,
        )

    return read
