"""Application of items to engines, by dialect. No I/O and no clock: time is part of the item."""

from __future__ import annotations

from sidestep.engines.dialects import DIALECTS
from sidestep.engines.handlers import Handlers
from sidestep.engines.items import Item
from sidestep.errors import CatalogueError, WireError
from sidestep.metrics import validate_record
from sidestep.metrics.engine import Engine
from sidestep.metrics.merge import add_record
from sidestep.metrics.registry import Registry
from sidestep.metrics.self_described import add_samples
from sidestep.protocol.records import Record
from sidestep.protocol.self_described import Samples

COMMON_HANDLERS = {"refused_observations"}
"""Handlers of every dialect, which Samples items feed."""


class Applier:
    """Applies items to a registry's engines.

    Raises:
        CatalogueError: A row names a handler that its dialect does not have, or the reverse.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._handlers: dict[str, Handlers] = {}
        for name, layout in registry.layouts.items():
            unmatched = set(layout.handled) ^ (
                COMMON_HANDLERS | set(DIALECTS[name].handlers.HANDLED)
            )
            if unmatched:
                raise CatalogueError(f"handlers without a function or a row: {unmatched}")
            self._handlers[name] = DIALECTS[name].handlers(layout, registry)

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: The item contradicts the catalogue or itself; nothing was changed.
        """
        self.registry.touch(engine)
        if isinstance(item, Samples):
            add_samples(self.registry, engine, item)
        else:
            self._handlers[engine.layout.dialect].apply(engine, item)

    def apply_buffered(self, engine: Engine, item: Item) -> bool:
        """Add ``item``, whose observations may wait until ``flush``.

        Return whether the item is of a kind that gains from that; if not, nothing was done.
        """
        return self._handlers[engine.layout.dialect].apply_buffered(engine, item)

    def flush(self) -> None:
        """Make the buffered observations."""
        for handlers in self._handlers.values():
            for engine in handlers.flush():
                self.registry.touch(engine)

    def flush_block_lifetimes(self) -> None:
        """Observe a part of the pending block lifetimes: a cache that was reset has many."""
        for engine in self.registry.engines.values():
            if engine.blocks is not None and engine.blocks.waiting:
                handlers = self._handlers[engine.layout.dialect]
                handlers.observe_lifetimes(engine, engine.blocks.tell())
                self.registry.touch(engine)
                break

    def add_record(self, engine: Engine, record: Record) -> int:
        """Add a record that a sender folded; return how many observations had other bounds.

        Raises:
            WireError: See ``merge.add_record`` and ``validate_record.check``; or the record has
                statistics that a server keeps, of which only the exporter can compute differences.
        """
        if record.totals.looked:
            raise WireError("bad_item", "statistics that a server keeps cannot be folded")
        validate_record.check(engine, record)
        totals = record.totals
        if totals.cut_off is not None:
            untracked = self.registry.requests_of(engine).skip(totals.cut_off)
            self._handlers[engine.layout.dialect].count_untracked(engine, untracked)
        if totals.blocks:
            self.abandon_blocks(engine)
        try:
            moved = add_record(self.registry, engine, record)
        finally:
            # Families that were refused are no longer in the record; everything else counts.
            validate_record.count_slo(engine, record)
        return moved

    def abandon_blocks(self, engine: Engine) -> None:
        """Stop tracking the engine's blocks, since later events do not continue earlier ones."""
        self._handlers[engine.layout.dialect].abandon_blocks(engine)
