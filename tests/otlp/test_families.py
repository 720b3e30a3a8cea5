"""What is pushed by OTLP is what the page has: samples, kinds, starts, and the messages that are kept."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from exporters import Start, recorded_run, until
from intakes import Fed
from otlp_receiver import Receiver, Samples, metrics_of, page_samples, points_of, receiver
from pages import get, parse
from sidestep.app import Exporter
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.metrics.engine import Engine
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeHistogram, NativeSettings
from sidestep.metrics.registry import Registry
from sidestep.otlp.blocks import MAX_WIDTH, Block
from sidestep.otlp.encoder import Encoder
from sidestep.otlp.envelope import Envelope, Piece
from sidestep.otlp.page_families import NANOS, PageFamilies, Series, SeriesFamily
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample
from sidestep.protocol.self_described import Samples as SamplesItem
from sidestep.telemetry.self_metrics import SelfMetrics, own_registry
from sidestep_adapters.recording.replay import Replay
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
    "exponential": {"histograms": "both", "otlp_histograms": "exponential"},
}
KINDS = {"sum": "counter", "gauge": "gauge", "histogram": "histogram", "summary": "summary"}
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
async def test_points_are_the_samples_of_the_page(start: Start, options: str) -> None:
    """All families: engines', scraped ones and the exporter's own, with each filter."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=SCRAPED)

    async with receiver() as found, server(page) as url:
        flags = {"otlp_endpoint": found.url, "scrape": (f"{url}/metrics",), **OPTIONS[options]}
        async with start(otlp_interval="1", **flags) as exporter:
            for run in ("core_dp", "sglang_dp", "triton"):
                await replay(exporter, recorded_run(run))

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
    assert bool(exponential) is (options == "exponential")
    assert len(pushed) > 1000
    assert pages[0].keys() <= pushed.keys() | pages[0].keys() - pages[1].keys()
    assert pushed.keys() <= pages[0].keys() | pages[1].keys()
    for key, value in pushed.items():
        seen = {repr(float(samples[key])) for samples in pages if key in samples}
        # What changed between the pages could have had any value; a page has a connection of its own.
        changing = len(seen) > 1 or key[0] in ("sidestep_http_connections", "process_open_fds")
        assert changing or repr(float(value)) in seen, key


async def test_kinds_and_names_are_those_of_the_page(start: Start) -> None:
    """Without a unit; sums are monotonic and cumulative."""
    async with receiver() as found:
        async with start(otlp_endpoint=found.url) as exporter:
            await replay(exporter, recorded_run("core_dp"))
            page = parse(await get(exporter.url))
        kinds: dict[str, str] = {}
        for request in found.requests:
            for metric in metrics_of(request):
                form = metric.WhichOneof("data") or ""
                kinds[metric.name.removesuffix("_total")] = KINDS[form]
                assert not metric.unit
                if form in ("sum", "histogram"):
                    assert getattr(metric, form).aggregation_temporality == 2
                assert metric.sum.is_monotonic is (form == "sum")

    # Only pages after the first one have it.
    kinds.pop("sidestep_scrape_duration_seconds")
    assert kinds == {
        name.removesuffix("_total"): "gauge" if family.kind == "unknown" else family.kind
        for name, family in page.items()
    }


async def test_starts_survive_a_restart(start: Start, tmp_path: Path) -> None:
    """Those of engines' series and of the exporter's own; a new state directory begins later."""
    seen: list[dict[str, set[int]]] = []
    states: list[float] = []
    async with receiver() as found:
        for state in ("state", "state", "other"):
            found.requests.clear()
            flags = {"otlp_endpoint": found.url, "state_dir": str(tmp_path / state)}
            async with start(**flags) as exporter:
                if state == "state" and not seen:
                    await replay(exporter, recorded_run("core_dp"))
                if state == "other":
                    await replay(exporter, recorded_run("core_dp"))
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
    """Of the pod by the downward API's variables, and of --otlp.resource, which replaces others."""
    monkeypatch.setenv("POD_NAME", "vllm-0")
    monkeypatch.setenv("POD_NAMESPACE", "llm")
    monkeypatch.setenv("NODE_NAME", "node-1")
    given = ("deployment.environment.name=prod", "host.name=", "service.name=x")
    async with receiver() as found:
        async with start(otlp_endpoint=found.url, otlp_resource=given) as exporter:
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


def info(number: int) -> EngineInfo:
    """Return one of many engines."""
    return EngineInfo(f"e{number}", "vllm", {"engine": str(number), "model_name": "m"})


