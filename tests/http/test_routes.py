"""HTTP pages: formats, filters, health, JSON, read by independent parsers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from exporters import MAIN_RUN, SPEC_RUN, started, until
from pages import get, parse
from promtool import PROMTOOL, complaints
from replays import replay
from sidestep.app.exporter import Exporter
from sidestep.app.run import running
from sidestep.config.settings import read
from sidestep.exposition.negotiation import CONTENT_TYPES, Format, negotiate


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def exporter(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Exporter]:
    """Return an exporter that has received two recorded runs, and that no test changes."""
    async with started(tmp_path_factory.mktemp("exporter")) as made:
        await replay(made, MAIN_RUN)
        await replay(made, SPEC_RUN)
        yield made


with_exporter = pytest.mark.asyncio(loop_scope="module")
"""Mark of tests that use ``exporter``, in whose event loop they run."""


def base(exporter: Exporter) -> str:
    """Return scheme, host and port."""
    return exporter.url.removesuffix("/metrics")


PROTOBUF = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
)
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.8,"
    "application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text"),
        ("*/*", "text"),
        ("text/plain", "text"),
        ("application/openmetrics-text", "openmetrics"),
        ("application/openmetrics-text;version=1.0.0", "openmetrics"),
        ("application/openmetrics-text;version=2.0.0", "text"),
        (PROMETHEUS, "openmetrics"),
        ("application/openmetrics-text;q=0.3,text/plain;q=0.5", "text"),
        ("application/openmetrics-text;q=nonsense", "text"),
        (PROTOBUF, "protobuf"),
        (f"{PROTOBUF},{PROMETHEUS}", "protobuf"),
        (f"{PROTOBUF};q=0.5,text/plain;q=0.5", "protobuf"),
        (f"{PROTOBUF};q=0.4,text/plain;q=0.5", "text"),
        (f"{PROTOBUF};q=0", "text"),
        (f"{PROTOBUF};q=nonsense", "text"),
        ("application/vnd.google.protobuf", "text"),
        (PROTOBUF.replace("delimited", "text"), "text"),
        (PROTOBUF.replace(";", " ; ").replace("=delimited", '="delimited"'), "protobuf"),
    ],
)
def test_the_accept_header_selects_the_format(accept: str, expected: Format) -> None:
    """The highest weight wins, then the first format; only delimited protobuf is offered."""
    assert negotiate(accept, protobuf=True) == expected
    if expected != "protobuf":
        assert negotiate(accept) == expected


@with_exporter
async def test_text_is_the_default(exporter: Exporter) -> None:
    """Text has its content type, and parses."""
    async with aiohttp.ClientSession() as session, session.get(exporter.url) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPES["text"]
        families = parse(await answer.text())

    assert "vllm:generation_tokens" in families
    assert "sidestep_build_info" in families
    assert "process_cpu_seconds" in families
    assert "python_gc_collections" in families
    assert "python_info" in families


@with_exporter
async def test_openmetrics_passes_the_strict_parser(exporter: Exporter) -> None:
    """The whole page of a run with every option parses, the exporter's own families included."""
    accept = "application/openmetrics-text;version=1.0.0"
    async with (
        aiohttp.ClientSession() as session,
        session.get(exporter.url, headers={"Accept": accept}) as answer,
    ):
        assert answer.headers["Content-Type"] == CONTENT_TYPES["openmetrics"]
        page = await answer.text()
    families = {family.name: family for family in text_string_to_metric_families(page)}  # type: ignore[no-untyped-call]

    assert page.endswith("# EOF\n")
    assert families["vllm:generation_tokens"].type == "counter"
    assert families["vllm:e2e_request_latency_seconds"].type == "histogram"


@with_exporter
async def test_names_select_families(exporter: Exporter) -> None:
    """Families are selected by family or sample name, the exporter's own included."""
    names = ["vllm:e2e_request_latency_seconds_bucket", "sidestep_items_total", "nothing"]
    async with (
        aiohttp.ClientSession() as session,
        session.get(exporter.url, params=[("name[]", name) for name in names]) as answer,
    ):
        families = parse(await answer.text())

    assert set(families) == {"vllm:e2e_request_latency_seconds", "sidestep_items"}


@pytest.mark.parametrize(
    ("path", "status"),
    [("/-/healthy", 200), ("/-/ready", 200), ("/", 200), ("/nothing", 404)],
)
@with_exporter
async def test_health_and_landing_page(exporter: Exporter, path: str, status: int) -> None:
    """Paths and status codes are those of other exporters."""
    async with aiohttp.ClientSession() as session, session.get(base(exporter) + path) as answer:
        assert answer.status == status


@with_exporter
async def test_engines_as_json(exporter: Exporter) -> None:
    """The list has each engine with its labels, its state, and whether it is up."""

    async def listed() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(await get(base(exporter) + "/api/v1/engines"))
        return found

    async def are_evaluated() -> bool:
        return [engine["state"] for engine in await listed()] == ["stopped"]

    await until(are_evaluated)
    engines = await listed()

    assert [engine["id"] for engine in engines] == ["test/tiny/0"]
    assert engines[0]["labels"] == {"engine": "0", "model_name": "tiny"}
    assert engines[0]["up"] is False
    assert engines[0]["reason"] is None


class Mine(Collector):
    """A user's collector."""

    def collect(self) -> list[GaugeMetricFamily]:
        """Return one gauge."""
        return [GaugeMetricFamily("my_gauge", "Mine.", value=5.0)]


class Broken(Collector):
    """A user's collector that fails."""

    def collect(self) -> list[GaugeMetricFamily]:
        """Fail."""
        raise OSError


async def test_a_users_collectors_are_on_the_page(tmp_path: Path) -> None:
    """A failing collector loses its own samples and is counted."""
    flags = {
        "web_listen_address": ("127.0.0.1:0",),
        "ingest_endpoint": (f"ipc://{tmp_path}/i.ipc",),
    }
    async with running(Exporter(read(flags, {}), [Mine(), Broken()])) as exporter:
        families = parse(await get(exporter.url))

    assert families["my_gauge"].samples == {("my_gauge", ()): 5.0}
    assert exporter.metrics.value("sidestep_collector_errors_total") >= 1


ACCEPTED = ("metric names should not contain ':'", "vllm:iteration_tokens_total", "non-counter")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (apt: prometheus)")
@with_exporter
async def test_promtool_accepts_all_names_but_the_engines(exporter: Exporter) -> None:
    """Colons, and a histogram whose name ends in total, are vLLM's choice."""
    found = complaints(await get(exporter.url))

    assert [line for line in found if line and not any(known in line for known in ACCEPTED)] == []
