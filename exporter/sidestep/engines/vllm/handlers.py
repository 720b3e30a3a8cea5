"""The handlers of vLLM's items: generated readers for plain fields, then the functions of handler rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.catalog.slo import SLO_HANDLERS
from sidestep.engines.handlers import Handlers
from sidestep.engines.items import Item, VllmRejection, VllmSleep, VllmStep
from sidestep.engines.vllm.event_handlers import EventHandlers
from sidestep.engines.vllm.stats_handlers import StatsHandlers
from sidestep.engines.vllm.wire import SchedulerStats
from sidestep.errors import WireError
from sidestep.metrics.engine import Engine
from sidestep.metrics.field_readers import compile_buffered_reader, compile_reader
from sidestep.metrics.observation_buffer import ObservationBuffer
from sidestep.metrics.registry import Registry
from sidestep.protocol.block_events import BlockEvents
from sidestep.protocol.request_events import RequestEvents
from sidestep.tracking.kv_blocks.physical import check as check_blocks
from sidestep.tracking.kv_blocks.tracker import Lives
from sidestep.tracking.requests.machine import check as check_events
from sidestep.tracking.requests.outcomes import Outcomes


class VllmHandlers(Handlers):
    """Applies vLLM's items to the engines of one registry."""

    HANDLED: ClassVar[Collection[str]] = {
        *StatsHandlers.HANDLED,
        *EventHandlers.HANDLED,
        *SLO_HANDLERS,
    }

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self._read_step = compile_reader(layout, registry, VllmStep)
        self._gather_step = compile_buffered_reader(layout, registry, VllmStep)
        self._buffers: dict[Engine, ObservationBuffer] = {}
        self._read_outcomes = compile_reader(layout, registry, Outcomes)
        self._stats = StatsHandlers(layout, registry)
        self._events = EventHandlers(layout, registry)

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: The item contradicts the catalogue or itself; nothing was changed.
        """
        _check_before_tracking(engine, item)
        match item:
            case VllmStep():
                self._step(engine, item)
            case RequestEvents():
                outcomes = self.registry.requests_of(engine).apply(item)
                self._read_outcomes(engine, outcomes, False)
                self._events.requests(engine, outcomes)
            case BlockEvents():
                self.observe_lifetimes(engine, self.registry.blocks_of(engine).blocks(item))
            case VllmSleep():
                self._stats.sleep(engine, item)
            case VllmRejection():
                self._stats.reject(engine, item)
            case _:
                raise WireError("bad_item", "an item of another dialect")

    def apply_buffered(self, engine: Engine, item: Item) -> bool:
        """Add a step; its observations are made by ``flush``. Return False for other items."""
        if not isinstance(item, VllmStep):
            return False
        buffer = self._buffers.get(engine)
        if buffer is None:
            buffer = self._buffers[engine] = ObservationBuffer(engine)
        self._step(engine, item, buffer)
        return True

    def flush(self) -> Iterator[Engine]:
        """Make the buffered observations; yield their engines."""
        while self._buffers:
            engine, buffer = self._buffers.popitem()
            if refused := buffer.flush():
                self._stats.omit(engine, refused)
            yield engine

    def observe_lifetimes(self, engine: Engine, lifetimes: Lives) -> None:
        """Observe lifetimes of blocks that ended."""
        self._events.blocks(engine, lifetimes)

    def count_untracked(self, engine: Engine, found: Mapping[str, int]) -> None:
        """Count requests whose intervals cannot all be known, by reason."""
        self._events.untracked_requests(engine, found)

    def abandon_blocks(self, engine: Engine) -> None:
        """Stop tracking all blocks of the engine."""
        self._events.abandon_blocks(engine)

    def _observe_scaled_evictions(self, engine: Engine, stats: SchedulerStats) -> None:
        """Observe blocks that the engine sampled itself, scaled by its sampling rate."""
        rate = engine.own_sample_rate
        if stats.kv_cache_eviction_events and rate is not None:
            blocks = self.registry.blocks_of(engine)
            self.observe_lifetimes(engine, blocks.evictions(stats.kv_cache_eviction_events, rate))
            stats.kv_cache_eviction_events = []

    def _step(
        self, engine: Engine, item: VllmStep, buffer: ObservationBuffer | None = None
    ) -> None:
        stats = item.scheduler
        if stats is not None and self.registry.sampling.scale:
            self._observe_scaled_evictions(engine, stats)
        # The rest of an oversized step has observations only: no gauges, and no step to count.
        fresh = not item.more and stats is not None and item.stamp >= engine.gauge_stamp
        if buffer is None:
            self._read_step(engine, item, fresh)
        else:
            self._gather_step(engine, item, fresh, buffer)
        if not item.more:
            self._stats.step(engine, item, buffer, fresh=fresh)
        if fresh and stats is not None:
            engine.gauge_stamp = item.stamp
            self._events.update_states(
                engine,
                stats.num_running_reqs,
                stats.num_waiting_reqs,
                stats.num_skipped_waiting_reqs,
            )


def _check_before_tracking(engine: Engine, item: Item) -> None:
    """Reject a malformed item before it makes the registry create a tracker."""
    if isinstance(item, RequestEvents) and engine.requests is None:
        check_events(item)
    elif isinstance(item, BlockEvents) and engine.blocks is None:
        check_blocks(item)
