"""The base class of the handlers that apply a dialect's items to an engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines.items import Item
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.tracking.kv_blocks.tracker import Lives


class Handlers:
    """Applies the items of one dialect, except ``Samples``, which all dialects share.

    A dialect overrides ``apply``, and those of the other methods that its items need.
    """

    HANDLED: ClassVar[Collection[str]] = ()
    """Names of the catalogue's handlers (``catalog.model.Handler``) that the class feeds."""

    def __init__(self, layout: Layout, registry: Registry) -> None:
        self.layout = layout
        self.registry = registry

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: The item belongs to another dialect or contradicts itself; nothing was changed.
        """
        raise NotImplementedError

    def apply_buffered(self, engine: Engine, item: Item) -> bool:
        """Add ``item``, whose observations may wait until ``flush``; return False if not supported."""
        del engine, item
        return False

    def flush(self) -> Iterable[Engine]:
        """Make the buffered observations; return their engines."""
        return ()

    def observe_lifetimes(self, engine: Engine, lifetimes: Lives) -> None:
        """Observe lifetimes of blocks that ended."""

    def count_untracked(self, engine: Engine, found: Mapping[str, int]) -> None:
        """Count requests whose intervals cannot all be known, by reason."""

    def abandon_blocks(self, engine: Engine) -> None:
        """Stop tracking all blocks of the engine."""
