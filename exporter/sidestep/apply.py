"""An item into updates, by the plan. No I/O, no clock: time comes in with the item."""

from __future__ import annotations

from sidestep.core_hooks import CoreHooks
from sidestep.engine import Engine
from sidestep.errors import CatalogueError
from sidestep.folded import check as check_folded
from sidestep.lifecycle.machine import check as check_events
from sidestep.lifecycle.outcomes import Outcomes
from sidestep.merge import add_record
from sidestep.reads import compile_reads
from sidestep.registry import Registry
from sidestep.residency.cached import check as check_changes
from sidestep.residency.physical import check as check_blocks
from sidestep.samples import add_samples
from sidestep.vllm_hooks import VllmHooks
from sidestep.wire.blocks import BlockEvents, CacheEvents
from sidestep.wire.items import Item, Samples, VllmRejection, VllmSleep, VllmStep
from sidestep.wire.requests import RequestEvents
from sidestep.wire.totals import Record
from sidestep.wire.vllm import SchedulerStats


class Applier:
    """Applies items to a registry's engines.

    Raises:
        CatalogueError: A row's hook has no function, or a function no row.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        layout = registry.layouts["vllm"]
        unmatched = set(layout.hooks) ^ (VllmHooks.FED | CoreHooks.FED)
        if unmatched:
            raise CatalogueError(f"hooks without a function or a row: {unmatched}")
        self._read_vllm = compile_reads(layout, registry, VllmStep)
        self._read_outcomes = compile_reads(layout, registry, Outcomes)
        self._vllm = VllmHooks(layout, registry)
        self._core = CoreHooks(layout, registry)

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: The item contradicts the catalogue or itself; nothing was changed.
        """
        self.registry.touch(engine)
        _check_first(engine, item)
        match item:
            case VllmStep():
                self._step(engine, item)
            case RequestEvents():
                outcomes = self.registry.requests_of(engine).apply(item)
                self._read_outcomes(engine, outcomes, False)
                self._core.requests(engine, outcomes)
            case Samples():
                add_samples(self.registry, engine, item)
            case BlockEvents():
                self._core.blocks(engine, self.registry.blocks_of(engine).blocks(item))
            case CacheEvents():
                self._core.blocks(engine, self.registry.blocks_of(engine).cache(item))
            case VllmSleep():
                self._vllm.sleep(engine, item)
            case VllmRejection():
                self._vllm.reject(engine, item)

    def drain(self) -> None:
        """Tell of a slice of the lives that wait for it: a cache that was emptied has many."""
        for engine in self.registry.engines.values():
            if engine.blocks is not None and engine.blocks.waiting:
                self._core.blocks(engine, engine.blocks.tell())
                self.registry.touch(engine)
                break

    def add(self, engine: Engine, record: Record) -> int:
        """Add what a sender folded; how many observations had foreign bounds.

        Raises:
            WireError: See ``merge.add_record`` and ``folded.check``.
        """
        check_folded(engine, record)
        totals = record.totals
        if totals.cut_off is not None:
            untracked = self.registry.requests_of(engine).skip(totals.cut_off)
            self._core.untracked_requests(engine, untracked)
        if totals.blocks:
            self.abandon(engine)
        return add_record(self.registry, engine, record)

    def abandon(self, engine: Engine) -> None:
        """Let go of all lives of the engine's blocks: what comes does not continue them."""
        self._core.abandon(engine)

    def _scale(self, engine: Engine, stats: SchedulerStats) -> None:
        """Blocks that the engine sampled itself count for all they stand for."""
        rate = engine.own_sample_rate
        if stats.kv_cache_eviction_events and rate is not None:
            blocks = self.registry.blocks_of(engine)
            lives = blocks.evictions(stats.kv_cache_eviction_events, rate)
            self._core.blocks(engine, lives)
            stats.kv_cache_eviction_events = []

    def _step(self, engine: Engine, item: VllmStep) -> None:
        if self.registry.sampling.scale and item.scheduler is not None:
            self._scale(engine, item.scheduler)
        # What is left of an oversized step has neither gauges nor a step to count.
        fresh = not item.more and item.scheduler is not None and item.stamp >= engine.gauge_stamp
        self._read_vllm(engine, item, fresh)
        if not item.more:
            self._vllm.step(engine, item, fresh=fresh)
        if fresh and item.scheduler is not None:
            stats = item.scheduler
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
    elif isinstance(item, CacheEvents) and engine.blocks is None:
        check_changes(item.changes)
