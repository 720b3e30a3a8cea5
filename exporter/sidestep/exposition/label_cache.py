"""Encoded labels of series, cached from page to page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import ENGINE_LABELS
from sidestep.exposition.families import Family, series_labels
from sidestep.exposition.family_snapshot import EngineSnapshot, HistogramCopy
from sidestep.metrics.engine import Engine, Key, Number

MAX_LABEL_SETS = 200_000
"""Label sets that a cache holds: four times what self-described families can have at once."""
PER_BATCH = 50
"""Series that are labelled at once: some 5 us each, when they are new."""

Encoded = TypeVar("Encoded")
LabelForm = tuple[object, ...]
"""Families with an equal form put the same engine labels into their series."""


def label_form(placed: SlotAssignment | None) -> LabelForm:
    """Return the form of a family's labels."""
    if placed is None:
        return ()
    row = placed.row
    return tuple(name for name in ENGINE_LABELS if name not in row.labels), row.omits_empty_labels


class LabelCache(Generic[Encoded]):
    """Encoded labels of series, cached until the labels of their engine may have changed.

    Args:
        encode: Encodes the labels of one series.
    """

    def __init__(self, encode: Callable[[dict[str, str]], Encoded]) -> None:
        self._encode = encode
        self._by_version: dict[int, dict[LabelForm, dict[Key, Encoded]]] = {}
        self._added = 0

    def get(
        self, engine: Engine, family: Family, form: LabelForm, names: Key, keys: Iterable[Key]
    ) -> list[Encoded]:
        """Return the labels of an engine's series; ``names`` and ``keys`` are their own labels."""
        known = self.known(engine, form, names)
        return [
            self.add(known, engine, family, names, key)
            if (found := known.get(key)) is None
            else found
            for key in keys
        ]

    def known(self, engine: Engine, form: LabelForm, names: Key) -> dict[Key, Encoded]:
        """Return the cached labels of an engine's series with the label ``names`` of their own."""
        by_form = self._by_version.get(engine.label_version)
        if by_form is None:
            by_form = self._by_version[engine.label_version] = {}
        known = by_form.get((names, form))
        if known is None:
            known = by_form[names, form] = {}
        return known

    def batches(
        self, family: Family, form: LabelForm, snapshot: EngineSnapshot[HistogramCopy]
    ) -> Iterator[list[tuple[Encoded, Number | HistogramCopy]]]:
        """Yield the labels and values of an engine's series, at most ``PER_BATCH`` at a time."""
        engine, names, children = snapshot
        for start in range(0, len(children), PER_BATCH):
            some = children[start : start + PER_BATCH]
            labels = self.get(engine, family, form, names, [key for key, _ in some])
            yield [(one, value) for one, (_, value) in zip(labels, some, strict=True)]

    def add(
        self, known: dict[Key, Encoded], engine: Engine, family: Family, names: Key, key: Key
    ) -> Encoded:
        """Encode the labels of a series, and add them to ``known``."""
        self._added += 1
        found = known[key] = self._encode(series_labels(engine, family, names, key))
        return found

    def retain(self, engines: Iterable[Engine]) -> None:
        """Drop the labels of other engines; drop all where there are too many."""
        for label_version in self._by_version.keys() - {engine.label_version for engine in engines}:
            del self._by_version[label_version]
        if self._added > MAX_LABEL_SETS:
            self._by_version, self._added = {}, 0
