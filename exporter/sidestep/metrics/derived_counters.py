"""Counters that follow from an engine's others: of the service, and of the objective ``availability``."""

from __future__ import annotations

from sidestep.catalog.slo import AVAILABILITY, RESULTS, SLO_HANDLERS
from sidestep.metrics.engine import Engine

AVAILABILITY_KEYS = tuple((result, AVAILABILITY) for result in RESULTS)


def update_derived(engine: Engine) -> None:
    """Update them to the engine's other counters, before somebody reads them."""
    update_service = engine.layout.tables.update_service
    if update_service is not None:
        update_service(engine)
    _update_availability(engine)


def _update_availability(engine: Engine) -> None:
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
