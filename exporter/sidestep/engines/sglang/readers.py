"""Readers of SGLang's counters, and of how its requests ended."""

from __future__ import annotations

from sidestep.catalog.dialect import AvailabilityCounts
from sidestep.metrics.engine import Engine, Number
from sidestep.metrics.histogram import Histogram


def availability_counts(engine: Engine) -> AvailabilityCounts | None:
    """Return how many requests of a tokenizer were served, and how many were not.

    SGLang counts aborted requests among those that finished.
    """
    finished, aborted = (
        own_total(engine, f"sglang:num_{name}_total") for name in ("requests", "aborted_requests")
    )
    if finished is None and aborted is None:
        return None
    return max((finished or 0) - (aborted or 0), 0), aborted or 0


def own_total(engine: Engine, name: str) -> Number | None:
    """Return the sum of a counter of SGLang's over all of its labels; None if it has none."""
    family = engine.open_families.get(name)
    if family is None:
        return None
    return sum(n for n in family.children.values() if not isinstance(n, Histogram))
