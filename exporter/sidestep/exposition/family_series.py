"""The series of each family of a page, with labels and values: engines', and those made of samples.

Passthrough families and those of prometheus_client's collectors are made of samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import Metric

from sidestep.exposition.aggregated_series import AggregatedSeries, aggregate_native
from sidestep.exposition.engine_values import EngineValues, RegistryValues, Value
from sidestep.exposition.families import Family, families, series_labels
from sidestep.exposition.passthrough.parser import unescape_labels
from sidestep.exposition.passthrough.registry import PassthroughFamily
from sidestep.exposition.proto_format import MAX_COUNT
from sidestep.telemetry.rows import SelfRow


class Series(NamedTuple):
    """One series.

    Attributes:
        engine: The engine; None where several engines share the series.
    """

    labels: dict[str, str]
    value: Value
    engine: EngineValues | None = None


def family_series(
    values: RegistryValues,
    names: Collection[str] = (),
    dropped_labels: frozenset[str] = frozenset(),
) -> Iterator[tuple[Family, list[Series]]]:
    """Yield the families with ``names`` (empty: all) and their series; a family can have none.

    Series that become equal without ``dropped_labels`` are aggregated.
    """
    aggregated = AggregatedSeries(dropped_labels)
    for family in families(values, names):
        if dropped_labels or family.is_shared:
            found = aggregated.series(values, family, aggregate_native)
            yield family, [Series(dict(labels), value) for labels, value in found]
        else:
            yield family, [*_single(values, family)]


def _single(values: RegistryValues, family: Family) -> Iterator[Series]:
    for engine in family.engines(values):
        names, children = family.children(engine)
        for key, value in children:
            yield Series(series_labels(engine, family, names, key), value, engine)


GROUPED = frozenset({"histogram", "summary"})
"""Kinds of which several samples are one series."""
KINDS = {
    **{kind: kind for kind in ("counter", "gauge", "histogram", "summary")},
    "gaugehistogram": "histogram",
    "info": "gauge",
    "stateset": "gauge",
}
"""Kinds by those of prometheus_client; any other is untyped."""

_GAUGE_HISTOGRAM_SUFFIXES = ("_gcount", "_gsum")

Pairs = tuple[tuple[str, str], ...]


class SuffixedSample(NamedTuple):
    """A sample: the suffix of its name, sorted labels, value, and its timestamp in milliseconds."""

    suffix: str
    labels: Pairs
    value: float
    stamp: int | None = None


class SampleFamily(NamedTuple):
    """A family and its samples; its kind is one of ``KINDS``' values or untyped."""

    name: str
    kind: str
    help: str
    samples: list[SuffixedSample]


@dataclasses.dataclass(frozen=True, slots=True)
class Observed:
    """The value of a histogram or summary.

    Attributes:
        bounded: Cumulative counts by upper bound, or values by quantile.
    """

    count: int
    total: float
    bounded: list[tuple[float, float]]


class SampledSeries(NamedTuple):
    """A series, its timestamp in milliseconds, and the Unix time at which it began, 0.0 if unknown."""

    labels: Pairs
    value: float | Observed
    stamp: int | None
    created: float


def of_exporter(row: SelfRow, samples: Iterable[tuple[Sequence[str], float]]) -> SampleFamily:
    """Return a family of the exporter's own."""
    found = [
        SuffixedSample("", tuple(sorted(zip(row.labels, labels, strict=True))), float(value))
        for labels, value in samples
    ]
    return SampleFamily(row.name, row.kind, row.help, found)


def passed_on(family: PassthroughFamily) -> SampleFamily:
    """Return another exporter's family."""
    samples: list[SuffixedSample] = []
    for series, text in family.samples:
        value, _, stamp = text.partition(b" ")
        own = tuple(sorted(unescape_labels(series.labels).items()))
        suffix = series.name.removeprefix(family.name)
        samples.append(SuffixedSample(suffix, own, float(value), int(stamp) if stamp else None))
    return SampleFamily(family.name, family.kind, family.help, samples)


def collected(found: Metric) -> Iterator[SampleFamily]:
    """Yield a family of prometheus_client as its ``generate_latest`` writes it: as one or several."""
    kind = KINDS.get(found.type, "untyped")
    families: dict[tuple[str, str], list[SuffixedSample]] = {}
    for sample in found.samples:
        stamp = None if sample.timestamp is None else int(float(sample.timestamp) * 1000)
        suffix = sample.name.removeprefix(found.name)
        own = tuple(sorted(sample.labels.items()))
        read = SuffixedSample(suffix, own, float(sample.value), stamp)
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
        yield SampleFamily(name, shown, found.documentation, samples)


def series_of(family: SampleFamily) -> Iterator[SampledSeries]:
    """Yield the series of ``family``: those of histograms and summaries from several samples."""
    if family.kind in GROUPED:
        return _grouped(family.kind, family.samples)
    return _singles(family.kind, family.samples)


def _singles(kind: str, samples: list[SuffixedSample]) -> Iterator[SampledSeries]:
    created = {read.labels: read.value for read in samples if read.suffix == "_created"}
    for read in samples:
        if read.suffix != "_created" or kind != "counter":
            yield SampledSeries(read.labels, read.value, read.stamp, created.get(read.labels, 0.0))


def _grouped(kind: str, samples: Iterable[SuffixedSample]) -> Iterator[SampledSeries]:
    inner = "quantile" if kind == "summary" else "le"
    children: dict[Pairs, list[SuffixedSample]] = {}
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
        last = bounded[-1][1] if bounded and kind == "histogram" else 0.0
        count = ends.get("_count", ends.get("_gcount", last))
        total = ends.get("_sum", ends.get("_gsum", math.nan))
        stamp = next((read.stamp for read in reads), None)
        value = Observed(whole(count), total, bounded)
        yield SampledSeries(outer, value, stamp, ends.get("_created", 0.0))


def whole(value: float) -> int:
    """Convert a count, which can be any float in text."""
    return min(int(value), MAX_COUNT) if 0.0 < value < math.inf else 0
