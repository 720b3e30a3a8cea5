"""Real runs of SGLang recorded through its plugin, against the pages that it served after them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import DATA, Start, page_of_engine
from pages import get, parse
from sglang_pages import differences
from sidestep_adapters.replay import Replay

TOLERANCE = 1e-9
"""Relative. Sums of floats are added per batch here, one by one in the engine."""
RUNS = {
    "sglang": ("sglang:num_retracted_requests", "engine_type", {"unified"}),
    "sglang_dp": ("sglang:realtime_tokens", "dp_rank", {"0", "1"}),
    "sglang_labels": ("sglang:num_requests", "team", {"", "red", "blue"}),
}
"""By name: a family, a label of it and its values that the run is there for."""


def recording(run: str) -> Path:
    """What the plugin sent in ``run``."""
    return DATA / f"{run}.rec.gz"


def different(run: str, page: str) -> list[tuple[str, str]]:
    """What ``page`` and the engine's after ``run`` differ in beyond what they may."""
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


async def test_the_command_plays_a_recording(start: Start) -> None:
    """``sidestep replay`` feeds a running exporter, which then shows all of it."""
    async with start() as exporter:
        command = ["replay", str(recording("sglang")), "--connect", exporter.endpoints[0]]
        played = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "sidestep", *command, "--speed", "max"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        page = await get(exporter.url)

    assert (0, "") == (played.returncode, played.stderr)
    assert "the exporter has applied all of them" in played.stdout
    assert [] == different("sglang", page)
