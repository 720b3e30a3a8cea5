"""Counters by tenant, whose sums equal the engine's own counters at every scrape; and the cost of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sidestep.catalog.layout import Layout
from sidestep.catalog.prices import Price
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Number, Part
from sidestep.metrics.registry import COST, TENANT_REQUESTS, Registry
from sidestep.protocol.limits import OTHER
from sidestep.tracking.requests.outcomes import TenantCounts

HANDLERS = {
    TENANT_REQUESTS: "ended",
    "tenant_failed_requests": "failed",
    "tenant_computed_tokens": "computed",
    "tenant_cached_tokens": "cached",
    "tenant_transferred_tokens": "transferred",
    "tenant_generated_tokens": "generated",
    "tenant_kv_block_seconds": "held_micros",
    "tenant_queue_seconds": "queue_seconds",
    "tenant_compute_seconds": "compute_seconds",
    "tenant_cost": "cost",
}
"""Field of ``TenantCounts`` by handler."""
_OTHER = (OTHER,)
_NO_TENANTS: Mapping[str, TenantCounts] = {}
ReadTotals = Callable[[Engine], Mapping[str, Number | None]]
"""A reader of an engine's own counters by field of ``TenantCounts``; None: the engine does not have it."""


class Accounted(Part):
    """An engine's own counters that have counters by tenant or prices.

    Attributes:
        counters: Their values by field when they were last accounted for; None: not yet.
        owed: What a sender has counted for tenants but not for the engine, by field; negative.
    """

    def __init__(self) -> None:
        self.counters: dict[str, Number | None] | None = None
        self.owed: dict[str, Number] = {}


class TenantCounters:
    """Adds outcomes to the counters of tenants, and the cost of tokens to those of engines.

    ``__other__`` counts what an item adds to the engine's own counters for no shown tenant. So the sums
    are equal, also for tokens of requests that are not tracked. ``read_totals`` does not read the cost.
    """

    def __init__(self, layout: Layout, registry: Registry, read_totals: ReadTotals) -> None:
        self._registry = registry
        self._slots = {
            field: layout.handled[name].slots[0]
            for name, field in HANDLERS.items()
            if name in layout.handled
        }
        (self._cost_slot,) = layout.handled[COST].slots
        self._read_totals = read_totals

    def begin(self, engine: Engine) -> None:
        """Note the engine's counters before the first item changes them."""
        accounted = engine.part(Accounted)
        if accounted.counters is not None:
            return
        accounted.counters = counted = self._read(engine)
        if self._registry.accounting.tenants is not None:
            for field, total in counted.items():
                if total is not None:
                    children = engine.keyed[self._slots[field]]
                    children.pop(_OTHER, None)
                    self._add_others(engine, field, total - sum(children.values()))

    def settle(self, engine: Engine, tenants: Mapping[str, TenantCounts] = _NO_TENANTS) -> None:
        """Count the cost of what was added since the last call, of which ``tenants`` has a part.

        The rest counts for no shown tenant.
        """
        accounted = engine.part(Accounted)
        before = accounted.counters
        if before is None:
            return
        now = self._read(engine)
        if now == before and not tenants:
            return
        price = self._registry.accounting.prices.of(engine.labels.get("model_name", ""))
        if price is not None:
            self._charge(engine, price, before, now)
        accounted.counters = now
        if self._registry.accounting.tenants is not None:
            rest = {field: (total or 0) - (before[field] or 0) for field, total in now.items()}
            self._add(engine, tenants, price, rest)
            for field, more in rest.items():
                if now[field] is not None or more:
                    self._add_others(engine, field, more)

    def _add_others(self, engine: Engine, field: str, more: Number) -> None:
        """Add to ``__other__``, which is a counter and so not negative, whatever a sender counts."""
        children, owed = engine.keyed[self._slots[field]], engine.part(Accounted).owed
        total = children.get(_OTHER, 0) + more + owed.get(field, 0)
        children[_OTHER], owed[field] = max(total, 0), min(total, 0)

    def _add(
        self,
        engine: Engine,
        tenants: Mapping[str, TenantCounts],
        price: Price | None,
        rest: dict[str, Number],
    ) -> None:
        """Add counts to those of shown tenants, and take them from ``rest``."""
        for name, counts in tenants.items():
            key = (name,) if name in (self._registry.accounting.tenants or ()) else _OTHER
            if price is not None:
                counts.cost = price.cost(
                    counts.computed, counts.cached, counts.generated, counts.transferred
                )
            for field, slot in self._slots.items():
                if field == "cost" and price is None:
                    continue
                amount = getattr(counts, field)
                children = engine.keyed[slot]
                children[key] = children.get(key, 0) + amount
                if field in rest:
                    rest[field] -= amount

    def _charge(
        self,
        engine: Engine,
        price: Price,
        before: Mapping[str, Number | None],
        now: dict[str, Number | None],
    ) -> None:
        added = (
            int((now[field] or 0) - (before[field] or 0))
            for field in ("computed", "cached", "generated", "transferred")
        )
        if now["generated"] is not None:
            cost = max((now["cost"] or 0) + price.cost(*added), 0)
            now["cost"] = engine.values[self._cost_slot] = cost

    def _read(self, engine: Engine) -> dict[str, Number | None]:
        update_service = engine.layout.tables.update_service
        if update_service is not None:
            update_service(engine)
        return {**self._read_totals(engine), "cost": engine.values[self._cost_slot]}
