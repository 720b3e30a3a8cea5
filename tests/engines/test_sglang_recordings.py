"""Real runs of SGLang recorded through its plugin, against the pages that it served after them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from exporters import Start, page_of_engine, recorded_run
from pages import get, parse
from sglang_pages import differences
from sidestep_adapters.recording.replay import Replay

TOLERANCE = 1e-9
"""Relative. Sums of floats are added per batch here, one by one in the engine."""
RUNS = {
    "sglang": ("sglang:num_retracted_requests", "engine_type", {"unified"}),
    "sglang_dp": ("sglang:realtime_tokens", "dp_rank", {"0", "1"}),
    "sglang_labels": ("sglang:num_requests", "team", {"", "red", "blue"}),
}
"""By name: a family, a label of it and its values that the run is there for."""


def recording(run: str) -> Path:
    """Return the path of the recording of ``run``."""
    return recorded_run(run)


def different(run: str, page: str) -> list[tuple[str, str]]:
    """Return how ``page`` differs from the engine's after ``run``, beyond what is allowed."""
    engines = parse(page_of_engine(f"page_{run}"))
    return list(differences(engines, parse(page), engines, TOLERANCE))


@pytest.mark.parametrize("run", RUNS)
async def test_page_equals_the_engines(run: str, start: Start) -> None:
    """Every family, label set, bucket and value of SGLang's page is on ours, and no more."""
    async with start() as exporter:
        player = Replay(recording(run), exporter.endpoints[0], realtime=False, namespace="golden")
        await asyncio.to_thread(player.run)
        page = await get(exporter.url)

    family, label, values = RUNS[run]
    ours = parse(page)
    assert [] == different(run, page)
    assert values == {dict(labels).get(label, "") for _, labels in ours[family].samples}
    assert all(ours[family].samples.values())
    assert len([name for name in ours if name.startswith("sglang:")]) > 80
