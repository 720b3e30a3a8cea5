"""Which engines a page shows in a family, and the text of their labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sidestep.catalog.layout import Placed
from sidestep.catalog.model import ENGINE_LABELS, Info
from sidestep.exposition.families import Family, present_engines, row_requirements, series_labels
from sidestep.exposition.text_format import label_text
from sidestep.metrics.engine import Engine, Key
from sidestep.metrics.registry import Registry

LabelForm = tuple[object, ...]
"""Of label sets: what decides which of an engine's labels are in one, but for own values."""


class Selection(NamedTuple):
    """Engines, and how they look: where ``looks`` are the same, so are all their labels."""

    engines: list[Engine]
    label_versions: list[int]


class Selections:
    """The engines of a registry that are shown now, each question asked once a moment."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._version = -1
        self._found: dict[tuple[str, bool, str], Selection] = {}

    def refresh(self) -> None:
        """Ask anew: a page begins."""
        self._version = -1

    def of_row(self, dialect: str, placed: Placed) -> Selection:
        """Those that may have samples of a dialect's row."""
        return self._get(dialect, *row_requirements(self._registry, dialect, placed))

    def of_all(self, *, live: bool) -> Selection:
        """Those of all dialects."""
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
    """These engines, as they look now."""
    return Selection(engines, [engine.looks for engine in engines])


class LabelTexts:
    """The text of engines' label sets, kept while an engine looks the same."""

    def __init__(self) -> None:
        self._by_version: dict[int, dict[tuple[LabelForm, Key], bytes]] = {}

    def text(self, engine: Engine, family: Family, form: LabelForm, names: Key, key: Key) -> bytes:
        """Labels of the child that has the values ``key`` of its own labels, which are ``names``."""
        known = self._by_version.get(engine.looks)
        if known is None:
            known = self._by_version[engine.looks] = {}
        text = known.get((form, key))
        if text is None:
            text = label_text(series_labels(engine, family, names, key)).encode()
            known[form, key] = text
        return text

    def retain(self, label_versions: Sequence[int]) -> None:
        """Forget all engines but those that look so."""
        for gone in self._by_version.keys() - set(label_versions):
            del self._by_version[gone]


def label_form(placed: Placed) -> LabelForm:
    """What rows have in common whose series have the same labels."""
    row = placed.row
    if isinstance(row.source, Info):
        return (row.name,)
    hidden = tuple(name for name in ENGINE_LABELS if name not in row.labels)
    return (row.own_labels, hidden, row.unless_empty)
