"""Which engines the live page and the statistics log show, which of them add up, and their key numbers."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from sidestep.exposition.aggregated_series import replica_of
from sidestep.exposition.live.samples import Readers, can_have, is_shown
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry


def has_requests(engine: Engine) -> bool:
    """Return whether the engine can have running requests."""
    running = Readers.of(engine.layout).running
    return running is not None and can_have(engine, running)


def key_number(engine: Engine, name: str) -> float | None:
    """Return the engine's number ``name`` of ``KeySeries``; None if its dialect names no such series."""
    read = Readers.of(engine.layout).key.get(name)
    return None if read is None else read(engine) or 0


def without_repeated_ranks(engines: Sequence[Engine]) -> list[Engine]:
    """Return ``engines`` without ranks that repeat what a lower rank of their replica reports."""
    mirrored = {
        engine
        for engine in engines
        if (running := Readers.of(engine.layout).running) is not None and running.mirrored
    }
    ranks = [(replica_of(engine.labels), engine) for engine in engines if engine in mirrored]
    ranks.sort(key=lambda each: each[0][1])
    lowest = {replica: engine for (replica, _), engine in reversed(ranks)}
    repeated = mirrored - {*lowest.values()}
    return [engine for engine in engines if engine not in repeated]


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

    Ranks that repeat others do not add up. If other engines push, nor do engines of a dialect with
    metric names of its own, such as native streams: the engine behind them usually pushes, too.
    """
    pushed = [engine for engine in engines if not engine.layout.tables.has_own_namespace] or engines
    ranks = without_repeated_ranks([engine for engine in pushed if has_requests(engine)])
    return {*ranks, *(engine for engine in pushed if not has_requests(engine))}
