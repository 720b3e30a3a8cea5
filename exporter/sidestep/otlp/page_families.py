"""The families of the page as series to send: engines', passthrough, and the exporter's own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from sidestep.catalog.buckets import Bounds
from sidestep.exposition.aggregate import aggregate_histograms, aggregate_states, rebucketed
from sidestep.exposition.aggregated_series import AggregatedSeries
from sidestep.exposition.families import Family, families, is_shared, series_labels
from sidestep.exposition.family_snapshot import EngineSnapshot, histogram_state, snapshot_family
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.sample_families import (
    Observed,
    SampledSeries,
    SampleFamily,
    collected_families,
    passthrough_families,
    series_of,
    whole,
)
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.metrics.engine import Number
from sidestep.metrics.histogram import Histogram, State
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
    """A family and its series; None among them asks to yield to the event loop."""

    name: str
    kind: str
    help: str
    series: Iterator[Series | None]


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
        self._registry = registry
        self._passthrough = passthrough
        self._own = own
        self._filter = series_filter
        self._exponential = exponential
        self._aggregated = AggregatedSeries(registry, series_filter.dropped_labels)
        self._oldest = 0.0
        """When the oldest engine began: series of several engines must not start later than before."""

    def __iter__(self) -> Iterator[SeriesFamily | None]:
        """Yield the families; each is of the moment at which it is yielded.

        None asks to yield to the event loop.
        """
        return chain(self._of_engines(), self._of_samples(), self._of_exporter())

    def _of_engines(self) -> Iterator[SeriesFamily]:
        self._aggregated.refresh()
        created = [engine.created for engine in self._registry.engines.values()]
        self._oldest = min([*created, *filter(None, [self._oldest])], default=0.0)
        for family in list(families(self._registry)):
            if self._filter.dropped_labels or is_shared(family):
                series = self._aggregate(family)
            elif self._exponential:
                series = self._single(
                    family, snapshot_family(self._registry, family, _copy_histogram)
                )
            else:
                series = self._single(
                    family, snapshot_family(self._registry, family, histogram_state)
                )
            yield SeriesFamily(family.name, family.kind, family.help, series)

    def _single(
        self, family: Family, found: Iterator[EngineSnapshot[State | Histogram]]
    ) -> Iterator[Series | None]:
        for engine, names, children in found:
            version, start = engine.label_version, int(engine.created * NANOS)
            for key, value in children:
                labels = functools.partial(series_labels, engine, family, names, key)
                if isinstance(value, int | float):
                    yield Series((version, key, start), labels, value, start)
                else:
                    read, bounds = self._observed(family, value)
                    began = _start(read) or start
                    yield Series((version, key, began, bounds), labels, read, began)
            yield None

    def _aggregate(self, family: Family) -> Iterator[Series | None]:
        if self._exponential:
            copies = self._aggregated.series(family, Histogram.copy, aggregate_histograms)
            return self._series(family, copies)
        states = self._aggregated.series(family, histogram_state, aggregate_states)
        return self._series(family, states)

    def _series(
        self,
        family: Family,
        found: Iterable[tuple[tuple[tuple[str, str], ...], Number | State | Histogram] | None],
    ) -> Iterator[Series | None]:
        start = int(self._oldest * NANOS)
        for one in found:
            if one is None:
                yield None
                continue
            labels, value = one
            make = functools.partial(dict[str, str], labels)
            if isinstance(value, int | float):
                yield Series((labels, start), make, value, start)
            else:
                read, bounds = self._observed(family, value)
                began = _start(read) or start
                yield Series((labels, began, bounds), make, read, began)

    def _observed(self, family: Family, value: State | Histogram) -> tuple[Value, Bounds | None]:
        """Return the value of a histogram or summary, and the bounds that are sent with it."""
        if isinstance(value, NativeHistogram):
            return value, None
        if isinstance(value, Histogram):
            value = histogram_state(value)
        bounds, counts, total, _ = value
        if family.kind == "summary":
            return Summary(sum(counts), total), None
        places = self._filter.shown_bounds(family.name, bounds) if bounds else None
        if places is not None:
            shown = tuple(bounds[place] for place in places)
            bounds, counts = shown, rebucketed(bounds, counts, shown)
        return (bounds, counts, total), bounds

    def _of_samples(self) -> Iterator[SeriesFamily | None]:
        for family in passthrough_families(self._passthrough):
            yield None if family is None else _sampled(family)

    def _of_exporter(self) -> Iterator[SeriesFamily | None]:
        metrics = self._own.metrics
        start = int(metrics.created * NANOS)
        for found in metrics.samples():
            if found is None:
                yield None
                continue
            row, samples = found
            series = (
                Series(
                    (labels, start),
                    functools.partial(_zipped, row.labels, labels),
                    value,
                    start,
                )
                for labels, value in samples
            )
            yield SeriesFamily(row.name, row.kind, row.help, series)
        for family in collected_families(self._own.others):
            yield _sampled(family)


def _copy_histogram(histogram: Histogram) -> State | Histogram:
    """Copy the native buckets of a histogram that has them, else the classic ones."""
    if isinstance(histogram, NativeHistogram):
        return histogram.copy()
    return histogram_state(histogram)


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
