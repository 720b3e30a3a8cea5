"""The handlers of vLLM's items: generated readers for plain fields, then the functions of handler rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines.vllm.event_handlers import EventHandlers
from sidestep.engines.vllm.stats_handlers import StatsHandlers
from sidestep.engines.vllm.wire import SchedulerStats, VllmRejection, VllmSleep, VllmStep
from sidestep.metrics.engine import Engine
from sidestep.metrics.field_readers import compile_reader
from sidestep.metrics.registry import Registry
from sidestep.tracking.kv_blocks.physical import PhysicalBlocks


class VllmHandlers(EventHandlers):
    """Applies vLLM's items to the engines of one registry."""

    HANDLED: ClassVar[Collection[str]] = {*StatsHandlers.HANDLED, *EventHandlers.HANDLED}

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self._read_step = compile_reader(layout, registry, VllmStep)
        self._stats = StatsHandlers(layout, registry)
        self.appliers = {
            **self.appliers,
            VllmStep: self._step,
            VllmSleep: self._stats.sleep,
            VllmRejection: self._stats.reject,
        }

    def _observe_scaled_evictions(self, engine: Engine, stats: SchedulerStats) -> None:
        """Observe blocks that the engine sampled itself, scaled by its sampling rate."""
        rate = engine.own_sample_rate
        if stats.kv_cache_eviction_events and rate is not None:
            blocks = self.registry.blocks_of(engine, PhysicalBlocks)
            self.observe_blocks(engine, blocks.evictions(stats.kv_cache_eviction_events, rate))
            stats.kv_cache_eviction_events = []

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
        if not item.more:
            self._stats.step(engine, item, fresh=fresh)
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
