"""Counters and gauges of lookups in a prefix cache, for a dialect that sends them."""

from __future__ import annotations

from sidestep.catalog.layout import Layout
from sidestep.engines.handlers import increase
from sidestep.metrics.engine import Engine
from sidestep.metrics.hit_ratio_curves import HIT_RATIOS
from sidestep.metrics.registry import Registry
from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.tracking.kv_blocks.lookups import REASONS
from sidestep.tracking.kv_blocks.lookups import check as check_lookups

HANDLERS = {"kv_missed_tokens", "kv_missed_idle", HIT_RATIOS}


class LookupCounters:
    """Applies lookups to the engines of one registry that have ``layout``."""

    def __init__(self, layout: Layout, registry: Registry) -> None:
        self._registry = registry
        self._missed = dict(zip(REASONS, layout.handled["kv_missed_tokens"].slots, strict=False))
        self._idle = layout.handler_slot("kv_missed_idle")
        self._refused = layout.handler_slot("refused_observations")

    def apply(self, engine: Engine, item: CacheLookups) -> None:
        """Count why tokens were not found, and update the engine's curve.

        Raises:
            WireError: The item is invalid; nothing was changed.
        """
        check_lookups(item)
        if not self._registry.tracking.lookups.half_life:
            return
        found = self._registry.lookups_of(engine).apply(item)
        for reason, tokens in found.missed.items():
            increase(engine, self._missed[reason], tokens)
        refused = engine.histogram(self._idle).observe_weighted(found.evicted)
        increase(engine, self._refused, refused)
