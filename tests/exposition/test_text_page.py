"""The exporter's own families as text, engines' values as JSON, and the parts in which a page is sent."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Collection, Iterator
from typing import Any

import aiohttp
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import metric_families
from exporters import Start
from pages import parse
from rendered import copied, render
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.dialects import DIALECTS
from sidestep.exposition import json_format, own_families
from sidestep.exposition.family_series import collected
from sidestep.exposition.negotiation import Format
from sidestep.exposition.own_families import own_values
from sidestep.exposition.protobuf_page import encode_samples
from sidestep.http.responses import PIECE
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep.telemetry.self_metrics import SelfMetrics, own_registry

LAYOUTS = {
    name: compile_layout(dialect, legacy=True, common=True) for name, dialect in DIALECTS.items()
}
LABELS = {
    "vllm": {"engine": "0", "model_name": "m"},
    "sglang": {
        "engine_type": "unified",
        "model_name": "m",
        "moe_ep_rank": "0",
        "pp_rank": "0",
        "tp_rank": "0",
    },
}


def fleet(engines: int) -> Registry:
    """Return a registry of engines that have a value in every slot."""
    registry = Registry(LAYOUTS)
    for number in range(engines):
        labels = {**LABELS["vllm"], "model_name": f"m{number}"}
        engine = registry.register(EngineInfo(f"e{number}", "vllm", labels))
        engine.values = [number if value is None else value for value in engine.values]
        for slot in range(len(engine.histograms)):
            engine.histogram(slot).observe(number / 7)
        registry.touch(engine)
    return registry


class Known(Collector):
    """The exporter's own families as prometheus_client has them."""

    def __init__(self, metrics: SelfMetrics) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        for row, samples in self.metrics.samples():
            make = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            family = make(row.name, row.help, labels=row.labels)
            for labels, value in samples:
                family.add_metric(labels, value)
            yield family


def test_the_exporters_own_families_equal_those_of_prometheus_client() -> None:
    """In all formats, on the first page and on later ones, whole and by name."""
    metrics = SelfMetrics()
    metrics.add("sidestep_messages_total", 3, 'he"l\\lo\n')
    metrics.add("sidestep_items_total", 1e15)
    metrics.set("sidestep_scrape_duration_seconds", 0.125)
    metrics.set("sidestep_snapshot_bytes", float("inf"))
    metrics.read("sidestep_http_connections", lambda: iter([((), 7)]))
    registry = own_registry(metrics, [])
    known = CollectorRegistry()
    known.register(Known(metrics))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=known)

    def page(form: Format, names: Collection[str] = ()) -> bytes:
        """Return the exporter's own families."""
        return b"".join(own_families.write(own_values(registry, names), form))

    def stable(page: bytes) -> list[str]:
        """Return the lines that do not change from page to page."""
        return [
            line
            for line in page.decode().splitlines()
            if not line.startswith(("process_", "python_gc_"))
        ]

    def metrics_of(page: bytes) -> list[Any]:
        """Return the families that do not change from page to page."""
        found = metric_families.families(page)
        return [family for family in found if not family.name.startswith(("process_", "python_gc"))]

    for _ in range(2):
        assert stable(page("text")) == stable(generate_latest(known))
        theirs = generate_openmetrics(known)  # type: ignore[no-untyped-call]
        assert stable(page("openmetrics")) == stable(theirs)
        theirs = b"".join(
            part
            for metric in known.collect()
            for family in collected(metric)
            for part in encode_samples(family)
        )
        assert metrics_of(page("protobuf")) == metrics_of(theirs)
    part = page("text", {"sidestep_items_total"})
    assert parse(part.decode())["sidestep_items"].samples


def test_json_has_the_values_of_the_text_page() -> None:
    """Every sample has the labels and the value of a line; without engines the list is empty."""
    registry = fleet(3)
    shown = json.loads(json_format.encode(copied(registry)))
    page = parse(render(registry).decode())

    def base(family: dict[str, Any]) -> str:
        name: str = family["name"]
        return name.removesuffix("_total") if family["type"] == "counter" else name

    assert {base(family) for family in shown} == set(page)
    for family in shown:
        found = page[base(family)].samples
        for sample in family["samples"]:
            labels = tuple(sorted(sample["labels"].items()))
            end = "" if "value" in sample else "_count"
            value = sample["value"] if "value" in sample else sample["count"]
            assert found[family["name"] + end, labels] == value
            for bound, count in sample.get("buckets", ()):
                text = floatToGoString(bound)  # type: ignore[no-untyped-call]
                le = tuple(sorted({**sample["labels"], "le": text}.items()))
                assert found[f"{family['name']}_bucket", le] == count
    assert json.loads(json_format.encode(copied(Registry(LAYOUTS)))) == []


async def test_a_long_page_is_sent_in_parts(start: Start) -> None:
    """With a Content-Length; a HEAD request gets no body."""
    async with start() as exporter, aiohttp.ClientSession(auto_decompress=False) as session:
        for number in range(90):
            labels = {**LABELS["vllm"], "engine": str(number)}
            engine = exporter.registry.register(EngineInfo(f"e{number}", "vllm", labels))
            # Otherwise it would expire within a second.
            engine.feeds.seen_at = time.monotonic()
        plain: dict[str, str] = {"Accept-Encoding": "identity"}
        url = f"{exporter.url}?name[]=vllm:e2e_request_latency_seconds_bucket"
        async with session.get(url, headers=plain) as answer:
            page = await answer.read()
            assert int(answer.headers["Content-Length"]) == len(page) > 2 * PIECE
        async with session.get(url, headers={"Accept-Encoding": "gzip"}) as answer:
            assert gzip.decompress(await answer.read()) == page
        async with session.head(url, headers=plain) as answer:
            assert int(answer.headers["Content-Length"]) == len(page)
            assert await answer.read() == b""
        # The connection is still usable.
        async with session.get(url, headers=plain) as answer:
            assert await answer.read() == page
        assert page == render(exporter.registry, names={"vllm:e2e_request_latency_seconds"})
