"""The base class of the handlers that apply a dialect's items to an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines.tenant_counters import TenantCounters
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.engine_totals import EngineTotals
from sidestep.tracking.kv_blocks.tracker import BlockObservations


class Handlers:
    """Applies the items of one dialect, except ``Samples``, which all dialects share.

    A dialect sets ``appliers``, and overrides the methods that its items need.

    Attributes:
        appliers: By class of the item, the function that adds it to an engine's series. It may
            raise WireError if the item contradicts the catalogue or itself, and then changes nothing.
        tenants: Counters by tenant and of cost, of a dialect that has them.
    """

    HANDLED: ClassVar[Collection[str]] = ()
    """Names of the catalogue's handlers (``catalog.row.Handler``) that the class feeds."""

    def __init__(self, layout: Layout, registry: Registry) -> None:
        self.layout = layout
        self.registry = registry
        self.appliers: Mapping[type, Callable[[Engine, Any], None]] = {}
        self.tenants: TenantCounters | None = None

    def observe_blocks(self, engine: Engine, found: BlockObservations) -> None:
        """Add what was observed of KV blocks."""

    def count_untracked(self, engine: Engine, found: Mapping[str, int]) -> None:
        """Count requests whose intervals cannot all be known, by reason."""

    def abandon_blocks(self, engine: Engine) -> None:
        """Abandon the engine's tracked blocks: later events and lookups do not continue earlier ones."""
        lookups = engine.part(Trackers).lookups
        if lookups is not None:
            lookups.restart()

    def lose_requests(self, engine: Engine, ended: int) -> None:
        """Count requests that have ended in folded items, unseen."""

    def leave_to_front_ends(self, engine: Engine, added: EngineTotals) -> None:
        """Remove from ``added``, the totals of a core, the latencies that its front ends send."""


def is_fresh(engine: Engine, stamp: float) -> bool:
    """Return whether ``stamp`` is not older than the engine's gauges; if so, update their stamp."""
    if stamp < engine.gauge_stamp:
        return False
    engine.gauge_stamp = stamp
    return True


def increase(engine: Engine, slot: int, amount: int) -> None:
    """Add ``amount`` to the counter in ``slot``; even 0 makes the counter visible."""
    engine.values[slot] = (engine.values[slot] or 0) + amount
