"""Handlers for those values of vLLM's statistics that depend on more than one field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines.handlers import increase
from sidestep.engines.vllm.wire import (
    CacheStats,
    SchedulerStats,
    VllmRejection,
    VllmSleep,
    VllmStep,
)
from sidestep.metrics.engine import Engine
from sidestep.metrics.recent_steps import EXTERNAL, MULTIMODAL, PREFIX, HitWindow, RecentSteps
from sidestep.metrics.registry import Registry
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.engine_totals import TOTAL_LIMIT
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import MAX_OPEN_VALUES, OTHER, is_printable


class StatsHandlers:
    """The functions that feed the handler rows of vLLM's statistics, for one layout."""

    HANDLED: ClassVar = {
        "cached_by_source", "cudagraph_padding", "cudagraph_tokens", "iteration_tokens", "lora",
        "lora_requests", "rejection", "sleep_state",
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        self.registry = registry
        handled = layout.handled
        self.iteration_tokens = layout.handler_slot("iteration_tokens")
        self.omitted = layout.handler_slot("refused_observations")
        self.cached_by_source = handled["cached_by_source"]
        self.sleep_state = handled["sleep_state"]
        self.rejection = handled["rejection"]
        self.refused = handled["refused_requests"]
        self.cudagraph_tokens = handled["cudagraph_tokens"]
        self.cudagraph_padding = handled["cudagraph_padding"]
        self.lora_requests = layout.handler_slot("lora_requests")
        self.lora = layout.handler_slot("lora")

    def step(self, engine: Engine, item: VllmStep, *, fresh: bool) -> None:
        """Apply a step after its plain fields."""
        if item.iteration is not None:
            self.count_tokens(engine, item.iteration, last=item.scheduler is not None)
        if item.mm_cache is not None:
            _observe_hits(engine.part(RecentSteps).hit_windows[MULTIMODAL], item.mm_cache)
        if item.scheduler is not None:
            self.scheduler(engine, item.scheduler, item.wall, fresh=fresh)

    def count_tokens(self, engine: Engine, iteration: IterationStats, *, last: bool) -> None:
        """Observe ``iteration_tokens_total`` once per engine step that had output.

        With several API servers, each reports its slice of the step, and the one that reports the
        scheduler's stats completes the step. Sum and count are exact at any time; a slice that
        arrives after its step was completed counts in the bucket of the next step.
        """
        tokens = iteration.iteration_tokens
        histogram, steps = engine.histogram(self.iteration_tokens), engine.part(RecentSteps)
        if not last:
            steps.held_tokens = min(steps.held_tokens + tokens, TOTAL_LIMIT)
            histogram.sum += tokens
            return
        before = histogram.sum
        if histogram.observe(tokens + steps.held_tokens):
            self.omit(engine, 1)
        else:
            # The sum contains the held tokens already. It is assigned, since subtracting floats
            # could decrease it.
            histogram.sum = before + tokens
        steps.held_tokens = 0

    def omit(self, engine: Engine, count: int) -> None:
        """Count observations that were refused."""
        increase(engine, self.omitted, count)

    def scheduler(self, engine: Engine, stats: SchedulerStats, wall: float, *, fresh: bool) -> None:
        """Apply hit rates, cache tiers, CUDA graphs and LoRA adapters."""
        if stats.prefix_cache_stats is not None:
            _observe_hits(engine.part(RecentSteps).hit_windows[PREFIX], stats.prefix_cache_stats)
            if stats.prefix_cache_stats.hits:
                self.registry.add(
                    engine, self.cached_by_source, "device", stats.prefix_cache_stats.hits
                )
        external = stats.connector_prefix_cache_stats
        if external is not None:
            _observe_hits(engine.part(RecentSteps).hit_windows[EXTERNAL], external)
            for tier, tokens in external.hits_by_source.items():
                self.registry.add(engine, self.cached_by_source, tier, tokens)
        graph = stats.cudagraph_stats
        if graph is not None:
            self.registry.add(
                engine, self.cudagraph_tokens, graph.runtime_mode, graph.num_unpadded_tokens
            )
            self.registry.add(
                engine, self.cudagraph_padding, graph.runtime_mode, graph.num_paddings
            )
        if fresh:
            self.adapters(engine, stats, wall)

    def adapters(self, engine: Engine, stats: SchedulerStats, wall: float) -> None:
        """Replace the series of LoRA adapters by those of the current adapters."""
        requests = engine.keyed[self.lora_requests]
        combination = engine.keyed[self.lora]
        now = _adapters(engine, stats)
        slots = engine.info.get("lora", {}).get("max_lora")
        # A plugin need not say how many adapters fit, nor that there may be any.
        has_lora = bool(now or combination or slots or "lora" in engine.description.features)
        requests.clear()
        combination.clear()
        if not has_lora:
            return
        names = dict.fromkeys(adapter for adapter, _ in now if is_printable(adapter))
        named = set(list(names)[:MAX_OPEN_VALUES])
        for (adapter, state), count in now.items():
            if adapter not in named:
                self.registry.limited["label_values"] += 1
            key = (adapter if adapter in named else OTHER, state)
            requests[key] = requests.get(key, 0) + count
        running, waiting = (
            ",".join(adapter for adapter, state in requests if state == wanted)
            for wanted in ("running", "waiting")
        )
        # Without adapters, too: a router that reads no combination keeps the last one it has read.
        combination[(slots or "", running, waiting)] = wall

    def sleep(self, engine: Engine, item: VllmSleep) -> None:
        """Set one of the three states to 1; none for a level that has no name."""
        awake, *asleep = self.sleep_state.slots[:-1]
        engine.values[awake] = int(not item.sleep)
        for level, slot in enumerate(asleep, start=1):
            engine.values[slot] = int(bool(item.sleep) and item.level == level)

    def reject(self, engine: Engine, item: VllmRejection) -> None:
        """Count a request that the front end rejected."""
        self.registry.add(engine, self.rejection, item.reason, 1)
        self.registry.add(engine, self.refused, item.reason, 1)


def _adapters(engine: Engine, stats: SchedulerStats) -> Mapping[tuple[str, str], int]:
    """Return the requests by adapter and state."""
    tracker = engine.part(Trackers).requests
    if tracker is not None:
        # Counts from the scheduler's events include queued requests, and list an adapter
        # under a state only if one of its requests is in that state.
        return tracker.requests.adapters
    if not stats.running_lora_adapters and not stats.waiting_lora_adapters:
        return {}
    by_state = {"running": stats.running_lora_adapters, "waiting": stats.waiting_lora_adapters}
    return {
        (adapter, state): count
        for state, adapters in by_state.items()
        for adapter, count in adapters.items()
    }


def _observe_hits(hits: HitWindow, stats: CacheStats) -> None:
    if stats.reset:
        hits.reset()
    if stats.requests:
        hits.add(stats.requests, stats.queries, stats.hits)
