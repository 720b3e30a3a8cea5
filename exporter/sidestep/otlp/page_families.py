"""The families of the page as series to send: engines', passthrough, and the exporter's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import NamedTuple

import msgspec

from sidestep.catalog.buckets import Bounds
from sidestep.exposition.aggregated_series import rebucketed
from sidestep.exposition.engine_values import RegistryValues
from sidestep.exposition.families import Family
from sidestep.exposition.family_series import (
    Observed,
    SampleFamily,
    collected,
    family_series,
    passed_on,
    series_of,
    whole,
)
from sidestep.exposition.own_families import OwnValues
from sidestep.exposition.pages import PageCopier
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_page import bound_text
from sidestep.metrics.engine_state import Number
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeHistogram

NANOS = 1_000_000_000


class Exponential(msgspec.Struct, frozen=True):
    """The value of a histogram with native buckets: counts by index of schema ``scale``."""

    scale: int
    zeros: int
    buckets: dict[int, int]
    total: float


Classic = tuple[Bounds, list[int], float]
"""Bounds, counts and sum of a histogram; a summary has no bounds, and one count."""
Value = Number | Classic | Exponential
"""Value of a series; the kind of the family says what a number is."""


class Series(NamedTuple):
    """A series to send.

    Attributes:
        start: Unix time in nanoseconds at which counting began; 0 where unknown.
    """

    labels: Mapping[str, str]
    value: Value
    start: int = 0


class SeriesFamily(NamedTuple):
    """A family and its series.

    Their values are those of the moment at which the family was copied. The rest of the work is done
    when ``series`` is read, which a thread may do.
    """

    name: str
    kind: str
    help: str
    series: Iterable[Series]


class PageFamilies:
    """Reads the families of the page.

    Args:
        exponential: Whether histograms with native buckets are read with those.
    """

    def __init__(
        self, copier: PageCopier, series_filter: SeriesFilter, *, exponential: bool
    ) -> None:
        self.copier = copier
        self._began = int(copier.own.metrics.created * NANOS)
        self._filter = series_filter
        self._exponential = exponential
        self._oldest = 0.0
        """When the oldest engine began: series of several engines must not start later than before."""

    async def copy(self) -> Iterator[SeriesFamily]:
        """Copy the values of all families at this moment, and return the families."""
        values = await self.copier.copy(with_gone=bool(self._filter.dropped_labels))
        passthrough = chain.from_iterable(_sampled(passed_on(each)) for each in values.passthrough)
        return chain(self._of_engines(values.engines), passthrough, self._of_exporter(values.own))

    def _of_engines(self, values: RegistryValues) -> Iterator[SeriesFamily]:
        created = [engine.created for engine in values.engines]
        self._oldest = min([*created, *filter(None, [self._oldest])], default=0.0)
        for family, series in family_series(values, dropped_labels=self._filter.dropped_labels):
            kind = "histogram" if family.kind == "summary" else family.kind
            found = (
                self._series(
                    family,
                    labels,
                    value,
                    int((self._oldest if engine is None else engine.created) * NANOS),
                )
                for labels, value, engine in series
            )
            yield SeriesFamily(family.name, kind, family.help, found)

    def _series(
        self, family: Family, labels: Mapping[str, str], value: Number | Histogram, start: int
    ) -> Series:
        if not isinstance(value, Histogram):
            return Series(labels, value, start)
        if self._exponential and isinstance(value, NativeHistogram):
            exponential = Exponential(value.schema, value.zeros, value.buckets, value.sum)
            return Series(labels, exponential, int(value.created * NANOS) or start)
        bounds, counts = value.bounds, [*value.counts]
        if family.kind == "summary":
            bounds, counts = (), [sum(counts)]
        places = self._filter.shown_bounds(family.name, bounds) if bounds else None
        if places is not None:
            shown = tuple(bounds[place] for place in places)
            bounds, counts = shown, rebucketed(bounds, counts, shown)
        return Series(labels, (bounds, counts, value.sum), start)

    def _of_exporter(self, values: OwnValues) -> Iterator[SeriesFamily]:
        for row, samples in values.families:
            series = [
                Series(dict(zip(row.labels, labels, strict=True)), value, self._began)
                for labels, value in samples
            ]
            yield SeriesFamily(row.name, row.kind, row.help, series)
        for metric in values.others:
            for family in collected(metric):
                yield from _sampled(family)


def _sampled(family: SampleFamily) -> Iterator[SeriesFamily]:
    """Yield a family of samples; the quantiles of a summary, which OTLP's SDK lacks, are gauges."""
    kind = "histogram" if family.kind == "summary" else family.kind
    yield SeriesFamily(family.name, kind, family.help, _sampled_series(family))
    quantiles = [
        Series({**dict(found.labels), "quantile": bound_text(quantile)}, value)
        for found in series_of(family)
        if family.kind == "summary" and isinstance(found.value, Observed)
        for quantile, value in found.value.bounded
    ]
    if quantiles:
        yield SeriesFamily(family.name, "gauge", family.help, quantiles)


def _sampled_series(family: SampleFamily) -> Iterator[Series]:
    for found in series_of(family):
        value, start = found.value, int(found.created * NANOS)
        if not isinstance(value, Observed):
            yield Series(dict(found.labels), value, start)
            continue
        bounds: Bounds = ()
        if family.kind == "histogram":
            bounds = tuple(bound for bound, _ in value.bounded if bound != float("inf"))
        upto = [0, *(whole(count) for _, count in value.bounded[: len(bounds)]), value.count]
        # A page may have any counts; those of a bucket cannot be negative.
        counts = [max(count - before, 0) for before, count in pairwise(upto)]
        yield Series(dict(found.labels), (bounds, counts, value.total), start)
