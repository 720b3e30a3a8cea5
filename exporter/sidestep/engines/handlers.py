"""The base class of the handlers that apply a dialect's items to an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines.items import Item
from sidestep.errors import WireError
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.protocol.records import Record
from sidestep.tracking.kv_blocks.tracker import BlockObservations


class Handlers:
    """Applies the items of one dialect, except ``Samples``, which all dialects share.

    A dialect sets ``appliers``, and overrides those of the other methods that its items need.

    Attributes:
        appliers: By class of the item, the function that adds it to an engine's series. It may
            raise WireError if the item contradicts the catalogue or itself, and then changes nothing.
    """

    HANDLED: ClassVar[Collection[str]] = ()
    """Names of the catalogue's handlers (``catalog.model.Handler``) that the class feeds."""

    def __init__(self, layout: Layout, registry: Registry) -> None:
        self.layout = layout
        self.registry = registry
        self.appliers: Mapping[type, Callable[[Engine, Any], None]] = {}

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: The item belongs to another dialect, or see ``appliers``.
        """
        apply = self.appliers.get(type(item))
        if apply is None:
            raise WireError("bad_item", "an item of another dialect")
        apply(engine, item)

    def observe_blocks(self, engine: Engine, found: BlockObservations) -> None:
        """Add what was observed of KV blocks."""

    def count_untracked(self, engine: Engine, found: Mapping[str, int]) -> None:
        """Count requests whose intervals cannot all be known, by reason."""

    def abandon_blocks(self, engine: Engine) -> None:
        """Abandon the engine's tracked blocks."""

    def begin(self, engine: Engine) -> None:
        """Prepare the counters of cost and of tenants for an item or a folded record."""

    def settle(self, engine: Engine) -> None:
        """Adapt the counters of cost and of tenants to the engine's own, after they have changed."""

    def lose_requests(self, engine: Engine, ended: int) -> None:
        """Count requests that have ended in a folded record, unseen."""

    def leave_to_front_ends(self, engine: Engine, record: Record) -> None:
        """Remove from a core's ``record`` the latencies that its front ends send."""


def is_fresh(engine: Engine, stamp: float) -> bool:
    """Return whether ``stamp`` is not older than the engine's gauges; if so, update their stamp."""
    if stamp < engine.gauge_stamp:
        return False
    engine.gauge_stamp = stamp
    return True


def increase(engine: Engine, slot: int, amount: int) -> None:
    """Add ``amount`` to the counter in ``slot``; even 0 makes the counter visible."""
    engine.values[slot] = (engine.values[slot] or 0) + amount
