"""The families of the page as series to send: engines', passthrough, and the exporter's own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from sidestep.catalog.buckets import Bounds
from sidestep.exposition.aggregated_series import (
    AggregatedSeries,
    aggregate_histograms,
    aggregate_native,
    rebucketed,
)
from sidestep.exposition.engine_values import RegistryValues
from sidestep.exposition.families import Family, families, series_labels
from sidestep.exposition.own_families import OwnValues
from sidestep.exposition.pages import PageCopier, PageValues
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.sample_families import (
    Observed,
    SampledSeries,
    SampleFamily,
    collected,
    passed_on,
    series_of,
    whole,
)
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.metrics.engine import Number
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeHistogram
from sidestep.metrics.registry import Registry
from sidestep.telemetry.self_metrics import OwnRegistry

NANOS = 1_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """The value of a summary: count, sum, and values by quantile."""

    count: int
    total: float
    quantiles: Sequence[tuple[float, float]] = ()


Classic = tuple[Bounds, Sequence[int], float]
"""Bounds, counts and sum of a histogram."""
Value = Number | Classic | NativeHistogram | Summary
"""Value of a series; the kind of the family says what a number is."""


class Series(NamedTuple):
    """A series to send.

    Attributes:
        key: Equal in two pushes if labels, bucket bounds, quantiles and start are equal.
        labels: Returns the labels.
        start: Unix time in nanoseconds at which counting began; 0 where unknown.
    """

    key: Hashable
    labels: Callable[[], Mapping[str, str]]
    value: Value
    start: int = 0


class SeriesFamily(NamedTuple):
    """A family and its series."""

    name: str
    kind: str
    help: str
    series: Iterator[Series]


class PageFamilies:
    """Reads the families of the page.

    Args:
        registry: The engines.
        passthrough: Families of other exporters.
        own: The exporter's own collectors.
        series_filter: Labels, families and buckets to leave out.
        exponential: Whether histograms with native buckets are read with those.
    """

    def __init__(
        self,
        registry: Registry,
        passthrough: PassthroughRegistry,
        own: OwnRegistry,
        series_filter: SeriesFilter,
        *,
        exponential: bool,
    ) -> None:
        self._copier = PageCopier(registry, passthrough, own)
        self._began = int(own.metrics.created * NANOS)
        self._filter = series_filter
        self._exponential = exponential
        self._aggregated = AggregatedSeries(series_filter.dropped_labels)
        self._oldest = 0.0
        """When the oldest engine began: series of several engines must not start later than before."""

    def copy(self) -> PageValues:
        """Return what the page shows at this moment."""
        return self._copier.copy(with_gone=bool(self._filter.dropped_labels))

    def read(self, values: PageValues) -> Iterator[SeriesFamily]:
        """Yield the families of ``values``."""
        return chain(
            self._of_engines(values.engines),
            (_sampled(passed_on(family)) for family in values.passthrough),
            self._of_exporter(values.own),
        )

    def _of_engines(self, values: RegistryValues) -> Iterator[SeriesFamily]:
        self._aggregated.retain(values)
        created = [engine.created for engine in values.engines]
        self._oldest = min([*created, *filter(None, [self._oldest])], default=0.0)
        for family in families(values):
            if self._filter.dropped_labels or family.is_shared:
                series = self._aggregate(values, family)
            else:
                series = self._single(values, family)
            yield SeriesFamily(family.name, family.kind, family.help, series)

    def _single(self, values: RegistryValues, family: Family) -> Iterator[Series]:
        for engine in family.engines(values):
            names, children = family.children(engine)
            version, start = engine.label_version, int(engine.created * NANOS)
            for key, value in children:
                labels = functools.partial(series_labels, engine, family, names, key)
                if not isinstance(value, Histogram):
                    yield Series((version, key, start), labels, value, start)
                else:
                    read, bounds = self._observed(family, value)
                    began = _start(read) or start
                    yield Series((version, key, began, bounds), labels, read, began)

    def _aggregate(self, values: RegistryValues, family: Family) -> Iterator[Series]:
        aggregate = aggregate_native if self._exponential else aggregate_histograms
        start = int(self._oldest * NANOS)
        for labels, value in self._aggregated.series(values, family, aggregate):
            make = functools.partial(dict[str, str], labels)
            if not isinstance(value, Histogram):
                yield Series((labels, start), make, value, start)
            else:
                read, bounds = self._observed(family, value)
                began = _start(read) or start
                yield Series((labels, began, bounds), make, read, began)

    def _observed(self, family: Family, value: Histogram) -> tuple[Value, Bounds | None]:
        """Return the value of a histogram or summary, and the bounds that are sent with it."""
        if self._exponential and isinstance(value, NativeHistogram):
            return value, None
        bounds, counts, total = value.bounds, value.counts, value.sum
        if family.kind == "summary":
            return Summary(sum(counts), total), None
        places = self._filter.shown_bounds(family.name, bounds) if bounds else None
        if places is not None:
            shown = tuple(bounds[place] for place in places)
            bounds, counts = shown, rebucketed(bounds, counts, shown)
        return (bounds, counts, total), bounds

    def _of_exporter(self, values: OwnValues) -> Iterator[SeriesFamily]:
        for row, samples in values.families:
            series = (
                Series(
                    (labels, self._began),
                    functools.partial(_zipped, row.labels, labels),
                    value,
                    self._began,
                )
                for labels, value in samples
            )
            yield SeriesFamily(row.name, row.kind, row.help, series)
        for metric in values.others:
            yield from map(_sampled, collected(metric))


def _start(value: Value) -> int:
    """Return when a native histogram began, in nanoseconds; 0 where only its engine has that."""
    return int(value.created * NANOS) if isinstance(value, NativeHistogram) else 0


def _zipped(names: tuple[str, ...], values: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(names, values, strict=True))


def _sampled(family: SampleFamily) -> SeriesFamily:
    series = map(functools.partial(_sampled_series, family.kind), series_of(family))
    return SeriesFamily(family.name, family.kind, family.help, series)


def _sampled_series(kind: str, found: SampledSeries) -> Series:
    start = int(found.created * NANOS)
    make = functools.partial(dict[str, str], found.labels)
    value = found.value
    if not isinstance(value, Observed):
        return Series((found.labels, start), make, value, start)
    if kind == "summary":
        quantiles = tuple(quantile for quantile, _ in value.bounded)
        summary = Summary(value.count, value.total, value.bounded)
        return Series((found.labels, start, quantiles), make, summary, start)
    bounds = tuple(bound for bound, _ in value.bounded if bound != float("inf"))
    upto = [0, *(whole(count) for _, count in value.bounded[: len(bounds)]), value.count]
    # A page may have any counts; those of a bucket cannot be negative.
    counts = [max(count - before, 0) for before, count in pairwise(upto)]
    return Series((found.labels, start, bounds), make, (bounds, counts, value.total), start)
