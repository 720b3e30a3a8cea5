"""Text pages, Prometheus 0.0.4 and OpenMetrics 1.0, that rewrite only what has changed.

The text of a family is cached in blocks of some engines, which both formats and all pages share:
only headers differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from sidestep.exposition.families import (
    Family,
    active_dialects,
    catalogue_families,
    has_sample_name,
    is_shared,
    self_described_families,
)
from sidestep.exposition.open_sections import OpenSection, SharedSection
from sidestep.exposition.sections import HistogramSection, ScalarSection, Section
from sidestep.exposition.selection import LabelTexts, Selections
from sidestep.exposition.text_format import header
from sidestep.metrics.engine import Key
from sidestep.metrics.registry import Registry


def render(registry: Registry, *, openmetrics: bool = False, names: Collection[str] = ()) -> bytes:
    """Return the engines' page without cached text and without the closing line of OpenMetrics."""
    found = TextPage(registry).pieces(openmetrics=openmetrics, names=names)
    return b"".join(chain.from_iterable(found))


class _FamilyTexts:
    """A family and its cached text."""

    def __init__(self, family: Family, labels: LabelTexts) -> None:
        self.family = family
        self._heads: dict[bool, bytes] = {}
        self._version = -1
        self._texts: Sequence[bytes] = ()
        self.sections: list[Section] = []
        if is_shared(family):
            self.sections.append(SharedSection(family, labels))
        elif not family.assignments:
            self.sections.append(OpenSection(family, "", None, labels))
        else:
            for dialect, placed in family.assignments.items():
                if placed.storage == "histogram":
                    self.sections.append(HistogramSection(family, dialect, placed, labels))
                elif placed.storage in ("scalars", "computed", "constant"):
                    self.sections.append(ScalarSection(family, dialect, placed, labels))
                else:
                    self.sections.append(OpenSection(family, dialect, placed, labels))

    def texts(self, version: int, selections: Selections) -> Iterator[bytes]:
        """Yield its samples at this ``version`` of the registry; an empty text asks to yield."""
        if version == self._version:
            return iter(self._texts)
        begun = [section.begin(selections) for section in self.sections]
        return self._made(version, chain.from_iterable(begun))

    def _made(self, version: int, texts: Iterable[bytes]) -> Iterator[bytes]:
        # Copying the state of a thousand engines takes most of a slice.
        yield b""
        found: list[bytes] = []
        for text in texts:
            if text:
                found.append(text)
            yield text
        self._version, self._texts = version, found

    def head(self, *, openmetrics: bool) -> bytes:
        """Return the HELP and TYPE lines."""
        found = self._heads.get(openmetrics)
        if found is None:
            family = self.family
            text = header(family.name, family.kind, family.help, openmetrics=openmetrics)
            found = self._heads[openmetrics] = text.encode()
        return found


class TextPage:
    """The text of a registry's families, cached from page to page."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._selections = Selections(registry)
        self._labels = LabelTexts()
        self._dialects: frozenset[str] = frozenset()
        self._catalogued: list[_FamilyTexts] = []
        self._described: dict[tuple[str, str, str, Key], _FamilyTexts] = {}

    def pieces(
        self, *, openmetrics: bool = False, names: Collection[str] = ()
    ) -> Iterator[list[bytes]]:
        """Yield the page in pieces; the registry may change between two of them.

        Each family is of one moment: that of its first piece. An empty piece means that the next
        one takes a while.
        """
        self._refresh()
        for cached in [*self._catalogued, *self._described.values()]:
            family = cached.family
            if names and not has_sample_name(family.name, family.kind, names):
                continue
            shown = False
            for text in cached.texts(self._registry.version, self._selections):
                if text and not shown:
                    shown = True
                    yield [cached.head(openmetrics=openmetrics), text]
                else:
                    yield [text] if text else []
            yield []

    def _refresh(self) -> None:
        """Read the present families and engines, and drop the text of others."""
        registry = self._registry
        self._selections.refresh()
        self._labels.retain([engine.label_version for engine in registry.engines.values()])
        dialects = active_dialects(registry)
        if dialects != self._dialects:
            self._dialects = dialects
            found = catalogue_families(registry, dialects)
            self._catalogued = [_FamilyTexts(family, self._labels) for family in found]
        before, self._described = self._described, {}
        for family in self_described_families(registry):
            name = family.name, family.kind, family.help, family.labels
            self._described[name] = before.get(name) or _FamilyTexts(family, self._labels)
