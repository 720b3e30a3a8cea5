"""A real VictoriaMetrics that takes pushes: it has the samples of the page under the names of the page."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from exporters import Start, until
from otlp_pushes import RUNS, pushed, replay_all
from otlp_receiver import Labels, Samples, page_samples
from pages import get
from replays import replay
from victoria_metrics import BINARY, victoria_metrics

OWN_LABELS = {"service.name", "service.instance.id", "host.name"}
NAME = "vllm:inter_token_latency_seconds"
pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no VictoriaMetrics (make tools)")


async def test_it_has_the_samples_of_the_page(start: Start, tmp_path: Path) -> None:
    """Those of recorded runs of vLLM, SGLang and Triton, and the exporter's own."""
    with victoria_metrics(tmp_path / "data", "-maxLabelsPerTimeseries=80") as server:
        async with start(otlp_endpoint=server.otlp, otlp_interval="1") as exporter:
            await replay_all(exporter, RUNS)
            assert await pushed(exporter, lambda: server.samples()[0]) > 3000
        assert server.samples()[1] >= OWN_LABELS


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
            await replay(exporter, "core_dp")
            page = page_samples(await get(exporter.url))
        # The exporter has pushed its last counts.
        counts = {
            labels: value for (name, labels), value in page.items() if name == f"{NAME}_count"
        }
        stored: Samples = {}

        def in_ranges(labels: Labels) -> float:
            return sum(
                value
                for (name, found), value in stored.items()
                if name == f"{NAME}_bucket" and {*labels} < {*found}
            )

        async def has_all() -> bool:
            # The index is updated later, one series after the other.
            stored.update((await asyncio.to_thread(server.samples))[0])
            return all(
                in_ranges(labels) == count == stored.get((f"{NAME}_count", labels))
                for labels, count in counts.items()
            )

        await until(has_all, 30.0)

    assert sum(counts.values()) > 0
    for labels in counts:
        assert math.isclose(stored[f"{NAME}_sum", labels], page[f"{NAME}_sum", labels])
