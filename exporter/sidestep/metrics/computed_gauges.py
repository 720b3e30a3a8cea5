"""Gauges that are computed from an engine's state at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sidestep.metrics.engine import Engine, Number
from sidestep.metrics.hit_window import PREFIX


def scalar(engine: Engine, name: str) -> Number:
    """Return the sum over the children of the scalar row ``name``; 0 where there is no sample."""
    assignment = engine.layout.find(name)
    return sum(engine.values[slot] or 0 for slot in assignment.slots)


def _sample_ratio(engine: Engine) -> float | None:
    own = engine.own_sample_rate
    if own is not None or engine.blocks is None:
        return own
    return engine.blocks.rate


def _shortest_step_time(engine: Engine) -> float | None:
    found = engine.saturation
    return None if found is None or found.shortest.seconds is None else found.shortest.measured


def _of_curve(name: str) -> Callable[[Engine], float | None]:
    def read(engine: Engine) -> float | None:
        summary = None if engine.lookups is None else engine.lookups.summary
        return None if summary is None else getattr(summary, name)

    return read


COMPUTED_GAUGES: Mapping[str, Callable[[Engine], float | None]] = {
    "prefix_cache_hit_rate": lambda engine: engine.hit_windows[PREFIX].rate,
    "kv_sample_ratio": _sample_ratio,
    "kv_cached_sample_ratio": lambda engine: engine.blocks.rate if engine.blocks else None,
    "max_running_requests": lambda engine: engine.max_running_requests,
    "saturation": lambda engine: engine.saturation.ratio if engine.saturation else None,
    "shortest_step": lambda engine: (
        engine.saturation.shortest.seconds if engine.saturation else None
    ),
    "shortest_step_time": _shortest_step_time,
    "whatif_shared_hit_ratio": _of_curve("shared_hit_ratio"),
    "whatif_hit_ratio_per_gib": _of_curve("per_gib"),
    "whatif_sufficient_blocks": _of_curve("sufficient"),
    "kv_working_set_blocks": _of_curve("working_set"),
    "kv_tracked_blocks": lambda engine: engine.blocks.tracked if engine.blocks else None,
}
"""Functions by the name in ``catalog.model.Computed``; the others are in ``Engine.computed``."""


def computed_gauge(engine: Engine, name: str) -> float | None:
    """Return the gauge ``name`` of ``engine``; None: no sample."""
    compute = COMPUTED_GAUGES.get(name) or engine.layout.tables.computed.get(name)
    return engine.computed.get(name) if compute is None else compute(engine)
