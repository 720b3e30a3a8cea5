"""An item into updates, by its engine's dialect. No I/O, no clock: time comes in with the item."""

from __future__ import annotations

from sidestep.engines.dialects import DIALECTS
from sidestep.engines.handlers import Handlers
from sidestep.engines.items import Item
from sidestep.errors import CatalogueError, WireError
from sidestep.metrics.engine import Engine
from sidestep.metrics.merge import add_record
from sidestep.metrics.registry import Registry
from sidestep.metrics.self_described import add_samples
from sidestep.metrics.validate_record import check as check_folded
from sidestep.metrics.validate_record import count_slo as judge_folded
from sidestep.protocol.records import Record
from sidestep.protocol.self_described import Samples

ANYBODYS = {"refused_observations"}
"""Hooks of every dialect: Samples feed them."""


class Applier:
    """Applies items to a registry's engines.

    Raises:
        CatalogueError: A row's hook has no function, or a function no row.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._of: dict[str, Handlers] = {}
        for name, layout in registry.layouts.items():
            unmatched = set(layout.handled) ^ (ANYBODYS | set(DIALECTS[name].handlers.FED))
            if unmatched:
                raise CatalogueError(f"hooks without a function or a row: {unmatched}")
            self._of[name] = DIALECTS[name].handlers(layout, registry)

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: The item contradicts the catalogue or itself; nothing was changed.
        """
        self.registry.touch(engine)
        if isinstance(item, Samples):
            add_samples(self.registry, engine, item)
        else:
            self._of[engine.layout.dialect].apply(engine, item)

    def gather(self, engine: Engine, item: Item) -> bool:
        """Add one of many items, whose observations may wait for ``settle``.

        Whether it is of the kind that gains from that; where not, nothing was done.
        """
        return self._of[engine.layout.dialect].gather(engine, item)

    def settle(self) -> None:
        """Make the observations that wait."""
        for handlers in self._of.values():
            for engine in handlers.settle():
                self.registry.touch(engine)

    def drain(self) -> None:
        """Tell of a slice of the lives that wait for it: a cache that was emptied has many."""
        for engine in self.registry.engines.values():
            if engine.blocks is not None and engine.blocks.waiting:
                self._of[engine.layout.dialect].lives(engine, engine.blocks.tell())
                self.registry.touch(engine)
                break

    def add(self, engine: Engine, record: Record) -> int:
        """Add what a sender folded; how many observations had foreign bounds.

        Raises:
            WireError: See ``merge.add_record`` and ``folded.check``; or it has statistics that a
                server keeps, which only the exporter can take the difference of.
        """
        if record.totals.looked:
            raise WireError("bad_item", "statistics that a server keeps cannot be folded")
        check_folded(engine, record)
        totals = record.totals
        if totals.cut_off is not None:
            untracked = self.registry.requests_of(engine).skip(totals.cut_off)
            self._of[engine.layout.dialect].untracked(engine, untracked)
        if totals.blocks:
            self.abandon(engine)
        try:
            moved = add_record(self.registry, engine, record)
        finally:
            # What was refused is not in it any more, and all else counts.
            judge_folded(engine, record)
        return moved

    def abandon(self, engine: Engine) -> None:
        """Let go of all lives of the engine's blocks: what comes does not continue them."""
        self._of[engine.layout.dialect].abandon(engine)
