"""A push by OTLP has what the page has: samples, kinds, starts and resource."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics

from exporters import Start, until
from otlp_receiver import Receiver, Samples, metrics_of, page_samples, points_of, receiver
from pages import get
from replays import replay
from sidestep.metrics.exponential_buckets import ZERO_THRESHOLD
from sidestep.metrics.native_histogram import NativeHistogram
from sidestep.otlp.metric_sender import MAX_WIDTH, batches
from sidestep.otlp.page_families import NANOS, Exponential, Series, SeriesFamily
from sidestep.otlp.resource import SCOPE, Resource
from web_servers import server

SCRAPED = """\
# TYPE other_total counter
other_total{a="1"} 5
# TYPE other_requests counter
other_requests 7
# TYPE other_level gauge
other_level{empty="",a="x\\"y"} NaN
# TYPE other_seconds histogram
other_seconds_bucket{le="0.5"} 1
other_seconds_bucket{le="+Inf"} 3
other_seconds_sum 2.5
other_seconds_count 3
# TYPE other_size summary
other_size{quantile="0.5"} 4
other_size{quantile="0.9"} 9
other_size_sum 20
other_size_count 5
other_untyped 1
"""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "all": {"metrics_common": True, "metrics_legacy": True},
    "dropped": {"metrics_drop_label": ("engine", "dp_rank", "tp_rank")},
    "thinned": {"metrics_bucket_thinning": "3", "metrics_deny": ("vllm:e2e*",)},
    "exponential": {"histograms": "both"},
    "merged": {"histograms": "both", "metrics_drop_label": ("engine", "dp_rank", "tp_rank")},
}
AGGREGATION = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
EXPONENTIAL = "base2_exponential_bucket_histogram"
STAMP = 1_700_000_000 * NANOS


async def pushed_after(found: Receiver, page: Callable[[], Any]) -> tuple[str, Samples, str]:
    """Return a page, what was pushed after it, and a page after that."""
    before = await page()
    # The next push may have begun before the page.
    count = len(found.requests) + 2
    await until(lambda: len(found.requests) >= count)
    found.requests = found.requests[-1:]
    return before, found.samples, await page()


@pytest.mark.parametrize("options", OPTIONS)
async def test_points_are_the_samples_of_the_page(
    start: Start, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All families: engines', scraped ones and the exporter's own, with each filter."""
    has_native = "histograms" in OPTIONS[options]
    if has_native:
        monkeypatch.setenv(AGGREGATION, EXPONENTIAL)

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=SCRAPED)

    async with receiver() as found, server(page) as url:
        flags = {"otlp_endpoint": found.url, "scrape": (f"{url}/metrics",), **OPTIONS[options]}
        async with start(otlp_interval="1", **flags) as exporter:
            for run in ("core_dp", "sglang_dp", "triton"):
                await replay(exporter, run)

            async def has_all() -> bool:
                return "other_untyped" in await get(exporter.url)

            await until(has_all)
            before, pushed, after = await pushed_after(found, lambda: get(exporter.url))

    pages = page_samples(before), page_samples(after)
    exponential = {
        metric.name
        for request in found.requests
        for metric in metrics_of(request)
        if metric.HasField("exponential_histogram")
    }
    for samples in pages:
        for name, labels in [*samples]:
            if name.endswith("_bucket") and name.removesuffix("_bucket") in exponential:
                del samples[name, labels]
    assert bool(exponential) is has_native
    assert len(pushed) > 800
    assert pages[0].keys() <= pushed.keys() | pages[0].keys() - pages[1].keys()
    assert pushed.keys() <= pages[0].keys() | pages[1].keys()
    for key, value in pushed.items():
        seen = {repr(float(samples[key])) for samples in pages if key in samples}
        # What changed between the pages could have had any value; a page has a connection of its own.
        changing = len(seen) > 1 or key[0].startswith(("sidestep_http_conn", "process_"))
        assert changing or repr(float(value)) in seen, key


