"""Families made of samples, in Prometheus' protobuf format: passthrough and the exporter's own."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prometheus_client.registry import Collector

from sidestep.exposition import proto_format
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

PER_SLICE = 500
"""Samples to encode before yielding to the event loop."""


def passthrough_pieces(
    registry: PassthroughRegistry, names: Collection[str] = ()
) -> Iterator[list[bytes]]:
    """Yield other exporters' families, all as of the call."""
    found = passthrough_families(registry, names)
    return (piece for family in found for piece in _pieces(family))


def generate(registry: Collector) -> bytes:
    """Encode the collectors of prometheus_client, as its own ``generate_latest`` does in text."""
    pieces = (piece for family in collected_families(registry) for piece in _pieces(family))
    return b"".join(part for piece in pieces for part in piece)


def _pieces(family: SampleFamily | None) -> Iterator[list[bytes]]:
    if family is None:
        yield []
        return
    metrics: list[bytes] = []
    for number, series in enumerate(series_of(family), 1):
        metrics.append(_metric(family.kind, series))
        if not number % PER_SLICE:
            yield []
    if metrics:
        yield proto_format.family(family.name, family.kind, family.help, metrics)


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
