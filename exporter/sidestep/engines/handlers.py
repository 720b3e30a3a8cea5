"""Handlers: what the items of one dialect do to an engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines.items import Item
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.tracking.kv_blocks.tracker import BlockObservations


class Handlers:
    """Applies the items of one dialect, all but ``Samples``, which every dialect has.

    A dialect overrides ``apply``, and of the rest what its items need.
    """

    FED: ClassVar[Collection[str]] = ()
    """The hooks of its catalogue that it feeds."""

    def __init__(self, layout: Layout, registry: Registry) -> None:
        self.layout = layout
        self.registry = registry

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: Another dialect's, or at odds with itself; nothing was changed.
        """
        raise NotImplementedError

    def gather(self, engine: Engine, item: Item) -> bool:
        """Add one of many items, whose observations may wait for ``settle``; ``False``: not added."""
        del engine, item
        return False

    def settle(self) -> Iterable[Engine]:
        """Make the observations that wait; return the engines that they are of."""
        return ()

    def observe_blocks(self, engine: Engine, found: BlockObservations) -> None:
        """Add what was observed of KV blocks."""

    def untracked(self, engine: Engine, found: Mapping[str, int]) -> None:
        """Count requests whose intervals cannot all be known, by reason."""

    def abandon(self, engine: Engine) -> None:
        """Abandon the engine's tracked blocks."""
