"""An item into updates, by the plan. No I/O, no clock: time comes in with the item."""

from __future__ import annotations

from sidestep.registry import Engine, Registry
from sidestep.samples import add_samples
from sidestep.sections import Reads
from sidestep.vllm_hooks import VllmHooks
from sidestep.wire.items import Item, Samples, VllmRejection, VllmSleep, VllmStep


class Applier:
    """Applies items to a registry's engines."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._steps = {
            dialect: Reads(layout.root, layout, registry)
            for dialect, layout in registry.layouts.items()
        }
        self._vllm = {
            dialect: VllmHooks(layout, registry) for dialect, layout in registry.layouts.items()
        }

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: The item contradicts the catalogue; nothing was changed.
        """
        dialect = engine.layout.dialect
        match item:
            case VllmStep(more=True):
                self._steps[dialect].run(engine, item, fresh=False)
            case VllmStep():
                fresh = item.stamp >= engine.gauge_stamp and item.scheduler is not None
                self._steps[dialect].run(engine, item, fresh=fresh)
                self._vllm[dialect].step(engine, item, fresh=fresh)
                if fresh:
                    engine.gauge_stamp = item.stamp
            case Samples():
                add_samples(self.registry, engine, item)
            case VllmSleep():
                self._vllm[dialect].sleep(engine, item)
            case VllmRejection():
                self._vllm[dialect].reject(engine, item)
        self.registry.version += 1
