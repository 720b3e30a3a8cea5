"""Encoded labels of series, cached from page to page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from sidestep.exposition.engine_values import EngineValues
from sidestep.exposition.families import Family, series_labels
from sidestep.metrics.engine import Key

MAX_LABEL_SETS = 200_000
"""Label sets that a cache holds: four times what self-described families can have at once."""

Encoded = TypeVar("Encoded")


class LabelCache(Generic[Encoded]):
    """Encoded labels of series, cached until the labels of their engine may have changed.

    Args:
        encode: Encodes the labels of one series.
    """

    def __init__(self, encode: Callable[[dict[str, str]], Encoded]) -> None:
        self._encode = encode
        self._by_version: dict[int, dict[object, dict[Key, Encoded]]] = {}
        self._count = 0

    def get(
        self, engine: EngineValues, family: Family, names: Key, keys: Iterable[Key]
    ) -> list[Encoded]:
        """Return the labels of an engine's series; ``names`` and ``keys`` are their own labels."""
        known = self._known(engine, family, names)
        return [
            self._added(known, engine, family, names, key)
            if (found := known.get(key)) is None
            else found
            for key in keys
        ]

    def _known(self, engine: EngineValues, family: Family, names: Key) -> dict[Key, Encoded]:
        """Return the cached labels of an engine's series with the label ``names`` of their own."""
        by_form = self._by_version.get(engine.label_version)
        if by_form is None:
            by_form = self._by_version[engine.label_version] = {}
        form = family.label_form(engine, names)
        known = by_form.get(form)
        if known is None:
            known = by_form[form] = {}
        return known

    def _added(
        self, known: dict[Key, Encoded], engine: EngineValues, family: Family, names: Key, key: Key
    ) -> Encoded:
        self._count += 1
        found = known[key] = self._encode(series_labels(engine, family, names, key))
        return found

    def retain(self, engines: Iterable[EngineValues]) -> None:
        """Drop the labels of other engines; drop all where there are too many."""
        for label_version in self._by_version.keys() - {engine.label_version for engine in engines}:
            del self._by_version[label_version]
        if self._count > MAX_LABEL_SETS:
            self._by_version, self._count = {}, 0
