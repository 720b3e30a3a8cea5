"""Which engines the live page shows, and which of them add up to all engines as one."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from sidestep.exposition.key_numbers import has_requests, without_repeated_ranks
from sidestep.exposition.live.samples import is_shown
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry


class ShownEngines:
    """The shown engines of a registry, which are found again only after an engine has changed its labels.

    Attributes:
        engines: Engines of which there is something to show.
        hidden: The others, such as an HTTP server's.
        summed: Shown ones that count in the row of all engines.
    """

    def __init__(self, registry: Registry) -> None:
        self.engines: Sequence[Engine] = ()
        self.hidden: Sequence[Engine] = ()
        self.summed: AbstractSet[Engine] = frozenset()
        self._registry = registry
        self._versions: Sequence[int] = ()

    def refresh(self) -> None:
        """Find the engines of this moment."""
        engines = [*self._registry.engines.values()]
        versions = [engine.label_version for engine in engines]
        if versions != self._versions:
            self._versions = versions
            self.engines = [engine for engine in engines if is_shown(engine)]
            shown = {*self.engines}
            self.hidden = [engine for engine in engines if engine not in shown]
            self.summed = _summed(self.engines)


def _summed(engines: Sequence[Engine]) -> AbstractSet[Engine]:
    """Return the engines that add up.

    Ranks that repeat others do not. Nor do engines of a dialect with names of its own, such as
    native streams, where there are others: the engine itself usually pushes, too.
    """
    pushed = [engine for engine in engines if not engine.layout.tables.has_own_namespace] or engines
    ranks = without_repeated_ranks([engine for engine in pushed if has_requests(engine)])
    return {*ranks, *(engine for engine in pushed if not has_requests(engine))}
