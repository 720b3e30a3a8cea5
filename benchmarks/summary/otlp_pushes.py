"""A push by OTLP: the copy of the registry on the event loop, then the SDK's objects and messages in a thread."""

from __future__ import annotations

import asyncio
import gzip
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from benchmarks.summary.pages import dirty, fleet, milliseconds
from benchmarks.summary.rows import Figure, Row, Topic
from sidestep.exposition.pages import PageCopier
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.metrics.registry import Registry
from sidestep.otlp.page_families import PageFamilies, SeriesFamily
from sidestep.telemetry.self_metrics import SelfMetrics, own_registry

try:
    from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics

    from sidestep.otlp.metric_sender import batches
    from sidestep.otlp.resource import SCOPE, Resource
except ImportError:
    ABSENT = "absent: the extra otlp"
else:
    ABSENT = ""

SERIES = 10_000
COPY = f"a copy of {SERIES} series, on the event loop"
PUSH = f"a push of {SERIES} series, in a thread"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return milliseconds of CPU, medians."""
    if ABSENT:
        return {row: Figure(None, None, ABSENT) for row in (COPY, PUSH)}
    with asyncio.Runner() as runner:
        return _measured(runner.run, quick=quick)


def _measured(run: Callable[[Coroutine[Any, Any, Any]], Any], *, quick: bool) -> dict[str, Figure]:
    one = sum(len([*family.series]) for family in run(_families(fleet(1)).copy()))
    registry = fleet(SERIES // one)
    found = _families(registry)
    spent: dict[str, list[float]] = {COPY: [], PUSH: []}
    for _ in range(3 if quick else 9):
        dirty(registry, list(registry.engines.values()))
        spent[COPY].append(milliseconds(lambda: run(found.copy())))
        spent[PUSH].append(milliseconds(partial(_push, run(found.copy()))))
    return {row: Figure(statistics.median(times)) for row, times in spent.items()}


def _families(registry: Registry) -> PageFamilies:
    own = own_registry(SelfMetrics(), ())
    copier = PageCopier(registry, PassthroughRegistry(registry.names), own)
    return PageFamilies(copier, SeriesFilter(), exponential=False)


def _push(families: Iterable[SeriesFamily]) -> list[bytes]:
    """Return the compressed bodies of a push."""
    bodies = []
    for metrics, _ in batches(families, time.time_ns(), ()):
        scope = ScopeMetrics(SCOPE, metrics, "")
        request = encode_metrics(MetricsData([ResourceMetrics(Resource({}), [scope], "")]))
        bodies.append(gzip.compress(request.SerializeToString()))
    return bodies


OTLP = Topic("OTLP", (Row(COPY, "ms"), Row(PUSH, "ms")), measure)
