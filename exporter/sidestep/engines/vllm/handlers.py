"""The handlers of vLLM's items: generated readers for plain fields, then the functions of handler rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import ClassVar

from sidestep.catalog.dialect import AvailabilityCounts
from sidestep.catalog.layout import Layout
from sidestep.engines.shared_rows import SERVICE_REQUESTS
from sidestep.engines.vllm.event_handlers import FAILED, EventHandlers
from sidestep.engines.vllm.wire import (
    CacheStats,
    SchedulerStats,
    VllmRejection,
    VllmSleep,
    VllmStep,
)
from sidestep.metrics.computed_gauges import scalar
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Number
from sidestep.metrics.field_readers import compile_reader
from sidestep.metrics.recent_steps import EXTERNAL, MULTIMODAL, PREFIX, HitWindow, RecentSteps
from sidestep.metrics.registry import Registry
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import MAX_OPEN_VALUES, OTHER, is_printable
from sidestep.protocol.messages import KV_TRANSFER
from sidestep.tracking.kv_blocks.physical import PhysicalBlocks

Counters = Callable[[Sequence[Number | None]], Sequence[Number | None]]


class VllmHandlers(EventHandlers):
    """Applies vLLM's items to the engines of one registry."""

    HANDLED: ClassVar[Collection[str]] = {
        *EventHandlers.HANDLED,
        "cached_by_source", "cudagraph_padding", "cudagraph_tokens", "iteration_tokens", "lora",
        "lora_requests", "rejection", "sleep_state",
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self.appliers = {
            **self.appliers,
            VllmStep: self._step,
            VllmSleep: self._sleep,
            VllmRejection: self._reject,
        }
        self._read_step = compile_reader(layout, registry, VllmStep)
        handled = layout.handled
        self._cached_by_source = handled["cached_by_source"]
        self._sleep_state = handled["sleep_state"]
        self._rejection = handled["rejection"]
        self._cudagraph_tokens = handled["cudagraph_tokens"]
        self._cudagraph_padding = handled["cudagraph_padding"]
        self._lora_requests = layout.handler_slot("lora_requests")
        self._lora = layout.handler_slot("lora")

    def _step(self, engine: Engine, item: VllmStep) -> None:
        stats = item.scheduler
        if stats is not None and self.registry.tracking.sampling.scale:
            self._observe_scaled_evictions(engine, stats)
        # The rest of an oversized step has observations only: no gauges, and no step to count.
        fresh = not item.more and stats is not None and item.stamp >= engine.gauge_stamp
        if item.front_end is not None:
            # Before they are observed, which sorts them.
            self.observe_front_end(engine, item.front_end)
        self._read_step(engine, item, fresh)
        if item.iteration is not None:
            self._count_tokens(engine, item, item.iteration)
        if not item.more:
            if item.mm_cache is not None:
                _observe_hits(engine.part(RecentSteps).hit_windows[MULTIMODAL], item.mm_cache)
            if stats is not None:
                self._scheduler(engine, stats, item.wall, fresh=fresh)
        if fresh and stats is not None:
            engine.gauge_stamp = item.stamp
            self.update_states(
                engine,
                stats.num_running_reqs,
                stats.num_waiting_reqs,
                stats.num_skipped_waiting_reqs,
            )
        if engine.missing_slots:
            engine.drop_missing()

    def _count_tokens(self, engine: Engine, item: VllmStep, iteration: IterationStats) -> None:
        prompts = iteration.prompt_token_stats
        if KV_TRANSFER in engine.info or (prompts and prompts.external_kv_transfer):
            self.service.leave_to_others(engine, iteration)
        if not item.more:
            is_slice = item.scheduler is None
            self.count_step_tokens(engine, iteration.iteration_tokens, is_slice=is_slice)

    def _observe_scaled_evictions(self, engine: Engine, stats: SchedulerStats) -> None:
        """Observe blocks that the engine sampled itself, scaled by its sampling rate."""
        rate = engine.own_sample_rate
        if stats.kv_cache_eviction_events and rate is not None:
            blocks = self.registry.blocks_of(engine, PhysicalBlocks)
            self.observe_blocks(engine, blocks.evictions(stats.kv_cache_eviction_events, rate))
            stats.kv_cache_eviction_events = []

    def _scheduler(
        self, engine: Engine, stats: SchedulerStats, wall: float, *, fresh: bool
    ) -> None:
        """Apply hit rates, cache tiers, CUDA graphs and LoRA adapters."""
        if stats.prefix_cache_stats is not None:
            _observe_hits(engine.part(RecentSteps).hit_windows[PREFIX], stats.prefix_cache_stats)
            if stats.prefix_cache_stats.hits:
                self.registry.add(
                    engine, self._cached_by_source, "device", stats.prefix_cache_stats.hits
                )
        external = stats.connector_prefix_cache_stats
        if external is not None:
            _observe_hits(engine.part(RecentSteps).hit_windows[EXTERNAL], external)
            for tier, tokens in external.hits_by_source.items():
                self.registry.add(engine, self._cached_by_source, tier, tokens)
        graph = stats.cudagraph_stats
        if graph is not None:
            self.registry.add(
                engine, self._cudagraph_tokens, graph.runtime_mode, graph.num_unpadded_tokens
            )
            self.registry.add(
                engine, self._cudagraph_padding, graph.runtime_mode, graph.num_paddings
            )
        if fresh:
            self._replace_adapters(engine, stats, wall)

    def _replace_adapters(self, engine: Engine, stats: SchedulerStats, wall: float) -> None:
        requests = engine.keyed[self._lora_requests]
        combination = engine.keyed[self._lora]
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

    def _sleep(self, engine: Engine, item: VllmSleep) -> None:
        """Set one of the three states to 1; none for a level that has no name."""
        awake, *asleep = self._sleep_state.slots[:-1]
        engine.values[awake] = int(not item.sleep)
        for level, slot in enumerate(asleep, start=1):
            engine.values[slot] = int(bool(item.sleep) and item.level == level)

    def _reject(self, engine: Engine, item: VllmRejection) -> None:
        self.registry.add(engine, self._rejection, item.reason, 1)
        self.registry.add(engine, self._refused, item.reason, 1)


def _adapters(engine: Engine, stats: SchedulerStats) -> Mapping[tuple[str, str], int]:
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


def availability_counts(engine: Engine) -> AvailabilityCounts:
    """Return how many requests were served, and how many were not."""
    # This runs for a thousand engines in one slice of the event loop, hence no Python loop.
    served, failed = _counters(engine.layout)
    values = engine.values
    return sum(filter(None, served(values))), sum(filter(None, failed(values)))


@functools.cache
def _counters(layout: Layout) -> tuple[Counters, Counters]:
    """Return getters for the counts of requests that were served, and of those that were not."""
    ends, rejections = map(layout.find, (SERVICE_REQUESTS, "vllm:admission_rejections_total"))
    failed = [ends.slots[ends.row.closed.index(reason)] for reason in FAILED]
    served = [slot for slot in ends.slots if slot not in failed]
    return itemgetter(*served), itemgetter(*failed, *rejections.slots)


def kv_capacity(engine: Engine) -> float | None:
    """Return the tokens that fit into the KV cache, by the engine's cache configuration."""
    config = engine.info.get("cache_config", {})
    try:
        # Not the product where layers differ in their cache; older releases have that alone.
        size = config.get("kv_cache_size_tokens")
        return int(size or 0) or int(config["num_gpu_blocks"]) * int(config["block_size"])
    except (KeyError, ValueError):
        return None


def _drafts(engine: Engine) -> tuple[Number, Number, Number]:
    prefix = "vllm:spec_decode_num_"
    return (
        scalar(engine, prefix + "drafts_total"),
        scalar(engine, prefix + "draft_tokens_total"),
        scalar(engine, prefix + "accepted_tokens_total"),
    )


def _acceptance_rate(engine: Engine) -> float | None:
    _, drafted, accepted = _drafts(engine)
    return accepted / drafted if drafted else None


def _efficiency(engine: Engine) -> float | None:
    drafts, drafted, accepted = _drafts(engine)
    return (accepted + drafts) / (drafted + drafts) if drafts else None


COMPUTED: Mapping[str, Callable[[Engine], float | None]] = {
    "draft_acceptance_rate": _acceptance_rate,
    "draft_efficiency": _efficiency,
}
"""Functions by the name in ``catalog.row.Computed``; None: no sample."""
