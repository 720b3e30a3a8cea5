"""A push by OTLP: reading the registry, encoding and compressing, against OpenTelemetry's own encoder.

The peer gets the values of the registry as a list; it makes the SDK's objects of them, encodes and
compresses those. Both bodies are parsed and compared.
"""

from __future__ import annotations

import gzip
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from benchmarks.summary.pages import dirty, fleet, milliseconds
from benchmarks.summary.rows import Figure, Row, Topic
from sidestep import __version__
from sidestep.exposition import renders
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.otlp.encoder import Encoder
from sidestep.otlp.envelope import Envelope
from sidestep.otlp.page_families import PageFamilies, Value
from sidestep.telemetry.self_metrics import SelfMetrics, own_registry

try:
    from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
    from opentelemetry.sdk.metrics import export as sdk
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
except ImportError:
    ABSENT = "absent: opentelemetry-sdk and opentelemetry-exporter-otlp-proto-common"
else:
    ABSENT = ""

SERIES = 10_000
PEER = "OpenTelemetry SDK's encoder"
FIRST = f"the first push of {SERIES} series"
NEXT = f"a push of {SERIES} series, every one changed"
ABSENT_EXTREMES: Mapping[str, Any] = {"min": None, "max": None}
Read = list[tuple[str, str, str, list[tuple[dict[str, str], Value, int]]]]
"""Name, kind and help of families, and labels, value and start of their series."""


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return milliseconds of CPU, medians."""
    registry = fleet(1)
    families = partial(
        PageFamilies,
        passthrough=PassthroughRegistry(registry.names),
        own=own_registry(SelfMetrics(), ()),
        series_filter=SeriesFilter(),
        exponential=False,
    )
    one = sum(len(series) for *_, series in _read(families(registry)))
    registry = fleet(SERIES // one)
    found = families(registry)
    encoder = Encoder()
    rounds = 3 if quick else 9
    stamp = time.time_ns()
    spent: dict[str, list[float]] = {}
    for _ in range(rounds):
        dirty(registry, list(registry.engines.values()))
        spent.setdefault(FIRST, []).append(milliseconds(partial(_push, Encoder(), found, stamp)))
        _push(encoder, found, stamp)
        dirty(registry, list(registry.engines.values()))
        spent.setdefault(NEXT, []).append(milliseconds(partial(_push, encoder, found, stamp)))
        if not ABSENT:
            peer = partial(_peer, _read(found), stamp)
            spent.setdefault(PEER, []).append(milliseconds(peer))
    if not ABSENT:
        _compare(_push(encoder, found, stamp), _peer(_read(found), stamp))
    middle = {name: statistics.median(times) for name, times in spent.items()}
    return {row: Figure(middle[row], middle.get(PEER), ABSENT) for row in (FIRST, NEXT)}


def _push(encoder: Encoder, families: PageFamilies, stamp: int) -> list[bytes]:
    """Return the compressed bodies of a push."""
    requests = Envelope({}).requests(encoder.pieces(families.read(families.copy()), stamp))
    return [b"".join(renders.compress(request.parts)) for request in requests]


def _read(families: PageFamilies) -> Read:
    """Return the values that a push has."""
    return [
        (
            family.name,
            family.kind,
            family.help,
            [(dict(one.labels()), one.value, one.start) for one in family.series],
        )
        for family in families.read(families.copy())
    ]


def _peer(read: Read, stamp: int) -> list[bytes]:
    """Return the compressed body that the SDK's encoder makes."""
    cumulative = sdk.AggregationTemporality.CUMULATIVE
    metrics = []
    for name, kind, text, series in read:
        points: list[Any] = []
        for labels, value, start in series:
            common: dict[str, Any] = {
                "attributes": {label: each for label, each in labels.items() if each},
                "start_time_unix_nano": start,
                "time_unix_nano": stamp,
            }
            if not isinstance(value, tuple):
                points.append(sdk.NumberDataPoint(value=float(cast("float", value)), **common))
                continue
            bounds, counts, total = value
            points.append(
                sdk.HistogramDataPoint(
                    count=sum(counts),
                    sum=total,
                    bucket_counts=counts,
                    explicit_bounds=bounds,
                    **common,
                    **ABSENT_EXTREMES,
                )
            )
        if not points:
            continue
        data: Any = sdk.Gauge(points)
        if kind == "counter":
            data = sdk.Sum(points, cumulative, is_monotonic=True)
        elif kind == "histogram":
            data = sdk.Histogram(points, cumulative)
        metrics.append(sdk.Metric(name, text, "", data))
    scope = sdk.ScopeMetrics(InstrumentationScope("sidestep", __version__), metrics, "")
    resource = sdk.ResourceMetrics(Resource({}), [scope], "")
    body = encode_metrics(sdk.MetricsData([resource])).SerializeToString()
    return [b"".join(renders.compress([body]))]


def _compare(ours: list[bytes], theirs: list[bytes]) -> None:
    """Exit unless both have the same points of engines."""
    mine, other = _points(ours), _points(theirs)
    if mine != other or len(mine) < SERIES // 2:
        differing = [key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key)]
        raise SystemExit(f"the pushes differ in {len(differing)} points, as {differing[:4]}")


def _points(bodies: list[bytes]) -> dict[tuple[str, bytes], bytes]:
    """Return the points by metric and labels."""
    found = {}
    for body in bodies:
        request = ExportMetricsServiceRequest.FromString(gzip.decompress(body))
        for metric in request.resource_metrics[0].scope_metrics[0].metrics:
            form = metric.WhichOneof("data") or ""
            for point in getattr(metric, form).data_points:
                if not metric.name.startswith(("sidestep_", "process_", "python_")):
                    point.start_time_unix_nano = 0
                    labels = sorted((one.key, one.value.string_value) for one in point.attributes)
                    del point.attributes[:]
                    found[metric.name, repr(labels).encode()] = point.SerializeToString()
    return found


OTLP = Topic(
    "OTLP",
    (Row(FIRST, "ms", PEER), Row(NEXT, "ms", PEER, limit=60)),
    measure,
)
