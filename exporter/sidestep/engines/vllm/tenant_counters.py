"""Counters by tenant, whose sums equal the engine's own counters at every scrape; and the cost of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

from msgspec.structs import astuple

from sidestep.catalog.layout import Layout
from sidestep.catalog.prices import Price
from sidestep.engines.handlers import increase
from sidestep.engines.vllm.readers import FAILED
from sidestep.metrics.engine import Engine, Number
from sidestep.metrics.registry import COST, TENANT_REQUESTS, Registry
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import OTHER
from sidestep.tracking.requests.outcomes import TenantCounts

HANDLERS = (
    TENANT_REQUESTS,
    "tenant_failed_requests",
    "tenant_computed_tokens",
    "tenant_cached_tokens",
    "tenant_generated_tokens",
    "tenant_kv_block_seconds",
    "tenant_queue_seconds",
    "tenant_compute_seconds",
    "tenant_cost",
)
"""One handler for each field of ``TenantCounts``, in their order, and that of the cost."""
_COST = len(HANDLERS) - 1
_SUMMED = (0, 1, 2, 3, 4, 5, _COST)
"""Those that add up to a counter of the engine."""
_OTHER = (OTHER,)


class TenantCounters:
    """Adds outcomes to the counters of tenants, and the cost of tokens to those of engines.

    What belongs to no shown tenant is the difference to the engine's own counter: so the sums are
    equal, also for tokens of requests that are not tracked.
    """

    def __init__(self, layout: Layout, registry: Registry) -> None:
        self._registry = registry
        self._families = [layout.handled[name].slots[0] for name in HANDLERS]
        ends = layout.find("vllm:request_success_total")
        sources = layout.find("vllm:prompt_tokens_by_source_total")
        assert sources.row.closed[0] == "local_compute"
        (self._prompt,) = layout.find("vllm:prompt_tokens_total").slots
        (self._generated,) = layout.find("vllm:generation_tokens_total").slots
        (self._held,) = layout.find("sidestep_kv_block_seconds_total").slots
        (self._cost,) = layout.handled[COST].slots
        self._computed, *cached = sources.slots[: len(sources.row.closed)]
        self._cached = itemgetter(*cached)
        self._ended = itemgetter(*ends.slots)
        self._failed = itemgetter(*(ends.slots[ends.row.closed.index(why)] for why in FAILED))

    def tokens(self, engine: Engine) -> tuple[Number, Number, Number]:
        """Return the engine's tokens that have prices: computed and cached prompt tokens, generated ones."""
        values = engine.values
        cached = sum(filter(None, self._cached(values)))
        return (values[self._prompt] or 0) - cached, cached, values[self._generated] or 0

    def charge(self, engine: Engine, iteration: IterationStats) -> None:
        """Add the cost of an iteration's tokens, at their present prices, to the engine's."""
        price = self._price(engine)
        if price is not None:
            prompts = iteration.prompt_token_stats
            cached = prompts.local_cache_hit + prompts.external_kv_transfer if prompts else 0
            computed = iteration.prompt_tokens - cached
            cost = price.cost(computed, cached, iteration.num_generation_tokens)
            increase(engine, self._cost, cost)

    def charge_since(self, engine: Engine, before: Sequence[Number]) -> None:
        """Add the cost of the tokens that the engine has more than ``before``."""
        price = self._price(engine)
        if price is not None:
            more = (int(now - old) for now, old in zip(self.tokens(engine), before, strict=True))
            increase(engine, self._cost, price.cost(*more))

    def _price(self, engine: Engine) -> Price | None:
        return self._registry.prices.of(engine.labels.get("model_name", ""))

    def count(self, engine: Engine, tenants: Mapping[str, TenantCounts]) -> None:
        """Add counts by tenant, after the engine's own counters were increased."""
        shown = self._registry.tenants
        if shown is None:
            return
        price = self._price(engine)
        families = [engine.keyed[slot] for slot in self._families]
        if price is None:
            del families[_COST]
        added = [0] * len(HANDLERS)
        for name, counts in tenants.items():
            key = (name,) if name in shown else _OTHER
            amounts = list(astuple(counts))
            if price is not None:
                amounts.append(price.cost(counts.computed, counts.cached, counts.generated))
            if key not in families[0]:
                for children in families:
                    children.setdefault(key, 0)
            for at, amount in enumerate(amounts):
                if amount:
                    families[at][key] = families[at].get(key, 0) + amount
                    added[at] += amount
        self._balance(engine, added)

    def balance(self, engine: Engine) -> None:
        """Count under ``__other__`` what the engine has counted for no shown tenant."""
        if self._registry.tenants is not None:
            self._balance(engine, [0] * len(HANDLERS))

    def _balance(self, engine: Engine, added: Sequence[Number]) -> None:
        values, before = engine.values, engine.tenant_totals
        totals: list[Number] = [
            sum(filter(None, self._ended(values))),
            sum(filter(None, self._failed(values))),
            values[self._computed] or 0,
            sum(filter(None, self._cached(values))),
            values[self._generated] or 0,
            values[self._held] or 0,
            values[self._cost] or 0,
        ]
        engine.tenant_totals = totals
        if before is None:
            # The children are added up once: later on, what is new is enough.
            for at, total in zip(_SUMMED, totals, strict=True):
                children = engine.keyed[self._families[at]]
                children.pop(_OTHER, None)
                if at != _COST or values[self._cost] is not None:
                    children[_OTHER] = total - sum(children.values())
        elif totals != before:
            for at, total, last in zip(_SUMMED, totals, before, strict=True):
                if rest := total - last - added[at]:
                    children = engine.keyed[self._families[at]]
                    children[_OTHER] = children.get(_OTHER, 0) + rest
