"""Text pages, Prometheus 0.0.4 and OpenMetrics 1.0, that rewrite only what has changed.

The text of a family is cached from page to page. Both formats share it, as only headers differ, until
there are exemplars: only OpenMetrics has them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from sidestep.exposition.aggregate import aggregate_states
from sidestep.exposition.aggregated_series import AggregatedSeries, Labels, Series
from sidestep.exposition.families import (
    Family,
    active_dialects,
    catalogue_families,
    has_sample_name,
    is_shared,
    self_described_families,
)
from sidestep.exposition.family_snapshot import NUMBERS, histogram_state, snapshot_family
from sidestep.exposition.label_cache import LabelCache
from sidestep.exposition.sections import NumberSection, Section, SeriesWriter
from sidestep.exposition.selection import Selections
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_format import header, label_text
from sidestep.metrics.engine import Key, Number
from sidestep.metrics.histogram import State
from sidestep.metrics.registry import Registry


def render(registry: Registry, *, openmetrics: bool = False, names: Collection[str] = ()) -> bytes:
    """Return the engines' page without cached text and without the closing line of OpenMetrics."""
    page = TextPage(registry, exemplars=openmetrics)
    found = page.pieces(openmetrics=openmetrics, names=names)
    return b"".join(chain.from_iterable(found))


class TextPage:
    """The text of a registry's families, cached from page to page.

    Args:
        series_filter: Labels and buckets to leave out.
        exemplars: Whether it has exemplars.
    """

    def __init__(
        self,
        registry: Registry,
        series_filter: SeriesFilter | None = None,
        *,
        exemplars: bool = False,
    ) -> None:
        self.registry = registry
        self.exemplars = exemplars
        self.series_filter = series_filter or SeriesFilter()
        self.selections = Selections(registry)
        self.labels: LabelCache[bytes] = LabelCache(lambda labels: label_text(labels).encode())
        self.aggregated = AggregatedSeries(registry, self.series_filter.dropped_labels)
        self._dialects: frozenset[str] = frozenset()
        self._catalogued: list[FamilyText] = []
        self._described: dict[tuple[str, str, str, Key], FamilyText] = {}

    def pieces(
        self, *, openmetrics: bool = False, names: Collection[str] = ()
    ) -> Iterator[list[bytes]]:
        """Yield the page in pieces; the registry may change between two of them.

        Each family is of one moment: that of its first piece. An empty piece means that the next
        one takes a while.
        """
        for cached in self.families(names):
            is_first = True
            for texts in cached.texts():
                if is_first and texts:
                    is_first = False
                    yield [cached.header(openmetrics=openmetrics)]
                yield texts

    def families(self, names: Collection[str] = ()) -> list[FamilyText]:
        """Start a page: return the present families, and drop the text of others."""
        registry = self.registry
        self.selections.refresh()
        self.labels.retain(registry.engines.values())
        self.aggregated.refresh()
        dialects = active_dialects(registry)
        if dialects != self._dialects:
            self._dialects = dialects
            found = catalogue_families(registry, dialects)
            self._catalogued = [FamilyText(self, family) for family in found]
        before, self._described = self._described, {}
        for family in self_described_families(registry):
            form = family.name, family.kind, family.help, family.labels
            self._described[form] = before.get(form) or FamilyText(self, family)
        cached = [*self._catalogued, *self._described.values()]
        if not names:
            return cached
        return [one for one in cached if has_sample_name(one.family.name, one.family.kind, names)]


class FamilyText:
    """A family of a page, and its cached text."""

    def __init__(self, page: TextPage, family: Family) -> None:
        self.family = family
        self.writer = SeriesWriter(family, page.series_filter, exemplars=page.exemplars)
        self._page = page
        self._headers: dict[bool, bytes] = {}
        self._version = -1
        self._texts: list[bytes] = []
        self._sections: list[Section | NumberSection] = []
        if not page.series_filter.dropped_labels and not is_shared(family):
            self._sections = [
                Section(family, placed, page.labels, self.writer)
                if placed is None or placed.storage not in NUMBERS
                else NumberSection(family, placed, page.labels, self.writer)
                for placed in (family.assignments.values() or [None])
            ]

    def texts(self) -> Iterator[list[bytes]]:
        """Yield its present samples, at times none, in steps."""
        version = self._page.registry.version
        if version == self._version:
            return iter([self._texts])
        if not self._sections:
            found = self._page.aggregated.series(self.family, histogram_state, aggregate_states)
            return self._written(version, self._aggregated(found))
        parts = self._page.selections.parts(self.family)
        begun = [
            section.begin(engines)
            for section, (_, engines) in zip(self._sections, parts, strict=True)
        ]
        return self._written(version, chain.from_iterable(begun))

    def values(self) -> Iterator[Number | State | None]:
        """Yield the value of each series; None asks to yield to the event loop."""
        page = self._page
        if self._sections:
            for _, _, children in snapshot_family(page.registry, self.family, histogram_state):
                yield from [value for _, value in children]
                yield None
            return
        for one in page.aggregated.series(self.family, histogram_state, aggregate_states):
            yield None if one is None else one[1]

    def header(self, *, openmetrics: bool) -> bytes:
        """Return the HELP and TYPE lines."""
        found = self._headers.get(openmetrics)
        if found is None:
            family = self.family
            text = header(family.name, family.kind, family.help, openmetrics=openmetrics)
            found = self._headers[openmetrics] = text.encode()
        return found

    def _written(self, version: int, steps: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
        # Copying the state of a thousand engines takes most of a slice.
        yield []
        found: list[bytes] = []
        for step in steps:
            texts = [text for text in step if text]
            found += texts
            yield texts
        self._version, self._texts = version, found

    def _aggregated(self, found: Iterable[Series[State] | None]) -> Iterator[list[bytes]]:
        lines: list[bytes] = []
        for one in found:
            if one is None:
                yield [b"".join(lines)]
                lines = []
            else:
                labels, value = one
                lines.append(self.writer.text(_pairs(labels), value))
        yield [b"".join(lines)]


@functools.lru_cache(maxsize=100_000)
def _pairs(labels: Labels) -> bytes:
    return label_text(dict(labels)).encode()
