"""Families made of samples, in Prometheus' protobuf format: passthrough and the exporter's own."""

from __future__ import annotations

from sidestep.exposition import proto_format
from sidestep.exposition.sample_families import (
    Observed,
    SampledSeries,
    SampleFamily,
    series_of,
    whole,
)


def encode(family: SampleFamily) -> list[bytes]:
    """Encode a family, in parts; one without samples has none."""
    metrics = [_metric(family.kind, series) for series in series_of(family)]
    if not metrics:
        return []
    return proto_format.family(family.name, family.kind, family.help, metrics)


def _metric(kind: str, series: SampledSeries) -> bytes:
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
