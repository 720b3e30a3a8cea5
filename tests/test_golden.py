"""Replayed recordings against the pages that the real engine served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import MAIN_RUN, SPEC_RUN, Start, page_of_engine
from pages import differences, get, parse
from sidestep.render.text import render
from sidestep_adapters.replay import Replay

TOLERANCE = 1e-12
"""Relative. Sums of floats are added per batch here, one by one in the engine."""

ALLOWED = {
    # A recording of stat-logger calls holds no cache configuration; a live
    # engine's is compared by the engine tests.
    "vllm:cache_config_info": "missing",
}


@pytest.mark.parametrize(
    ("name", "legacy", "openmetrics"),
    [("main.prom", False, False), ("legacy.prom", True, False), ("openmetrics.txt", False, True)],
)
async def test_page_is_the_one_kept(
    name: str, legacy: bool, openmetrics: bool, start: Start, golden: Callable[[str, str], None]
) -> None:
    """The engines' families after the main run, to the byte: a change shows in the diff."""
    async with start(metrics_legacy=legacy) as exporter:
        player = Replay(MAIN_RUN, exporter.endpoints[0], realtime=False, namespace="golden")
        await asyncio.to_thread(player.run)

        golden(name, render(exporter.registry, openmetrics=openmetrics).decode())


@pytest.mark.parametrize(
    ("run", "page"), [(MAIN_RUN, "page_main"), (SPEC_RUN, "page_spec")], ids=["main", "spec"]
)
async def test_page_equals_the_engines(run: Path, page: str, start: Start) -> None:
    """Every family, label set, bucket and value of the engine's page is on ours."""
    async with start() as exporter:
        player = Replay(run, exporter.endpoints[0], realtime=False, namespace="golden")
        await asyncio.to_thread(player.run)
        ours = parse(await get(exporter.url))

    found = [
        (name, what)
        for name, what in differences(parse(page_of_engine(page)), ours, tolerance=TOLERANCE)
        if ALLOWED.get(name) != what
    ]

    assert [] == found
