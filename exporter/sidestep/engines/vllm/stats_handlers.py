"""What vLLM's items mean beyond their plain fields: more than one field decides."""

from __future__ import annotations

from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines.items import VllmRejection, VllmSleep, VllmStep
from sidestep.engines.vllm.wire import CacheStats, SchedulerStats
from sidestep.metrics.engine import Engine
from sidestep.metrics.gathered_observations import ObservationBuffer
from sidestep.metrics.hit_window import HitWindow
from sidestep.metrics.registry import Registry
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import MAX_OPEN_VALUES, OTHER, is_printable
from sidestep.protocol.records import TOTAL_LIMIT


class VllmHooks:
    """The functions behind the catalogue's hooks, for one layout."""

    FED: ClassVar = {
        "cached_by_source", "cudagraph_padding", "cudagraph_tokens", "iteration_tokens", "lora",
        "lora_requests", "rejection", "sleep_state",
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        self.registry = registry
        hook = layout.handled
        self.iteration_tokens = hook["iteration_tokens"].slots[0]
        self.omitted = hook["refused_observations"].slots[0]
        self.cached_by_source = hook["cached_by_source"]
        self.sleep_state = hook["sleep_state"]
        self.rejection = hook["rejection"]
        self.refused = hook["refused_requests"]
        self.cudagraph_tokens = hook["cudagraph_tokens"]
        self.cudagraph_padding = hook["cudagraph_padding"]
        self.lora_requests = hook["lora_requests"].slots[0]
        self.lora = hook["lora"].slots[0]

    def step(
        self, engine: Engine, item: VllmStep, gathered: ObservationBuffer | None, *, fresh: bool
    ) -> None:
        """After the plain fields of a step; ``gathered`` takes the observations of one of many."""
        if item.iteration is not None:
            is_last = item.scheduler is not None
            if gathered is not None and is_last and not engine.held_tokens:
                gathered.columns[self.iteration_tokens].append(item.iteration.iteration_tokens)
            else:
                if gathered is not None and (refused := gathered.observe(self.iteration_tokens)):
                    self.omit(engine, refused)
                self.count_tokens(engine, item.iteration, last=is_last)
        if item.mm_cache is not None:
            _observe_hits(engine.mm_hits, item.mm_cache)
        if item.scheduler is not None:
            self.scheduler(engine, item.scheduler, item.wall, fresh=fresh)

    def count_tokens(self, engine: Engine, iteration: IterationStats, *, last: bool) -> None:
        """Observe ``iteration_tokens_total`` once per engine step that had output.

        With several API servers each sees a slice of the step and one of them,
        by the scheduler's stats, the step itself. Sum and count are exact at any
        moment; a slice that arrives after its step's own falls into the bucket
        of the next step.
        """
        tokens = iteration.iteration_tokens
        histogram = engine.histogram(self.iteration_tokens)
        if not last:
            engine.held_tokens = min(engine.held_tokens + tokens, TOTAL_LIMIT)
            histogram.sum += tokens
            histogram.state_token = None
            return
        before = histogram.sum
        if histogram.observe(tokens + engine.held_tokens):
            self.omit(engine, 1)
        else:
            # What was held is in the sum already; set, since a difference of floats can shrink.
            histogram.sum = before + tokens
        engine.held_tokens = 0

    def omit(self, engine: Engine, count: int) -> None:
        """Count observations that were left out."""
        engine.values[self.omitted] = (engine.values[self.omitted] or 0) + count

    def scheduler(self, engine: Engine, stats: SchedulerStats, wall: float, *, fresh: bool) -> None:
        """Hit rates, cache tiers, CUDA graphs and LoRA adapters."""
        if stats.prefix_cache_stats is not None:
            _observe_hits(engine.prefix_hits, stats.prefix_cache_stats)
            if stats.prefix_cache_stats.hits:
                self.registry.add(
                    engine, self.cached_by_source, "device", stats.prefix_cache_stats.hits
                )
        external = stats.connector_prefix_cache_stats
        if external is not None:
            _observe_hits(engine.external_hits, external)
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
        """The current LoRA adapters, and none from before."""
        requests = engine.keyed[self.lora_requests]
        combination = engine.keyed[self.lora]
        requests.clear()
        combination.clear()
        if engine.requests is not None:
            # Counted by the scheduler's own events: queued requests are among them, and an
            # adapter is in the list of a state only where a request of its own is in it.
            now = engine.requests.requests.adapters
        elif not stats.running_lora_adapters and not stats.waiting_lora_adapters:
            return
        else:
            by_state = {
                "running": stats.running_lora_adapters,
                "waiting": stats.waiting_lora_adapters,
            }
            now = {
                (adapter, state): count
                for state, adapters in by_state.items()
                for adapter, count in adapters.items()
            }
        if not now:
            return
        names = dict.fromkeys(adapter for adapter, _ in now if is_printable(adapter))
        named = set(list(names)[:MAX_OPEN_VALUES])
        for (adapter, state), count in now.items():
            if adapter not in named:
                self.registry.limited["label_values"] += 1
            key = (adapter if adapter in named else OTHER, state)
            requests[key] = requests.get(key, 0) + count
        max_lora = engine.info.get("lora", {}).get("max_lora", "")
        running, waiting = (
            ",".join(adapter for adapter, state in requests if state == wanted)
            for wanted in ("running", "waiting")
        )
        combination[(max_lora, running, waiting)] = wall

    def sleep(self, engine: Engine, item: VllmSleep) -> None:
        """One of the three states is 1; none at a level the engine does not name."""
        awake, *asleep = self.sleep_state.slots[:-1]
        engine.values[awake] = int(not item.sleep)
        for level, slot in enumerate(asleep, start=1):
            engine.values[slot] = int(bool(item.sleep) and item.level == level)

    def reject(self, engine: Engine, item: VllmRejection) -> None:
        """A request that never reached the engine."""
        self.registry.add(engine, self.rejection, item.reason, 1)
        self.registry.add(engine, self.refused, item.reason, 1)


def _observe_hits(hits: HitWindow, stats: CacheStats) -> None:
    if stats.reset:
        hits.reset()
    if stats.requests:
        hits.add(stats.requests, stats.queries, stats.hits)