async def test_starts_survive_a_restart(start: Start, tmp_path: Path) -> None:
    """Those of engines' series and of the exporter's own; a new state directory begins later."""
    seen: list[dict[str, set[int]]] = []
    states: list[float] = []
    async with receiver() as found:
        for state in ("state", "state", "other"):
            found.requests.clear()
            flags = {"otlp_endpoint": found.url, "state_dir": str(tmp_path / state)}
            async with start(**flags) as exporter:
                if not seen or state == "other":
                    await replay(exporter, "core_dp")
                states.append(exporter.metrics.created)
            seen.append(starts(found))

    names = {
        "vllm:generation_tokens_total",
        "vllm:e2e_request_latency_seconds",
        "sidestep_items_total",
    }
    for name in names:
        assert seen[0][name] == seen[1][name]
        assert min(seen[0][name]) > 0
        assert max(seen[1][name]) < min(seen[2][name])
    assert states[0] == states[1] < states[2]


def starts(found: Receiver) -> dict[str, set[int]]:
    """Return the start times of points by metric."""
    return {
        metric.name: {point.start_time_unix_nano for point in points_of(metric)}
        for metric in metrics_of(found.requests[-1])
    }


async def test_resource_attributes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pod by the downward API's variables, and of OpenTelemetry's, which replace others."""
    monkeypatch.setenv("POD_NAME", "vllm-0")
    monkeypatch.setenv("POD_NAMESPACE", "llm")
    monkeypatch.setenv("NODE_NAME", "node-1")
    given = "deployment.environment.name=prod,host.name=,service.name=y"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", given)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "x")
    async with receiver() as found:
        async with start(otlp_endpoint=found.url) as exporter:
            port = exporter.addresses[0][1]
        resource = found.resource

    assert resource == {
        "service.name": "x",
        "service.namespace": "llm",
        "service.instance.id": f"vllm-0:{port}",
        "k8s.pod.name": "vllm-0",
        "k8s.namespace.name": "llm",
        "k8s.node.name": "node-1",
        "deployment.environment.name": "prod",
    }


@given(
    values=st.lists(st.floats(0.0, 1e9), min_size=1, max_size=50),
    schema=st.integers(-2, 6),
)
def test_exponential_buckets_hold_their_values(values: list[float], schema: int) -> None:
    """Each value is in the bucket that OTLP's formula names, within a bounded number of buckets."""
    histogram = NativeHistogram((1.0,), schema, 3.0)
    for value in values:
        histogram.observe(value)
    (point,) = points_of(exponential_metric(histogram))

    assert point.count == len(values)
    assert point.zero_count + sum(point.positive.bucket_counts) == len(values)
    assert len(point.positive.bucket_counts) <= MAX_WIDTH
    base = 2.0 ** (2.0**-point.scale)
    expected = [0] * len(point.positive.bucket_counts)
    zeros = 0
    for value in values:
        if value <= ZERO_THRESHOLD:
            zeros += 1
            continue
        # The logarithm is inexact near a bound.
        near = math.ceil(math.log(value, base)) - 1 - point.positive.offset
        found = [n for n in (near - 1, near, near + 1) if 0 <= n < len(expected)]
        exact = [
            n
            for n in found
            if base ** (n + point.positive.offset) * (1 - 1e-9)
            <= value
            <= base ** (n + point.positive.offset + 1) * (1 + 1e-9)
        ]
        assert exact
        expected[exact[0]] += 1
    assert zeros == point.zero_count
    differences = [abs(a - b) for a, b in zip(expected, point.positive.bucket_counts, strict=True)]
    # Values on a bound may count in either of two.
    on_a_bound = sum(
        abs(math.log(v, base) - round(math.log(v, base))) < 1e-6 for v in values if v > 1e-30
    )
    assert sum(differences) <= 2 * on_a_bound


def exponential_metric(histogram: NativeHistogram) -> Metric:
    """Return the message of one exponential histogram."""
    value = Exponential(histogram.schema, histogram.zeros, histogram.buckets, histogram.sum)
    family = SeriesFamily("h", "histogram", "", [Series({}, value, 1)])
    ((metrics, count),) = batches([family], STAMP, ())
    assert count == 1
    scope = ScopeMetrics(SCOPE, metrics, "")
    request = encode_metrics(MetricsData([ResourceMetrics(Resource({}), [scope], "")]))
    (metric,) = metrics_of(request)
    return metric
