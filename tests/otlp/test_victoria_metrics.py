"""A real VictoriaMetrics that takes pushes: it has the samples of the page under the names of the page."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

from exporters import Start, recorded_run, until
from otlp_receiver import Labels, Samples, page_samples
from pages import get
from sidestep_adapters.recording.replay import Replay
from victoria_metrics import BINARY, VictoriaMetrics, victoria_metrics

RUNS = ("core_dp", "core_aborts", "sglang_dp", "triton")
OWN_LABELS = {"service.name", "service.instance.id", "host.name"}
NAME = "vllm:inter_token_latency_seconds"
pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no VictoriaMetrics (make tools)")


async def stored_samples(
    server: VictoriaMetrics, expected: AbstractSet[tuple[str, Labels]]
) -> tuple[Samples, set[str]]:
    """Return what is stored once all ``expected`` series are found: the index is updated later."""
    found: tuple[Samples, set[str]] = {}, set()

    async def has_all() -> bool:
        nonlocal found
        found = await asyncio.to_thread(server.samples)
        return expected <= found[0].keys()

    try:
        await until(has_all, 30.0)
    except AssertionError:
        assert expected - found[0].keys() == set()
    return found


async def test_it_has_the_samples_of_the_page(start: Start, tmp_path: Path) -> None:
    """Those of recorded runs of vLLM, SGLang and Triton, and the exporter's own."""
    with victoria_metrics(tmp_path / "data", "-maxLabelsPerTimeseries=80") as server:
        async with start(otlp_endpoint=server.otlp, otlp_interval="1") as exporter:
            for run in RUNS:
                player = Replay(
                    recorded_run(run), exporter.endpoints[0], realtime=False, namespace=run
                )
                await asyncio.to_thread(player.run)
            before = page_samples(await get(exporter.url))

            def requests() -> float:
                return exporter.metrics.value("sidestep_otlp_requests_total", "metrics", "200")

            pushes = requests() + 2
            await until(lambda: requests() >= pushes)
            after = page_samples(await get(exporter.url))
            assert exporter.metrics.value("sidestep_otlp_rejected_points_total") == 0
        stored, own_labels = await stored_samples(server, before.keys() & after.keys())

    assert own_labels >= OWN_LABELS
    compared = 0
    for key, value in after.items():
        # The exporter's own values change from push to push.
        if before.get(key) == value and not key[0].startswith(
            ("sidestep_http", "process_", "python_gc")
        ):
            assert math.isclose(stored[key], value, rel_tol=1e-12), key
            compared += 1
    assert compared > 3000


async def test_exponential_histograms_are_ranges(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their counts and sums are those of the page."""
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
        "base2_exponential_bucket_histogram",
    )
    flags = {"histograms": "both", "otlp_interval": "1"}
    with victoria_metrics(tmp_path / "data") as server:
        async with start(otlp_endpoint=server.otlp, **flags) as exporter:
            player = Replay(
                recorded_run("core_dp"), exporter.endpoints[0], realtime=False, namespace="test"
            )
            await asyncio.to_thread(player.run)
            page = page_samples(await get(exporter.url))
        # The exporter has pushed its last counts.
        counts = {key: value for key, value in page.items() if key[0] == f"{NAME}_count"}
        stored, _ = await stored_samples(server, counts.keys())

    assert sum(counts.values()) > 0
    for (_, labels), count in counts.items():
        ranges = [
            value
            for (family, found), value in stored.items()
            if family == f"{NAME}_bucket" and {*labels} < {*found}
        ]
        assert sum(ranges) == count == stored[f"{NAME}_count", labels]
        assert math.isclose(stored[f"{NAME}_sum", labels], page[f"{NAME}_sum", labels])
