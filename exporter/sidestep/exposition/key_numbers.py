"""The numbers of engines that ``KeySeries`` names, and which engines have them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from sidestep.catalog.dialect import KeySeries
from sidestep.catalog.layout import Layout
from sidestep.catalog.row import Row
from sidestep.exposition.aggregated_series import replica_of
from sidestep.metrics.engine import Engine
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


def can_have(engine: Engine, row: Row) -> bool:
    """Return whether the engine has the option and the labels of ``row``."""
    is_enabled = not row.feature or row.feature in engine.description.features
    return is_enabled and engine.labels.keys() >= set(row.shared)


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
