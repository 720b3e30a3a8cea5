"""Text pages with dropped labels or buckets: the pod view, and any page that the filter changes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate

from sidestep.catalog.buckets import Bounds
from sidestep.exposition.aggregated_series import AggregatedSeries, Value
from sidestep.exposition.families import Family
from sidestep.exposition.grouping import Labels
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_format import (
    LABELS_PLACEHOLDER,
    format_number,
    header,
    histogram_template,
    label_text,
    series_text,
)
from sidestep.metrics.histogram import State
from sidestep.metrics.registry import Registry

MAX_TEXTS = 100_000


class AggregatedPage(AggregatedSeries):
    """Writes the series and buckets that ``series_filter`` leaves."""

    def __init__(self, registry: Registry, series_filter: SeriesFilter) -> None:
        super().__init__(registry, series_filter)
        self._heads: dict[tuple[str, str, str, bool], bytes] = {}
        self._pairs: dict[Labels, bytes] = {}
        self._templates: dict[tuple[str, Bounds, bool], bytes] = {}
        self._bound_indexes: dict[tuple[str, Bounds], tuple[int, ...] | None] = {}

    def pieces(
        self, *, openmetrics: bool = False, names: Collection[str] = ()
    ) -> Iterator[list[bytes]]:
        """Yield the page in pieces; the registry may change between two of them.

        Each family is of one moment. An empty piece means that the next one takes a while.
        """
        caches = (self._heads, self._pairs, self._templates, self._bound_indexes)
        if sum(len(one) for one in caches) > MAX_TEXTS:
            for one in caches:
                one.clear()
        self.refresh()
        for family in self.families(names):
            texts: list[bytes] = []
            is_first = True
            for found in self.series(family):
                if found is None:
                    yield [b"".join(texts)]
                    texts = []
                    continue
                if is_first:
                    texts.append(self._head(family, openmetrics=openmetrics))
                    is_first = False
                texts.append(self._text(family, *found))
            yield texts

    def _head(self, family: Family, *, openmetrics: bool) -> bytes:
        cache_key = family.name, family.kind, family.help, openmetrics
        known = self._heads.get(cache_key)
        if known is None:
            name, kind, text, _ = cache_key
            known = header(name, kind, text, openmetrics=openmetrics).encode()
            self._heads[cache_key] = known
        return known

    def _text(self, family: Family, labels: Labels, value: Value) -> bytes:
        pairs = self._pairs.get(labels)
        if pairs is None:
            pairs = self._pairs[labels] = label_text(dict(labels)).encode()
        if isinstance(value, tuple):
            return self._histogram(family, pairs, value)
        return f"{series_text(family.name, pairs.decode())}{format_number(value)}\n".encode()

    def samples_of(self, family: Family, value: Value) -> int:
        """Return the number of lines of a series."""
        if not isinstance(value, tuple):
            return 1
        bounds = value[0]
        if not bounds:
            return 3 if family.kind == "histogram" else 2
        indexes = self._shown(family, bounds)
        return 3 + len(bounds if indexes is None else indexes)

    def _shown(self, family: Family, bounds: Bounds) -> tuple[int, ...] | None:
        try:
            return self._bound_indexes[family.name, bounds]
        except KeyError:
            indexes = self.series_filter.shown_bounds(family.name, bounds) if bounds else None
            self._bound_indexes[family.name, bounds] = indexes
            return indexes

    def _histogram(self, family: Family, pairs: bytes, state: State) -> bytes:
        bounds, bucket_counts, total = state
        labelled = bool(pairs)
        indexes = self._shown(family, bounds)
        text = self._templates.get((family.name, bounds, labelled))
        if text is None:
            shown = bounds if indexes is None else tuple(bounds[index] for index in indexes)
            text = histogram_template(family.name, family.kind, shown, labelled=labelled)
            self._templates[family.name, bounds, labelled] = text
        counts = [*accumulate(bucket_counts)]
        buckets = counts
        if family.kind == "summary":
            buckets = []
        elif indexes is not None:
            buckets = [*(counts[index] for index in indexes), counts[-1]]
        return (text % (*buckets, counts[-1], total)).replace(LABELS_PLACEHOLDER, pairs)
