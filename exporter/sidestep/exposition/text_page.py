"""Prometheus text 0.0.4 and OpenMetrics 1.0, of which all that has not changed is kept.

A page costs what changed since the one before. Its texts are kept in blocks of some engines of one
family, which both formats and all pages share: only headers differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from sidestep.exposition.families import Family, catalogued, described, is_shared, owns, spoken
from sidestep.exposition.open_sections import OpenSection, SharedSection
from sidestep.exposition.sections import HistogramSection, ScalarSection, Section
from sidestep.exposition.selection import LabelTexts, Rosters
from sidestep.exposition.text_format import header
from sidestep.metrics.engine import Key
from sidestep.metrics.registry import Registry


def render(registry: Registry, *, openmetrics: bool = False, names: Collection[str] = ()) -> bytes:
    """The engines' page, without OpenMetrics' closing line, from nothing."""
    found = Texts(registry).pieces(openmetrics=openmetrics, names=names)
    return b"".join(chain.from_iterable(found))


class _Kept:
    """A family and its texts."""

    def __init__(self, family: Family, labels: LabelTexts) -> None:
        self.family = family
        self._heads: dict[bool, bytes] = {}
        self._version = -1
        self._texts: Sequence[bytes] = ()
        self.sections: list[Section] = []
        if is_shared(family):
            self.sections.append(SharedSection(family, labels))
        elif not family.places:
            self.sections.append(OpenSection(family, "", None, labels))
        else:
            for dialect, placed in family.places.items():
                if placed.storage == "histogram":
                    self.sections.append(HistogramSection(family, dialect, placed, labels))
                elif placed.storage in ("scalars", "computed", "constant"):
                    self.sections.append(ScalarSection(family, dialect, placed, labels))
                else:
                    self.sections.append(OpenSection(family, dialect, placed, labels))

    def texts(self, version: int, rosters: Rosters) -> Iterator[bytes]:
        """Its samples now, in that ``version`` of the registry; nothing where a turn is due."""
        if version == self._version:
            return iter(self._texts)
        begun = [section.begin(rosters) for section in self.sections]
        return self._made(version, chain.from_iterable(begun))

    def _made(self, version: int, texts: Iterable[bytes]) -> Iterator[bytes]:
        # To copy the state of a thousand engines takes most of a slice.
        yield b""
        found: list[bytes] = []
        for text in texts:
            if text:
                found.append(text)
            yield text
        self._version, self._texts = version, found

    def head(self, *, openmetrics: bool) -> bytes:
        """The lines before its samples."""
        found = self._heads.get(openmetrics)
        if found is None:
            family = self.family
            text = header(family.name, family.kind, family.help, openmetrics=openmetrics)
            found = self._heads[openmetrics] = text.encode()
        return found


class Texts:
    """The texts of a registry's families, kept from page to page."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._rosters = Rosters(registry)
        self._labels = LabelTexts()
        self._dialects: frozenset[str] = frozenset()
        self._catalogued: list[_Kept] = []
        self._described: dict[tuple[str, str, str, Key], _Kept] = {}

    def pieces(
        self, *, openmetrics: bool = False, names: Collection[str] = ()
    ) -> Iterator[list[bytes]]:
        """The page, piece by piece; the registry may change between two of them.

        Each family is of one moment: that when its first piece is made. A piece may be empty,
        where the next one takes a while.
        """
        self._refresh()
        for kept in [*self._catalogued, *self._described.values()]:
            family = kept.family
            if names and not owns(family.name, family.kind, names):
                continue
            shown = False
            for text in kept.texts(self._registry.version, self._rosters):
                if text and not shown:
                    shown = True
                    yield [kept.head(openmetrics=openmetrics), text]
                else:
                    yield [text] if text else []
            yield []

    def _refresh(self) -> None:
        """See which families and engines there are now, and forget what was of others."""
        registry = self._registry
        self._rosters.renew()
        self._labels.keep([engine.label_version for engine in registry.engines.values()])
        dialects = spoken(registry)
        if dialects != self._dialects:
            self._dialects = dialects
            found = catalogued(registry, dialects)
            self._catalogued = [_Kept(family, self._labels) for family in found]
        before, self._described = self._described, {}
        for family in described(registry):
            name = family.name, family.kind, family.help, family.labels
            self._described[name] = before.get(name) or _Kept(family, self._labels)
