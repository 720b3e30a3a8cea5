"""Gauges that are computed from an engine's state at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Number, Part
from sidestep.metrics.recent_steps import PREFIX, RecentSteps
from sidestep.metrics.saturation import Saturation
from sidestep.metrics.trackers import Trackers


def scalar(engine: Engine, name: str) -> Number:
    """Return the sum over the children of the scalar row ``name``; 0 where there is no sample."""
    assignment = engine.layout.find(name)
    return sum(engine.values[slot] or 0 for slot in assignment.slots)


def _of(kind: type[Part], *path: str) -> Callable[[Engine], float | None]:
    """Return the reader of an attribute of a part; None: the part, or one on the way, is not there."""

    def read(engine: Engine) -> float | None:
        found: Any = engine.find_part(kind)
        for name in path:
            found = getattr(found, name, None)
        value: float | None = found
        return value

    return read


_block_rate = _of(Trackers, "blocks", "rate")


def _sample_ratio(engine: Engine) -> float | None:
    own = engine.own_sample_rate
    return _block_rate(engine) if own is None else own


def _shortest_step_time(engine: Engine) -> float | None:
    found = engine.find_part(Saturation)
    return None if found is None or found.shortest.seconds is None else found.shortest.measured


class SetGauges(Part):
    """Computed gauges that another package sets, since they do not follow from the engine's state."""

    def __init__(self) -> None:
        self.values: Mapping[str, float] = {}


COMPUTED_GAUGES: Mapping[str, Callable[[Engine], float | None]] = {
    "prefix_cache_hit_rate": lambda engine: engine.part(RecentSteps).hit_windows[PREFIX].rate,
    "kv_sample_ratio": _sample_ratio,
    "kv_cached_sample_ratio": _block_rate,
    "max_running_requests": lambda engine: engine.max_running_requests,
    "saturation": _of(Saturation, "ratio"),
    "shortest_step": _of(Saturation, "shortest", "seconds"),
    "shortest_step_time": _shortest_step_time,
    "whatif_shared_hit_ratio": _of(Trackers, "lookups", "summary", "shared_hit_ratio"),
    "whatif_hit_ratio_per_gib": _of(Trackers, "lookups", "summary", "per_gib"),
    "whatif_sufficient_blocks": _of(Trackers, "lookups", "summary", "sufficient"),
    "kv_working_set_blocks": _of(Trackers, "lookups", "summary", "working_set"),
    "waiting_prompt_tokens": _of(Trackers, "requests", "requests", "waiting_prompt_tokens"),
    "unfinished_prefill_tokens": _of(Trackers, "requests", "requests", "prefill_tokens"),
    "kv_tracked_blocks": _of(Trackers, "blocks", "tracked"),
}
"""Functions by the name in ``catalog.row.Computed``; ``SetGauges`` has the others."""


def computed_gauge(engine: Engine, name: str) -> float | None:
    """Return the gauge ``name`` of ``engine``; None: no sample."""
    compute = COMPUTED_GAUGES.get(name) or engine.layout.tables.computed.get(name)
    if compute is not None:
        return compute(engine)
    return engine.part(SetGauges).values.get(name)
