"""What each of vLLM's items does to an engine: the plan's plain fields, then the hooks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.catalog.slo import SLO_HANDLERS
from sidestep.engines.handlers import Handlers
from sidestep.engines.items import Item, VllmRejection, VllmSleep, VllmStep
from sidestep.engines.vllm.event_handlers import CoreHooks
from sidestep.engines.vllm.stats_handlers import VllmHooks
from sidestep.engines.vllm.wire import SchedulerStats
from sidestep.errors import WireError
from sidestep.metrics.engine import Engine
from sidestep.metrics.field_readers import compile_buffered_reader, compile_reader
from sidestep.metrics.gathered_observations import ObservationBuffer
from sidestep.metrics.registry import Registry
from sidestep.protocol.block_events import BlockEvents
from sidestep.protocol.request_events import RequestEvents
from sidestep.tracking.kv_blocks.physical import check as check_blocks
from sidestep.tracking.kv_blocks.tracker import Lives
from sidestep.tracking.requests.machine import check as check_events
from sidestep.tracking.requests.outcomes import Outcomes


class VllmHandlers(Handlers):
    """Applies them to one registry's engines of the dialect."""

    FED: ClassVar[Collection[str]] = {*VllmHooks.FED, *CoreHooks.FED, *SLO_HANDLERS}

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self._read_step = compile_reader(layout, registry, VllmStep)
        self._gather_step = compile_buffered_reader(layout, registry, VllmStep)
        self._gathered: dict[Engine, ObservationBuffer] = {}
        self._read_outcomes = compile_reader(layout, registry, Outcomes)
        self._vllm = VllmHooks(layout, registry)
        self._core = CoreHooks(layout, registry)

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: The item contradicts the catalogue or itself; nothing was changed.
        """
        _check_first(engine, item)
        match item:
            case VllmStep():
                self._step(engine, item)
            case RequestEvents():
                outcomes = self.registry.requests_of(engine).apply(item)
                self._read_outcomes(engine, outcomes, False)
                self._core.requests(engine, outcomes)
            case BlockEvents():
                self.lives(engine, self.registry.blocks_of(engine).blocks(item))
            case VllmSleep():
                self._vllm.sleep(engine, item)
            case VllmRejection():
                self._vllm.reject(engine, item)
            case _:
                raise WireError("bad_item", "an item of another dialect")

    def gather(self, engine: Engine, item: Item) -> bool:
        """Add a step; what it observes is not there before ``settle``."""
        if not isinstance(item, VllmStep):
            return False
        gathered = self._gathered.get(engine)
        if gathered is None:
            gathered = self._gathered[engine] = ObservationBuffer(engine)
        self._step(engine, item, gathered)
        return True

    def settle(self) -> Iterator[Engine]:
        """Observe what was gathered; the engines that it was of."""
        while self._gathered:
            engine, gathered = self._gathered.popitem()
            if refused := gathered.settle():
                self._vllm.omit(engine, refused)
            yield engine

    def lives(self, engine: Engine, lives: Lives) -> None:
        """Lives of blocks that ended."""
        self._core.blocks(engine, lives)

    def untracked(self, engine: Engine, found: Mapping[str, int]) -> None:
        """Requests whose intervals cannot all be known, by reason."""
        self._core.untracked_requests(engine, found)

    def abandon(self, engine: Engine) -> None:
        """Let go of all lives of the engine's blocks."""
        self._core.abandon(engine)

    def _scale(self, engine: Engine, stats: SchedulerStats) -> None:
        """Blocks that the engine sampled itself count for all they stand for."""
        rate = engine.own_sample_rate
        if stats.kv_cache_eviction_events and rate is not None:
            blocks = self.registry.blocks_of(engine)
            self.lives(engine, blocks.evictions(stats.kv_cache_eviction_events, rate))
            stats.kv_cache_eviction_events = []

    def _step(
        self, engine: Engine, item: VllmStep, gathered: ObservationBuffer | None = None
    ) -> None:
        stats = item.scheduler
        if stats is not None and self.registry.sampling.scale:
            self._scale(engine, stats)
        # What is left of an oversized step has neither gauges nor a step to count.
        fresh = not item.more and stats is not None and item.stamp >= engine.gauge_stamp
        if gathered is None:
            self._read_step(engine, item, fresh)
        else:
            self._gather_step(engine, item, fresh, gathered)
        if not item.more:
            self._vllm.step(engine, item, gathered, fresh=fresh)
        if fresh and stats is not None:
            engine.gauge_stamp = item.stamp
            self._core.states_of(
                engine,
                stats.num_running_reqs,
                stats.num_waiting_reqs,
                stats.num_skipped_waiting_reqs,
            )


def _check_first(engine: Engine, item: Item) -> None:
    """Refuse what nothing follows yet before it is followed: it would leave that behind."""
    if isinstance(item, RequestEvents) and engine.requests is None:
        check_events(item)
    elif isinstance(item, BlockEvents) and engine.blocks is None:
        check_blocks(item)
