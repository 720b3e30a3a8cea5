"""What a page shows, at one moment."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sidestep.exposition.engine_values import EngineCopier, RegistryValues
from sidestep.exposition.own_families import OwnValues, own_values
from sidestep.exposition.passthrough.registry import PassthroughFamily, PassthroughRegistry
from sidestep.metrics.registry import Registry
from sidestep.telemetry.self_metrics import OwnRegistry


class PageValues(NamedTuple):
    """What a page shows, at one moment: engines, families passed on, and the exporter's own."""

    engines: RegistryValues
    passthrough: list[PassthroughFamily]
    own: OwnValues


class PageCopier:
    """Copies what a page shows, on the event loop; another thread can write what is copied."""

    def __init__(
        self, registry: Registry, passthrough: PassthroughRegistry, own: OwnRegistry
    ) -> None:
        self._engines = EngineCopier(registry)
        self._passthrough = passthrough
        self._own = own

    def copy(self, names: Collection[str] = (), *, with_gone: bool = False) -> PageValues:
        """Return the values of this moment.

        Args:
            names: Samples whose families are wanted, of those that are not engines'; empty for all.
            with_gone: Whether to include engines that are gone, which only sums need.
        """
        return PageValues(
            self._engines.copy(with_gone=with_gone),
            self._passthrough.families(names),
            own_values(self._own, names),
        )
