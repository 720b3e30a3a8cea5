"""An item into updates, by the plan. No I/O, no clock: time comes in with the item."""

from __future__ import annotations

from sidestep.core_hooks import CoreHooks
from sidestep.errors import CatalogueError
from sidestep.lifecycle.outcomes import Outcomes
from sidestep.reads import compile_reads
from sidestep.registry import Engine, Registry
from sidestep.samples import add_samples
from sidestep.vllm_hooks import VllmHooks
from sidestep.wire.blocks import BlockEvents, CacheEvents
from sidestep.wire.items import Item, Samples, VllmRejection, VllmSleep, VllmStep
from sidestep.wire.requests import RequestEvents


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
        self.registry.version += 1
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
                blocks = self.registry.blocks_of(engine)
                self._core.blocks(engine, blocks, blocks.blocks(item))
            case CacheEvents():
                blocks = self.registry.blocks_of(engine)
                self._core.blocks(engine, blocks, blocks.cache(item))
            case VllmSleep():
                self._vllm.sleep(engine, item)
            case VllmRejection():
                self._vllm.reject(engine, item)
        if engine.blocks is not None and engine.blocks.waiting:
            # A cache that was emptied is told of a slice at a time, whatever comes next.
            self._core.blocks(engine, engine.blocks, engine.blocks.tell())

    def _step(self, engine: Engine, item: VllmStep) -> None:
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
