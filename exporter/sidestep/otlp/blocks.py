"""Messages of metrics, kept from push to push: renewing a point costs a tenth of making one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sidestep.metrics.exponential_buckets import ZERO_THRESHOLD, coarser
from sidestep.metrics.native_histogram import NativeHistogram
from sidestep.otlp.messages import AggregationTemporality, AnyValue, KeyValue, Metric
from sidestep.otlp.page_families import Series, SeriesFamily, Summary, Value

POINTS = 32
"""Points of one message: to make as many takes less than a millisecond."""
MAX_WIDTH = 320
"""Most exponential buckets from the lowest to the highest: OTLP sends the empty ones between, too."""
MAX_COUNT = 1 << 62
"""Highest count: one that does not fit into 64 bits could not be sent."""
FORMS: Mapping[str, str] = {"counter": "sum", "histogram": "histogram", "summary": "summary"}
"""Fields of ``Metric`` by the kind of a family; any other is a gauge."""


def form_of(kind: str, value: Value) -> str:
    """Return the field of ``Metric`` for a value."""
    if isinstance(value, NativeHistogram):
        return "exponential_histogram"
    return FORMS.get(kind, "gauge")


class Block:
    """A message with the points of some series of one family and form.

    Args:
        family: The family.
        form: Field of ``Metric``.
        series: At least one, and at most ``POINTS``.
        stamp: Unix time in nanoseconds.

    Attributes:
        keys: Keys of the series.
    """

    def __init__(
        self, family: SeriesFamily, form: str, series: Sequence[Series], stamp: int
    ) -> None:
        self.form = form
        self.keys = [one.key for one in series]
        self._metric = Metric(name=family.name, description=family.help)
        data = getattr(self._metric, form)
        if form not in ("gauge", "summary"):
            data.aggregation_temporality = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
        if form == "sum":
            data.is_monotonic = True
        for one in series:
            point = data.data_points.add(attributes=attributes(one.labels()))
            if form != "gauge":
                point.start_time_unix_nano = min(one.start, stamp)
            _complete(point, one.value)
        self._points = [*data.data_points]

    def encode(self, series: Sequence[Series], stamp: int) -> bytes:
        """Set the values of ``series``, which have the block's keys, and encode the message."""
        write = _WRITERS[self.form]
        for point, one in zip(self._points, series, strict=True):
            point.time_unix_nano = stamp
            write(point, one.value)
        encoded: bytes = self._metric.SerializeToString()
        return encoded


def attributes(labels: Mapping[str, str]) -> list[KeyValue]:
    """Return labels as attributes; to Prometheus, an empty label is a missing one."""
    return [
        KeyValue(key=name, value=AnyValue(string_value=value))
        for name, value in labels.items()
        if value
    ]


def _complete(point: Any, value: Value) -> None:
    """Write what the key of a series includes: bounds and quantiles."""
    if isinstance(value, tuple):
        point.explicit_bounds[:] = value[0]
    elif isinstance(value, Summary):
        for quantile, _ in value.quantiles:
            point.quantile_values.add(quantile=quantile)


def _write_number(point: Any, value: Any) -> None:
    point.as_double = value


def _write_histogram(point: Any, value: Any) -> None:
    _, counts, point.sum = value
    count = sum(counts)
    if count > MAX_COUNT:
        counts = [min(each, MAX_COUNT) for each in counts]
    point.count = min(count, MAX_COUNT)
    point.bucket_counts[:] = counts


def _write_exponential(point: Any, value: NativeHistogram) -> None:
    """Write native buckets; OTLP's index of the same bucket is lower by one, its counts are dense."""
    buckets, scale = value.buckets, value.schema
    while buckets and max(buckets) - min(buckets) >= MAX_WIDTH:
        buckets, scale = coarser(buckets), scale - 1
    point.count = min(sum(value.counts), MAX_COUNT)
    point.sum = value.sum
    point.scale = scale
    point.zero_count = min(value.zeros, MAX_COUNT)
    point.zero_threshold = ZERO_THRESHOLD
    if buckets:
        lowest = min(buckets)
        counts = [0] * (max(buckets) - lowest + 1)
        for index, count in buckets.items():
            counts[index - lowest] = min(count, MAX_COUNT)
        point.positive.offset = lowest - 1
        point.positive.bucket_counts[:] = counts


def _write_summary(point: Any, value: Summary) -> None:
    point.count = min(value.count, MAX_COUNT)
    point.sum = value.total
    for place, (_, number) in zip(point.quantile_values, value.quantiles, strict=True):
        place.value = number


_WRITERS: Mapping[str, Callable[[Any, Any], None]] = {
    "sum": _write_number,
    "gauge": _write_number,
    "histogram": _write_histogram,
    "exponential_histogram": _write_exponential,
    "summary": _write_summary,
}
