"""Families made of samples, in Prometheus' protobuf format: passthrough and the exporter's own."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sidestep.catalog.buckets import Bounds
from sidestep.exposition import proto_format
from sidestep.exposition.passthrough.parser import unescape_labels
from sidestep.exposition.passthrough.registry import PassthroughRegistry

GROUPED = frozenset({"histogram", "summary"})
"""Kinds of which several samples are one series."""
PER_SLICE = 500
"""Samples to encode before yielding to the event loop."""
KINDS = {
    **{kind: kind for kind in ("counter", "gauge", "histogram", "summary")},
    "gaugehistogram": "histogram",
    "info": "gauge",
    "stateset": "gauge",
}
"""Kinds of this format by those of prometheus_client; any other is untyped."""

_GAUGE_HISTOGRAM_SUFFIXES = ("_gcount", "_gsum")

Pairs = tuple[tuple[str, str], ...]


class Sample(NamedTuple):
    """A sample: the suffix of its name, labels, value, and its timestamp in milliseconds."""

    suffix: str
    labels: Pairs
    value: float
    stamp: int | None = None


def passthrough_pieces(
    registry: PassthroughRegistry, names: Collection[str] = ()
) -> Iterator[list[bytes]]:
    """Yield other exporters' families, all as of the call."""
    found = [(family, family.parts) for family in registry.families(names)]
    for family, parts in found:
        samples: list[Sample] = []
        for part in parts:
            for series, text in part.samples:
                value, _, stamp = text.partition(b" ")
                own = tuple(sorted(unescape_labels(series.labels).items()))
                suffix = series.name.removeprefix(family.name)
                samples.append(Sample(suffix, own, float(value), int(stamp) if stamp else None))
            yield []
        yield from _pieces(family.name, family.kind, family.help, samples)


def generate(registry: Collector) -> bytes:
    """Encode the collectors of prometheus_client, as its own ``generate_latest`` does in text."""
    pieces = (piece for found in registry.collect() for piece in _own(found))
    return b"".join(part for piece in pieces for part in piece)


def _own(found: Metric) -> Iterator[list[bytes]]:
    kind = KINDS.get(found.type, "untyped")
    families: dict[tuple[str, str], list[Sample]] = {}
    for sample in found.samples:
        stamp = None if sample.timestamp is None else int(float(sample.timestamp) * 1000)
        suffix = sample.name.removeprefix(found.name)
        own = tuple(sorted(sample.labels.items()))
        read = Sample(suffix, own, float(sample.value), stamp)
        name = found.name
        if kind == "counter":
            name += "_total"
        elif kind not in GROUPED:
            # An untyped family may have samples of several names.
            name = sample.name
        elif suffix in _GAUGE_HISTOGRAM_SUFFIXES:
            # As in text: Prometheus does not read gauge histograms.
            families.setdefault((sample.name, "gauge"), []).append(read)
        families.setdefault((name, kind), []).append(read)
    for (name, shown), samples in families.items():
        yield from _pieces(name, shown, found.documentation, samples)


def _pieces(name: str, kind: str, text: str, samples: list[Sample]) -> Iterator[list[bytes]]:
    metrics: list[bytes] = []
    made = _grouped(kind, samples) if kind in GROUPED else _singles(kind, samples)
    for number, metric in enumerate(made, 1):
        metrics.append(metric)
        if not number % PER_SLICE:
            yield []
    if metrics:
        yield proto_format.family(name, kind, text, metrics)


def _singles(kind: str, samples: list[Sample]) -> Iterator[bytes]:
    created = {read.labels: read.value for read in samples if read.suffix == "_created"}
    for read in samples:
        if read.suffix != "_created" or kind != "counter":
            own = proto_format.labels(read.labels)
            value = proto_format.single(kind, read.value, created.get(read.labels, 0.0))
            yield proto_format.metric(own, value, read.stamp)


def _grouped(kind: str, samples: Iterable[Sample]) -> Iterator[bytes]:
    inner = "quantile" if kind == "summary" else "le"
    children: dict[Pairs, list[Sample]] = {}
    for read in samples:
        outer = tuple(pair for pair in read.labels if pair[0] != inner)
        children.setdefault(outer, []).append(read)
    for outer, reads in children.items():
        ends = {read.suffix: read.value for read in reads}
        bounded = sorted(
            (float(text), read.value)
            for read in reads
            for name, text in read.labels
            if name == inner and read.suffix in ("", "_bucket")
        )
        total = ends.get("_sum", ends.get("_gsum", math.nan))
        stamp = next((read.stamp for read in reads), None)
        created = ends.get("_created", 0.0)
        if kind == "summary":
            value = proto_format.summary(_whole(ends.get("_count", 0.0)), total, bounded, created)
        else:
            value = _histogram(ends, bounded, total)
        yield proto_format.metric(proto_format.labels(outer), value, stamp)


def _histogram(ends: dict[str, float], bounded: list[tuple[float, float]], total: float) -> bytes:
    bounds: Bounds = tuple(bound for bound, _ in bounded)
    last = bounded[-1][1] if bounded else 0.0
    count = ends.get("_count", ends.get("_gcount", last))
    counts = [_whole(value) for _, value in bounded]
    return proto_format.histogram(total, bounds, [*counts, _whole(count)])


def _whole(value: float) -> int:
    """Convert a count, which can be any float in text."""
    return min(int(value), proto_format.MAX_COUNT) if 0.0 < value < math.inf else 0
