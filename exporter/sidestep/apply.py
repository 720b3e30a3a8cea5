"""An item into updates, by the plan. No I/O, no clock: time comes in with the item."""

from __future__ import annotations

from sidestep.reads import compile_reads
from sidestep.registry import Engine, Registry
from sidestep.samples import add_samples
from sidestep.vllm_hooks import VllmHooks
from sidestep.wire.items import Item, Samples, VllmRejection, VllmSleep, VllmStep


class Applier:
    """Applies items to a registry's engines."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        layout = registry.layouts["vllm"]
        self._read_vllm = compile_reads(layout, registry)
        self._vllm = VllmHooks(layout, registry)

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: The item contradicts the catalogue; nothing was changed.
        """
        self.registry.version += 1
        match item:
            case VllmStep():
                # What is left of an oversized step has neither gauges nor a step to count.
                fresh = (
                    not item.more
                    and item.scheduler is not None
                    and item.stamp >= engine.gauge_stamp
                )
                self._read_vllm(engine, item, fresh)
                if not item.more:
                    self._vllm.step(engine, item, fresh=fresh)
                if fresh:
                    engine.gauge_stamp = item.stamp
            case Samples():
                add_samples(self.registry, engine, item)
            case VllmSleep():
                self._vllm.sleep(engine, item)
            case VllmRejection():
                self._vllm.reject(engine, item)
