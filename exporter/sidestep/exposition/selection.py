"""Which engines a page shows in a family, and the text of their labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import ENGINE_LABELS, Info
from sidestep.exposition.families import Family, asked, labels_with, present
from sidestep.exposition.text_format import pairs_text
from sidestep.metrics.engine import Engine, Key
from sidestep.metrics.registry import Registry

Form = tuple[object, ...]
"""Of label sets: what decides which of an engine's labels are in one, but for own values."""


class Roster(NamedTuple):
    """Engines, and how they look: where ``looks`` are the same, so are all their labels."""

    engines: list[Engine]
    looks: list[int]


class Rosters:
    """The engines of a registry that are shown now, each question asked once a moment."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._version = -1
        self._found: dict[tuple[str, bool, str], Roster] = {}

    def renew(self) -> None:
        """Ask anew: a page begins."""
        self._version = -1

    def of(self, dialect: str, placed: SlotAssignment) -> Roster:
        """Those that may have samples of a dialect's row."""
        return self._get(dialect, *asked(self._registry, dialect, placed))

    def all(self, *, live: bool) -> Roster:
        """Those of all dialects."""
        return self._get("", live, "")

    def _get(self, dialect: str, live: bool, feature: str) -> Roster:
        if self._version != self._registry.version:
            self._version = self._registry.version
            self._found.clear()
        wanted = dialect, live, feature
        found = self._found.get(wanted)
        if found is None:
            found = self._found[wanted] = roster(present(self._registry, *wanted))
        return found


def roster(engines: list[Engine]) -> Roster:
    """These engines, as they look now."""
    return Roster(engines, [engine.label_version for engine in engines])


class LabelTexts:
    """The text of engines' label sets, kept while an engine looks the same."""

    def __init__(self) -> None:
        self._by_looks: dict[int, dict[tuple[Form, Key], bytes]] = {}

    def of(self, engine: Engine, family: Family, form: Form, names: Key, key: Key) -> bytes:
        """Labels of the child that has the values ``key`` of its own labels, which are ``names``."""
        known = self._by_looks.get(engine.label_version)
        if known is None:
            known = self._by_looks[engine.label_version] = {}
        text = known.get((form, key))
        if text is None:
            text = pairs_text(labels_with(engine, family, names, key)).encode()
            known[form, key] = text
        return text

    def keep(self, looks: Sequence[int]) -> None:
        """Forget all engines but those that look so."""
        for gone in self._by_looks.keys() - set(looks):
            del self._by_looks[gone]


def form_of(placed: SlotAssignment) -> Form:
    """What rows have in common whose series have the same labels."""
    row = placed.row
    if isinstance(row.source, Info):
        return (row.name,)
    hidden = tuple(name for name in ENGINE_LABELS if name not in row.labels)
    return (row.own_labels, hidden, row.omits_empty_labels)
