"""Application of items to engines, by dialect. No I/O and no clock: time is part of the item."""

from __future__ import annotations

from sidestep.catalog.slo import SLO_HANDLERS
from sidestep.engines.dialect import Dialects
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.handlers import Handlers
from sidestep.engines.items import Item
from sidestep.errors import CatalogueError, WireError
from sidestep.metrics.computed_gauges import scalar
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Number
from sidestep.metrics.merge import add_totals, check_totals
from sidestep.metrics.registry import Registry
from sidestep.metrics.self_described import add_samples
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.engine_totals import EngineTotals
from sidestep.protocol.self_described import Samples

COMMON_HANDLER = "refused_observations"
"""The handler of every dialect, which Samples items feed."""


class Applier:
    """Applies items to a registry's engines.

    Raises:
        CatalogueError: A dialect has no function for a row's handler or for an item, or the reverse.
    """

    def __init__(self, registry: Registry, dialects: Dialects = DIALECTS) -> None:
        self.registry = registry
        self.dialects = dialects
        self._handlers: dict[str, Handlers] = {}
        for name, layout in registry.layouts.items():
            dialect = dialects[name]
            # The histograms themselves count for objectives.
            handled = layout.handled.keys() - SLO_HANDLERS
            if unmatched := handled ^ {COMMON_HANDLER, *dialect.handlers.HANDLED}:
                raise CatalogueError(f"handlers without a function or a row: {unmatched}")
            handlers = self._handlers[name] = dialect.handlers(layout, registry)
            if items := handlers.appliers.keys() ^ set(dialect.items):
                raise CatalogueError(f"items without a function, or the reverse: {items}")

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: The item contradicts the catalogue or itself; nothing was changed.
        """
        registry = self.registry
        registry.touch(engine)
        handlers = self._handlers[engine.layout.dialect]
        tenants = handlers.tenants if registry.accounting.is_on else None
        if tenants is not None:
            tenants.begin(engine)
        if isinstance(item, Samples):
            add_samples(registry, engine, item)
        else:
            apply = handlers.appliers.get(type(item))
            if apply is None:
                raise WireError("bad_item", "an item of another dialect")
            apply(engine, item)
        if tenants is not None:
            tenants.settle(engine)

    def flush_block_lifetimes(self) -> None:
        """Observe a slice of the blocks that wait for it: a reset evicts many at once."""
        for engine in self.registry.engines.values():
            blocks = engine.part(Trackers).blocks
            if blocks is not None and blocks.waiting:
                self._handlers[engine.layout.dialect].observe_blocks(engine, blocks.drain())
                self.registry.touch(engine)
                break

    def add_totals(self, engine: Engine, added: EngineTotals) -> int:
        """Add totals of folded items; return how many observations had other bounds.

        Raises:
            WireError: See ``merge.add_totals`` and ``merge.check_totals``; or there are
                statistics that a server keeps, of which only the exporter can compute differences.
        """
        if added.totals.polled:
            raise WireError("bad_item", "statistics that a server keeps cannot be folded")
        check_totals(engine, added)
        totals = added.totals
        handlers = self._handlers[engine.layout.dialect]
        tenants = handlers.tenants if self.registry.accounting.is_on else None
        if tenants is not None:
            tenants.begin(engine)
        ended = _recorded(engine)
        if totals.cut_off is not None:
            tracker = self.registry.requests_of(engine)
            untracked = tracker.skip(totals.cut_off, totals.process, totals.processes)
            handlers.count_untracked(engine, untracked)
            # Only a core sends request events.
            if engine.feeds.front_ends:
                handlers.leave_to_front_ends(engine, added)
        if totals.blocks:
            self.abandon_blocks(engine)
        try:
            return add_totals(self.registry, engine, added)
        finally:
            # Where self-described families are refused, everything else has been added.
            handlers.lose_requests(engine, int(_recorded(engine) - ended))
            if tenants is not None:
                tenants.settle(engine)

    def abandon_blocks(self, engine: Engine) -> None:
        """Stop tracking the engine's blocks, since later events do not continue earlier ones."""
        self._handlers[engine.layout.dialect].abandon_blocks(engine)


def _recorded(engine: Engine) -> Number:
    return sum(scalar(engine, series.family) for series in engine.layout.tables.recorded)
