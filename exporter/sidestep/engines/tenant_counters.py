"""Counters by tenant, whose sums equal the engine's own counters at every scrape."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sidestep.catalog.layout import Layout
from sidestep.metrics.engine import Engine, Number
from sidestep.metrics.registry import Registry
from sidestep.protocol.limits import OTHER
from sidestep.tracking.requests.outcomes import TenantCounts

HANDLERS = {
    "tenant_requests": "ended",
    "tenant_failed_requests": "failed",
    "tenant_computed_tokens": "computed",
    "tenant_cached_tokens": "cached",
    "tenant_generated_tokens": "generated",
    "tenant_queue_seconds": "queue_seconds",
    "tenant_compute_seconds": "compute_seconds",
}
"""Field of ``TenantCounts`` by handler."""
_OTHER = (OTHER,)
Total = Callable[[Engine], Number | None]
"""A reader of an engine's own counter; None: the engine does not have it."""


class TenantCounters:
    """Adds outcomes to the counters of tenants.

    What belongs to no shown tenant is the difference to the engine's own counter: so the sums are
    equal, also for tokens of requests that are not tracked.

    Args:
        layout: The layout of the engines' dialect.
        registry: The engines' registry.
        totals: The engine's own counter of each field of ``TenantCounts`` that has one.
    """

    def __init__(self, layout: Layout, registry: Registry, totals: Mapping[str, Total]) -> None:
        self._registry = registry
        self._slots = {
            field: layout.handled[name].slots[0]
            for name, field in HANDLERS.items()
            if name in layout.handled
        }
        self._totals = totals

    def count(self, engine: Engine, tenants: Mapping[str, TenantCounts]) -> None:
        """Add counts by tenant, after the engine's own counters were increased."""
        shown = self._registry.tenants
        if shown is None:
            return
        for name, counts in tenants.items():
            key = (name,) if name in shown else _OTHER
            for field, slot in self._slots.items():
                children = engine.keyed[slot]
                children[key] = children.get(key, 0) + getattr(counts, field)
        self.balance(engine)

    def balance(self, engine: Engine) -> None:
        """Count under ``__other__`` what the engine has counted for no shown tenant."""
        if self._registry.tenants is None:
            return
        for field, read in self._totals.items():
            total = read(engine)
            if total is not None:
                children = engine.keyed[self._slots[field]]
                children.pop(_OTHER, None)
                children[_OTHER] = total - sum(children.values())
