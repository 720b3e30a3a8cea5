"""A real Prometheus that scrapes native histograms: what it reads out of them, and out of classic ones."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import math
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.core import (
    GaugeHistogramMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from exporters import LORA_RUN, MAIN_RUN, PARALLEL_RUN, SPEC_RUN, Start, page_of_engine, until
from polled import page, polled
from prometheus_server import BINARIES
from sidestep.app import Exporter
from sidestep.config.settings import read
from sidestep_adapters.recording.replay import Replay

RUNS = {"main": MAIN_RUN, "spec": SPEC_RUN, "dp": PARALLEL_RUN, "lora": LORA_RUN}
FAMILIES = {
    "vllm:inter_token_latency_seconds": "inter_token_latencies_iter",
    "vllm:time_to_first_token_seconds": "time_to_first_tokens_iter",
    "vllm:e2e_request_latency_seconds": "",
}
"""And where a recording has the single observations."""
QUANTILES = (Fraction("0.5"), Fraction("0.9"), Fraction("0.95"), Fraction("0.99"))
ERROR = 0.044


@pytest.fixture(params=BINARIES)
def binary(request: pytest.FixtureRequest) -> str:
    """A Prometheus of each major version that is there."""
    found = BINARIES[request.param]
    if found is None:
        pytest.skip(f"there is no Prometheus {request.param} (make tools)")
    return found


def latencies(run: Path, family: str) -> list[float]:
    """All observations of a recorded run, sorted."""
    found: list[float] = []
    for line in gzip.decompress(run.read_bytes()).splitlines():
        stats = json.loads(line).get("iteration_stats")
        if stats and FAMILIES[family]:
            found += stats[FAMILIES[family]]
        elif stats:
            finished = stats["finished_requests"]
            found += [
                f["e2e_latency"] for f in finished if "abort" not in str(f["finish_reason"]).lower()
            ]
    return sorted(found)


def error(read: float, values: Sequence[float], share: Fraction) -> float:
    """How far ``read`` is from a quantile of sorted ``values``, relative to it.

    Where that is between two values everything between them is one: versions of Prometheus
    differ in which of the two they take.
    """
    rank = share * len(values)
    least = values[max(math.ceil(rank) - 1, 0)]
    most = values[min(math.floor(rank), len(values) - 1)]
    return max((least - read) / least, (read - most) / most, 0.0)


class Prometheus:
    """One that runs, and scrapes some exporters."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query"
        self._session = session

    async def query(self, text: str) -> dict[str, Any]:
        """Values by job; a histogram is what the API has for it."""
        async with self._session.get(self._url, params={"query": text}) as answer:
            found = await answer.json()
        return {
            one["metric"].get("job", ""): one["histogram"][1]
            if "histogram" in one
            else float(one["value"][1])
            for one in found["data"]["result"]
        }

    async def scraped(self, jobs: set[str]) -> None:
        """Return when it has scraped all of ``jobs`` at least once."""
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    up = await self.query("up")
                    if {job for job, value in up.items() if value == 1.0} == jobs:
                        return
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def prometheus(
    binary: str, directory: Path, targets: dict[str, str], **settings: object
) -> AsyncIterator[Prometheus]:
    """Scrapes ``targets``, by job, with native histograms on and more ``settings`` of each job."""
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [url.split("/")[2]]}], **settings}
        for job, url in targets.items()
    ]
    config = {
        "global": {"scrape_interval": "300ms", "scrape_timeout": "300ms"},
        "scrape_configs": jobs,
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        binary, f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/tsdb", f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=native-histograms", "--log.level=error",
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as session:
            yield Prometheus(port, session)
    finally:
        process.kill()
        await process.wait()


async def replayed(exporter: Exporter, run: Path) -> str:
    """Its URL, with a run in it."""
    player = Replay(run, exporter.endpoints[0], realtime=False, namespace="test")
    await asyncio.to_thread(player.run)
    return exporter.url


async def test_quantiles_of_recorded_latencies(start: Start, tmp_path: Path, binary: str) -> None:
    """Native ones are as good as the resolution says, and at least five times better than classic."""
    async with contextlib.AsyncExitStack() as stack:
        targets: dict[str, str] = {}
        for name, run in RUNS.items():
            for kind in ("classic", "native"):
                endpoint = f"ipc://{tmp_path}/{name}-{kind}.ipc"
                running = start(histograms=kind, ingest_endpoint=(endpoint,))
                exporter = await stack.enter_async_context(running)
                targets[f"{name}-{kind}"] = await replayed(exporter, run)
        server = await stack.enter_async_context(prometheus(binary, tmp_path, targets))
        await server.scraped(set(targets))
        found = {
            (family, share): {
                **await server.query(
                    f"histogram_quantile({float(share)}, sum by (job) ({family}))"
                ),
                **await server.query(
                    f"histogram_quantile({float(share)}, sum by (job, le) ({family}_bucket))"
                ),
            }
            for family in FAMILIES
            for share in QUANTILES
        }

    for family in FAMILIES:
        for name, run in RUNS.items():
            values = latencies(run, family)
            errors: dict[str, list[float]] = {"native": [], "classic": []}
            for share in QUANTILES:
                for kind, all_errors in errors.items():
                    read = found[family, share][f"{name}-{kind}"]
                    all_errors.append(error(read, values, share))
            assert max(errors["native"]) <= ERROR, (family, name, errors)
            if len(values) >= 50:
                assert 5 * sum(errors["native"]) <= sum(errors["classic"]), (family, name, errors)


@pytest.mark.parametrize("histograms", ["native", "both"])
async def test_what_prometheus_keeps(
    start: Start, tmp_path: Path, binary: str, histograms: str
) -> None:
    """Of both kinds it keeps the native one; counts and sums are the series' own."""
    async with start(histograms=histograms) as exporter:
        url = await replayed(exporter, MAIN_RUN)
        async with prometheus(binary, tmp_path, {"one": url}) as server:
            await server.scraped({"one"})
            name = "vllm:inter_token_latency_seconds"
            (engine,) = exporter.registry.engines.values()
            ours = engine.histogram(engine.layout.find(name).slots[0])
            count = await server.query(f"histogram_count({name})")
            total = await server.query(f"histogram_sum({name})")
            classic = await server.query(f"{name}_bucket")
            tokens = await server.query("vllm:generation_tokens_total")

    assert count == {"one": float(sum(ours.counts))}
    assert total == {"one": pytest.approx(ours.sum, rel=1e-12)}
    assert tokens == {"one": 6348.0}
    assert classic == {}


async def test_both_kinds_where_they_are_asked_for(start: Start, tmp_path: Path) -> None:
    """Prometheus 3 stores the classic series beside the native ones when it is told to."""
    if BINARIES["3"] is None:
        pytest.skip("there is no Prometheus 3 (make tools)")
    settings = {"always_scrape_classic_histograms": True}
    async with start(histograms="both") as exporter:
        targets = {"one": await replayed(exporter, MAIN_RUN)}
        async with prometheus(BINARIES["3"], tmp_path, targets, **settings) as server:
            await server.scraped({"one"})
            name = "vllm:e2e_request_latency_seconds"
            count = await server.query(f"histogram_count({name})")
            classic = await server.query(f'{name}_bucket{{le="+Inf"}}')

    assert count == classic == {"one": 66.0}


class Odd(Collector):
    """Kinds that engines do not have."""

    def collect(self) -> Iterator[Metric]:
        """With values that are no numbers, and a time."""
        yield UnknownMetricFamily("odd", "Odd.", value=math.inf)
        yield SummaryMetricFamily("took", "Took.", count_value=3, sum_value=math.nan)
        sizes = GaugeHistogramMetricFamily("sizes", "Sizes.")
        sizes.add_metric([], [("1.0", 2), ("+Inf", 5)], 7.0)
        yield sizes
        timed = GaugeMetricFamily("timed", "Timed.")
        timed.add_metric([], 4.0, timestamp=time.time())
        yield timed


async def test_the_whole_page_is_taken(tmp_path: Path, binary: str) -> None:
    """Other exporters' families and a user's collectors as well: as many samples as the page has."""
    theirs = page_of_engine("page_triton") + page_of_engine("page_triton_custom")
    async with polled(page(theirs)) as other:
        flags = {
            "web_listen_address": ("127.0.0.1:0",),
            "ingest_endpoint": (f"ipc://{tmp_path}/i.ipc",),
            "histograms": "both",
            "scrape": (f"{other.url},label.pod=a",),
            # The memory is this process's, with all that other tests have left in it.
            "limits_memory_soft": "0",
            "limits_memory_hard": "0",
        }
        async with Exporter(read(flags, {}), [Odd()]).running() as exporter:
            url = await replayed(exporter, MAIN_RUN)
            await until(lambda: bool(exporter.passthrough.families()))
            async with prometheus(binary, tmp_path, {"one": url}) as server:
                await server.scraped({"one"})
                found = [
                    await server.query(text)
                    for text in (
                        "odd",
                        "took_count",
                        "sizes_gcount",
                        "timed",
                        'sum by (job) (nv_inference_count{pod="a"})',
                        'sum by (job) (my_lat_seconds_count{pod="a"})',
                        "count by (job) (vllm:request_success_total)",
                    )
                ]

    assert all(value.keys() == {"one"} for value in found), found
    assert found[:4] == [{"one": math.inf}, {"one": 3.0}, {"one": 5.0}, {"one": 4.0}]
