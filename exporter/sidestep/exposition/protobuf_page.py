"""Pages in Prometheus' protobuf format, with native histograms."""

from __future__ import annotations

import math
from collections.abc import Collection

from sidestep.exposition import proto_format
from sidestep.exposition.aggregated_series import aggregate_native
from sidestep.exposition.encoded_series import EncodedFamilies
from sidestep.exposition.engine_values import RegistryValues, Value
from sidestep.exposition.families import Family
from sidestep.exposition.family_series import (
    Observed,
    SampledSeries,
    SampleFamily,
    series_of,
    whole,
)
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeHistogram


class ProtobufPage:
    """Encodes the families of engines as protobuf messages, with classic buckets beside native ones or without."""

    def __init__(self, *, classic_buckets: bool = True) -> None:
        self._encoded = EncodedFamilies(
            proto_format.labels,
            lambda family: _Series(family, classic=classic_buckets).encode,
            aggregate_native,
        )

    def write(self, values: RegistryValues, names: Collection[str] = ()) -> list[bytes]:
        """Return the page in parts: all families, or those that own one of the sample ``names``."""
        parts: list[bytes] = []
        for family, metrics in self._encoded.of(values, names):
            parts += proto_format.family(family.name, family.kind, family.help, metrics)
        return parts


class _Series:
    def __init__(self, family: Family, *, classic: bool) -> None:
        self._kind = family.kind
        self._classic = classic

    def encode(self, labels: bytes, value: Value, created: float) -> bytes:
        if isinstance(value, Histogram):
            return proto_format.metric(labels, self._histogram(value, created))
        return proto_format.metric(labels, proto_format.single(self._kind, value, created))

    def _histogram(self, value: Histogram, created: float) -> bytes:
        counts, bounds = value.cumulative, (*value.bounds, math.inf)
        if isinstance(value, NativeHistogram):
            bounds = bounds if self._classic else ()
            return proto_format.histogram(value.sum, bounds, counts, value, value.exemplars)
        # No native buckets: a summary, or an aggregate of different bounds.
        if self._kind == "summary":
            return proto_format.summary(counts[-1], value.sum, (), created)
        return proto_format.histogram(value.sum, bounds, counts, exemplars=value.exemplars)


def encode_samples(family: SampleFamily) -> list[bytes]:
    """Encode a family, in parts; one without samples has none."""
    metrics = [_sampled(family.kind, series) for series in series_of(family)]
    if not metrics:
        return []
    return proto_format.family(family.name, family.kind, family.help, metrics)


def _sampled(kind: str, series: SampledSeries) -> bytes:
    value = series.value
    if not isinstance(value, Observed):
        encoded = proto_format.single(kind, value, series.created)
    elif kind == "summary":
        encoded = proto_format.summary(value.count, value.total, value.bounded, series.created)
    else:
        counts = [whole(count) for _, count in value.bounded]
        bounds = tuple(bound for bound, _ in value.bounded)
        encoded = proto_format.histogram(value.total, bounds, [*counts, value.count])
    return proto_format.metric(proto_format.labels(series.labels), encoded, series.stamp)
