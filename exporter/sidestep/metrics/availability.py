"""The counters of the objective ``availability``, derived from the engine's own counters."""

from __future__ import annotations

from sidestep.catalog.slo import AVAILABILITY, RESULTS, SLO_HANDLERS
from sidestep.metrics.engine import Engine

AVAILABILITY_KEYS = tuple((result, AVAILABILITY) for result in RESULTS)


def update_availability(engine: Engine) -> None:
    """Update the objective's counters from the engine's current ones; they never decrease.

    SGLang counts an abort when it is requested, and the request when it ends. In between, the number of
    served requests is lower than before; Prometheus would take that for a counter reset.
    """
    if not engine.settings.objectives.availability:
        return
    read = engine.layout.tables.availability_counts
    ended = None if read is None else read(engine)
    if ended is None:
        return
    children = engine.keyed[engine.layout.handled[SLO_HANDLERS[0]].slots[0]]
    for key, count in zip(AVAILABILITY_KEYS, ended, strict=True):
        if count >= children.get(key, 0):
            children[key] = count
