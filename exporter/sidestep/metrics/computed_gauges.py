"""Gauges that are computed from an engine's state at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

from sidestep.metrics.engine import Engine, Number, Part
from sidestep.metrics.recent_steps import PREFIX, RecentSteps
from sidestep.metrics.saturation import Saturation
from sidestep.metrics.trackers import Trackers


def scalar(engine: Engine, name: str) -> Number:
    """Return the sum over the children of the scalar row ``name``; 0 where there is no sample."""
    assignment = engine.layout.find(name)
    return sum(engine.values[slot] or 0 for slot in assignment.slots)


def _sample_ratio(engine: Engine) -> float | None:
    own = engine.own_sample_rate
    return _of_blocks("rate")(engine) if own is None else own


def _shortest_step_time(engine: Engine) -> float | None:
    found = engine.find_part(Saturation)
    return None if found is None or found.shortest.seconds is None else found.shortest.measured


def _of_blocks(name: str) -> Callable[[Engine], float | None]:
    def read(engine: Engine) -> float | None:
        found = engine.find_part(Trackers)
        return None if found is None else getattr(found.blocks, name, None)

    return read


def _of_curve(name: str) -> Callable[[Engine], float | None]:
    def read(engine: Engine) -> float | None:
        found = engine.find_part(Trackers)
        summary = None if found is None or found.lookups is None else found.lookups.summary
        return getattr(summary, name, None)

    return read


def _of_saturation(name: str) -> Callable[[Engine], float | None]:
    read = attrgetter(name)

    def find(engine: Engine) -> float | None:
        found = engine.find_part(Saturation)
        return None if found is None else read(found)

    return find


class SetGauges(Part):
    """Computed gauges that another package sets, since they do not follow from the engine's state.

    Attributes:
        values: Gauges by the name in ``catalog.row.Computed``.
    """

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: Mapping[str, float] = {}


COMPUTED_GAUGES: Mapping[str, Callable[[Engine], float | None]] = {
    "prefix_cache_hit_rate": lambda engine: engine.part(RecentSteps).hit_windows[PREFIX].rate,
    "kv_sample_ratio": _sample_ratio,
    "kv_cached_sample_ratio": _of_blocks("rate"),
    "max_running_requests": lambda engine: engine.max_running_requests,
    "saturation": _of_saturation("ratio"),
    "shortest_step": _of_saturation("shortest.seconds"),
    "shortest_step_time": _shortest_step_time,
    "whatif_shared_hit_ratio": _of_curve("shared_hit_ratio"),
    "whatif_hit_ratio_per_gib": _of_curve("per_gib"),
    "whatif_sufficient_blocks": _of_curve("sufficient"),
    "kv_working_set_blocks": _of_curve("working_set"),
    "kv_tracked_blocks": _of_blocks("tracked"),
}
"""Functions by the name in ``catalog.row.Computed``; ``SetGauges`` has the others."""


def computed_gauge(engine: Engine, name: str) -> float | None:
    """Return the gauge ``name`` of ``engine``; None: no sample."""
    compute = COMPUTED_GAUGES.get(name) or engine.layout.tables.computed.get(name)
    if compute is not None:
        return compute(engine)
    return engine.part(SetGauges).values.get(name)
