"""Selection of the engines that a page exposes in a family, and the text of their labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import ENGINE_LABELS, Info
from sidestep.exposition.families import Family, present_engines, row_requirements, series_labels
from sidestep.exposition.text_format import label_text
from sidestep.metrics.engine import Engine, Key
from sidestep.metrics.registry import Registry

LabelForm = tuple[object, ...]
"""Rows with an equal form put the same engine labels into their series."""


class Selection(NamedTuple):
    """Engines and their label versions; equal versions mean that all labels are equal."""

    engines: list[Engine]
    label_versions: list[int]


class Selections:
    """Engines by the requirements of a row, cached for one version of the registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._version = -1
        self._found: dict[tuple[str, bool, str], Selection] = {}

    def refresh(self) -> None:
        """Start a page: select again."""
        self._version = -1

    def of_row(self, dialect: str, placed: SlotAssignment) -> Selection:
        """Return the engines that may have samples of a dialect's row."""
        return self._get(dialect, *row_requirements(self._registry, dialect, placed))

    def of_all(self, *, live: bool) -> Selection:
        """Return the engines of all dialects."""
        return self._get("", live, "")

    def _get(self, dialect: str, live: bool, feature: str) -> Selection:
        if self._version != self._registry.version:
            self._version = self._registry.version
            self._found.clear()
        wanted = dialect, live, feature
        found = self._found.get(wanted)
        if found is None:
            found = self._found[wanted] = selection(present_engines(self._registry, *wanted))
        return found


def selection(engines: list[Engine]) -> Selection:
    """Return ``engines`` with their present label versions."""
    return Selection(engines, [engine.label_version for engine in engines])


class LabelTexts:
    """Text of label sets, cached until an engine's label version changes."""

    def __init__(self) -> None:
        self._by_version: dict[int, dict[tuple[LabelForm, Key], bytes]] = {}

    def text(self, engine: Engine, family: Family, form: LabelForm, names: Key, key: Key) -> bytes:
        """Return the label text of one series; ``names`` and ``key`` are its own labels."""
        known = self._by_version.get(engine.label_version)
        if known is None:
            known = self._by_version[engine.label_version] = {}
        text = known.get((form, key))
        if text is None:
            text = label_text(series_labels(engine, family, names, key)).encode()
            known[form, key] = text
        return text

    def retain(self, label_versions: Sequence[int]) -> None:
        """Drop the texts of all but these label versions."""
        for gone in self._by_version.keys() - set(label_versions):
            del self._by_version[gone]


def label_form(placed: SlotAssignment) -> LabelForm:
    """Return the form of a row's labels."""
    row = placed.row
    if isinstance(row.source, Info):
        return (row.name,)
    hidden = tuple(name for name in ENGINE_LABELS if name not in row.labels)
    return (row.own_labels, hidden, row.omits_empty_labels)
