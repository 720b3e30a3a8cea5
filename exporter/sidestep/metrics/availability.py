"""How requests ended, as the objective ``availability`` counts it: from what engines tell anyway."""

from __future__ import annotations

from sidestep.catalog.slo import AVAILABILITY, RESULTS, SLO_HANDLERS
from sidestep.metrics.engine import Engine

AVAILABILITY_KEYS = tuple((result, AVAILABILITY) for result in RESULTS)


def update_availability(engine: Engine) -> None:
    """Bring the objective's counters up to what the engine's own say by now.

    SGLang counts an abort when it is asked for and the request when it ends: what was served cannot
    be taken back meanwhile, since a counter that falls is a new one to Prometheus.
    """
    if engine.objectives is None or not engine.objectives.availability:
        return
    read = engine.layout.tables.availability_counts
    ended = None if read is None else read(engine)
    if ended is None:
        return
    children = engine.keyed[engine.layout.handled[SLO_HANDLERS[0]].slots[0]]
    for key, count in zip(AVAILABILITY_KEYS, ended, strict=True):
        if count >= children.get(key, 0):
            children[key] = count
