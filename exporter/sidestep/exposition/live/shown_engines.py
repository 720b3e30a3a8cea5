"""Which engines the live page and the statistics log show, which of them add up, and their key numbers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from sidestep.catalog.dialect import KeySeries
from sidestep.catalog.layout import Layout
from sidestep.exposition.aggregated_series import replica_of
from sidestep.exposition.live.samples import can_have, is_shown
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.metrics.series import NumberReader, number_reader


class _KeyNumbers:
    """Readers of the series that a dialect's ``KeySeries`` names, for all engines with one layout."""

    def __init__(self, layout: Layout, named: KeySeries) -> None:
        self.running = layout.find(named.running.family).row
        self.readers: Mapping[str, NumberReader] = {
            field.name: number_reader(layout, series)
            for field in dataclasses.fields(named)
            if (series := getattr(named, field.name)) is not None
        }

    @staticmethod
    @functools.cache
    def of(layout: Layout) -> _KeyNumbers | None:
        named = layout.tables.key_series
        return None if named is None else _KeyNumbers(layout, named)


def has_requests(engine: Engine) -> bool:
    """Return whether the engine can have running requests."""
    numbers = _KeyNumbers.of(engine.layout)
    return numbers is not None and can_have(engine, numbers.running)


def without_repeated_ranks(engines: Sequence[Engine]) -> list[Engine]:
    """Return ``engines`` without ranks that repeat what a lower rank of their replica reports."""

    def is_mirrored(engine: Engine) -> bool:
        numbers = _KeyNumbers.of(engine.layout)
        return numbers is not None and numbers.running.mirrored

    ranks = [(replica_of(engine.labels), engine) for engine in engines if is_mirrored(engine)]
    ranks.sort(key=lambda each: each[0][1])
    lowest = {replica: engine for (replica, _), engine in reversed(ranks)}
    first = set(lowest.values())
    return [engine for engine in engines if engine in first or not is_mirrored(engine)]


def key_number(engine: Engine, name: str) -> float | None:
    """Return the engine's number ``name`` of ``KeySeries``; None if its dialect names no such series."""
    numbers = _KeyNumbers.of(engine.layout)
    read = None if numbers is None else numbers.readers.get(name)
    return None if read is None else read(engine) or 0


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
