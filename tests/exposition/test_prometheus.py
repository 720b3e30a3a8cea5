"""A real Prometheus that scrapes native histograms: what it reads out of them, and out of classic ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from exporters import MAIN_RUN, Start
from prometheus_server import BINARIES, prometheus
from replays import replay
from sidestep.app.exporter import Exporter


@pytest.fixture
def binary(version: str) -> str:
    """Return the path of that Prometheus."""
    return str(BINARIES[version])


@contextlib.asynccontextmanager
async def scraping(
    binary: str, directory: Path, targets: Mapping[str, str], settings: Mapping[str, object] = {}
) -> AsyncIterator[Callable[[str], Awaitable[dict[str, float]]]]:
    """Run a Prometheus that has scraped ``targets``, by job; yield a function that queries it."""
    urls = {job: {job: url} for job, url in targets.items()}
    with prometheus(binary, directory, urls, settings=settings) as server:
        await asyncio.to_thread(server.scraped, len(targets), time.time())
        # A later scrape may take too long on a busy machine: then all series are stale.
        at = time.time()

        async def query(text: str) -> dict[str, float]:
            found = await asyncio.to_thread(server.ask, text, at)
            return {one["metric"].get("job", ""): float(one["value"][1]) for one in found}

        yield query


async def replayed(exporter: Exporter, run: Path) -> str:
    """Its URL, with a run in it."""
    await replay(exporter, run)
    return exporter.url


async def test_prometheus_stores_native_histograms(
    start: Start, tmp_path: Path, binary: str
) -> None:
    """Counts and sums equal those of the series, whether the page has classic ones as well or not."""
    async with (
        start(histograms="native") as exporter,
        start(histograms="both", ingest_endpoint=(f"ipc://{tmp_path}/both.ipc",)) as both,
    ):
        targets = {
            "native": await replayed(exporter, MAIN_RUN),
            "both": await replayed(both, MAIN_RUN),
        }
        async with scraping(binary, tmp_path, targets) as query:
            name = "vllm:inter_token_latency_seconds"
            (engine,) = exporter.registry.engines.values()
            ours = engine.histogram(engine.layout.find(name).slots[0])
            count = await query(f"histogram_count({name})")
            total = await query(f"histogram_sum({name})")
            classic = await query(f"{name}_bucket")
            tokens = await query("vllm:generation_tokens_total")

    assert count == dict.fromkeys(targets, float(sum(ours.counts)))
    assert total == dict.fromkeys(targets, pytest.approx(ours.sum, rel=1e-12))
    assert tokens == dict.fromkeys(targets, 6348.0)
    assert classic == {}


async def test_prometheus_stores_classic_series_if_configured(start: Start, tmp_path: Path) -> None:
    """Prometheus 3 has a setting for both kinds."""
    if BINARIES["3"] is None:
        pytest.skip("there is no Prometheus 3 (make tools)")
    settings = {"always_scrape_classic_histograms": True}
    async with start(histograms="both") as exporter:
        targets = {"one": await replayed(exporter, MAIN_RUN)}
        async with scraping(BINARIES["3"], tmp_path, targets, settings) as query:
            name = "vllm:e2e_request_latency_seconds"
            count = await query(f"histogram_count({name})")
            classic = await query(f'{name}_bucket{{le="+Inf"}}')

    assert count == classic == {"one": 66.0}