def page_families(registry: Registry, *, exponential: bool = False) -> PageFamilies:
    """Return the families of a registry."""
    return PageFamilies(
        registry,
        PassthroughRegistry(registry.names),
        own_registry(SelfMetrics(), ()),
        SeriesFilter(),
        exponential=exponential,
    )


def encoded(encoder: Encoder, registry: Registry, *, exponential: bool = False) -> list[bytes]:
    """Return the engines' messages of a push."""
    families = page_families(registry, exponential=exponential)
    return [piece.data for piece in encoder.pieces(of_engines(families), STAMP)]


def of_engines(families: PageFamilies) -> Iterator[SeriesFamily]:
    """Return the engines' families of this moment."""
    return families._of_engines(families.copy().engines)


def change(registry: Registry, engine: Engine) -> None:
    """Change every value of ``engine``."""
    engine.values[:] = [1 if value is None else value + 1 for value in engine.values]
    for slot in range(len(engine.histograms)):
        engine.histogram(slot).observe(0.5)
    for children, row in zip(engine.keyed, engine.layout.keyed, strict=True):
        key = (f"x{len(children)}",) * len(row.own_labels)
        children[key] = 1
    for family in engine.open_families.values():
        for key, child in family.children.items():
            if isinstance(child, Histogram):
                child.observe(0.5)
            else:
                family.children[key] = child + 1
    registry.touch(engine)


@pytest.mark.parametrize("exponential", [False, True])
@settings(max_examples=25)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(("change", "retire", "return", "rename", "bounds", "describe")),
            st.integers(0, 3),
        ),
        max_size=6,
    )
)
def test_kept_messages_equal_new_ones(exponential: bool, steps: list[tuple[str, int]]) -> None:
    """After engines come, go, and change labels, buckets and families."""
    native = NativeSettings({}, lambda: 5.0) if exponential else None
    fed = Fed(native=native)
    registry = fed.intake.registry
    kept = Encoder()
    for what, number in [("change", 0), ("change", 1), ("return", 0), *steps]:
        found = info(number)
        if what == "rename":
            found.info = {"cache_config": {"block_size": str(len(registry.engines))}}
        if what == "bounds":
            found.bounds = {"inter_token_latency": [0.1, 0.2 + len(registry.engines)]}
        fed.send_hello(f"s{number}", [found])
        engine = registry.engines[found.id]
        if what == "return":
            # It is the last one now, so that another one has its place.
            registry.retire(engine)
            del registry.retired[engine.id]
            registry.expose(engine)
        if what == "describe":
            observed = [0.5, 3.0]
            family = Family(
                "own",
                "histogram",
                ["l"],
                [Sample([str(number)], observations=observed)],
                bounds=[1.0],
            )
            fed.items(f"s{number}", [encode_item(SamplesItem(0, 1.0, [family]))])
        change(registry, engine)
        if what == "retire":
            registry.retire(engine)
        fresh = Encoder()
        expected = encoded(fresh, registry, exponential=exponential)
        assert encoded(kept, registry, exponential=exponential) == expected
        assert [*map(len, kept._kept.values())] == [*map(len, fresh._kept.values())]


@functools.cache
def thousand() -> Registry:
    """Return a registry of a thousand engines with values in every storage."""
    registry = Registry(
        {"vllm": compile_layout(DIALECTS["vllm"])}, {}, is_exposed=SOME.__contains__
    )
    for number in range(1000):
        change(registry, registry.register(info(number)))
    return registry


SOME = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:inter_token_latency_seconds",
    }
)


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
        if value <= point.zero_threshold:
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
    series = [Series("k", dict, histogram, 1)]
    block = Block(
        SeriesFamily("h", "histogram", "", iter(())), "exponential_histogram", series, STAMP
    )
    return Metric.FromString(block.encode(series, STAMP))


def test_requests_are_split() -> None:
    """Each is readable and has at least one piece, whatever its size."""
    encoder, envelope = Encoder(), Envelope({"service.name": "sidestep"})
    registry = thousand()
    pieces = [*encoder.pieces(of_engines(page_families(registry)), STAMP)]
    whole = [*envelope.requests(pieces)]
    huge = Piece(1, bytes(5 << 20))

    assert len(whole) == 1
    assert [len(request.parts) - 1 for request in envelope.requests([huge, huge])] == [1, 1]
    assert sum(request.points for request in whole) == sum(piece.points for piece in pieces)


async def replay(exporter: Exporter, run: Path) -> None:
    """Replay a recorded run."""
    player = Replay(run, exporter.endpoints[0], realtime=False, namespace="test")
    await asyncio.to_thread(player.run)
