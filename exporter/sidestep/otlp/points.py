"""Metrics of the OpenTelemetry SDK, from the page's families."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)

from sidestep.metrics.exponential_buckets import coarser
from sidestep.otlp.page_families import Exponential, Series, SeriesFamily

MAX_POINTS = 2000
"""Most points of one request: gRPC receivers take 4 MiB by default."""
MAX_WIDTH = 320
"""Most exponential buckets from the lowest to the highest: OTLP sends the empty ones between, too."""
MAX_COUNT = 1 << 62
"""Highest count: one that does not fit into 64 bits could not be sent."""
EXTREMES: Mapping[str, Any] = {"min": None, "max": None}
"""The page has no extremes. The encoder leaves None out, which the SDK's types do not say."""

Points = dict[type, list[Any]]
"""Points of one family by their class."""


def batches(
    families: Iterable[SeriesFamily], stamp: int, delta: Collection[str]
) -> Iterator[tuple[list[Metric], int]]:
    """Yield metrics of at most ``MAX_POINTS`` points, and the number of these.

    Args:
        families: The families; no series is read before all those before it were yielded.
        stamp: Unix time of the points in nanoseconds.
        delta: Kinds of families whose values are increments.
    """
    metrics: list[Metric] = []
    count = 0
    for family in families:
        is_delta = family.kind in delta
        points: Points = {}
        for one in family.series:
            point = _point(one, stamp)
            points.setdefault(type(point), []).append(point)
            count += 1
            if count == MAX_POINTS:
                yield [*metrics, *_metrics(family, points, is_delta=is_delta)], count
                metrics, points, count = [], {}, 0
        metrics += _metrics(family, points, is_delta=is_delta)
    if metrics:
        yield metrics, count


def _metrics(family: SeriesFamily, points: Points, *, is_delta: bool) -> Iterator[Metric]:
    """Yield a metric for each class of points; a family can have histograms of two classes."""
    temporality = AggregationTemporality.DELTA if is_delta else AggregationTemporality.CUMULATIVE
    for kind, found in points.items():
        data: Gauge | Sum | Histogram | ExponentialHistogram = Gauge(found)
        if kind is HistogramDataPoint:
            data = Histogram(found, temporality)
        elif kind is ExponentialHistogramDataPoint:
            data = ExponentialHistogram(found, temporality)
        elif family.kind == "counter":
            data = Sum(found, temporality, is_monotonic=True)
        yield Metric(family.name, family.help, "", data)


def _point(
    one: Series, stamp: int
) -> NumberDataPoint | HistogramDataPoint | ExponentialHistogramDataPoint:
    """Return the point of a series; to Prometheus, an empty label is a missing one."""
    attributes = {name: value for name, value in one.labels.items() if value}
    start, value = min(one.start, stamp), one.value
    if isinstance(value, Exponential):
        return _exponential_point(attributes, start, stamp, value)
    if isinstance(value, tuple):
        bounds, counts, total = value
        return HistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=start,
            time_unix_nano=stamp,
            count=min(sum(counts), MAX_COUNT),
            sum=total,
            bucket_counts=_bounded(counts),
            explicit_bounds=bounds,
            **EXTREMES,
        )
    return NumberDataPoint(attributes, start, stamp, float(value))


def _exponential_point(
    attributes: Mapping[str, str], start: int, stamp: int, value: Exponential
) -> ExponentialHistogramDataPoint:
    """Return a point; OTLP's index of the same bucket is lower by one, and its counts are dense."""
    buckets, scale = value.buckets, value.scale
    while buckets and max(buckets) - min(buckets) >= MAX_WIDTH:
        buckets, scale = coarser(buckets), scale - 1
    lowest = min(buckets, default=1)
    counts = [0] * (max(buckets, default=0) - lowest + 1)
    for index, count in buckets.items():
        counts[index - lowest] = count
    return ExponentialHistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=start,
        time_unix_nano=stamp,
        count=min(value.zeros + sum(counts), MAX_COUNT),
        sum=value.total,
        scale=scale,
        zero_count=min(value.zeros, MAX_COUNT),
        positive=Buckets(lowest - 1, _bounded(counts)),
        negative=Buckets(0, []),
        flags=0,
        **EXTREMES,
    )


def _bounded(counts: Sequence[int]) -> list[int]:
    return [min(count, MAX_COUNT) for count in counts]
