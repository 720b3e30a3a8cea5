"""Replayed recordings against the pages that the real engine served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.stat_logger_calls import convert

from exporters import DATA, MAIN_RUN, Start, page_of_engine
from pages import Family, differences, get, parse
from rendered import render
from replays import replay

TOLERANCE = 1e-12
"""Relative. Sums of floats are added per batch here, one by one in the engine."""

ALLOWED = {
    # A recording of stat-logger calls holds no cache configuration; a live
    # engine's is compared by the engine tests.
    ("*", "vllm:cache_config_info"): "missing",
    # Nor does it hold whether logits were checked for NaNs, so that the counter is
    # shown; in these runs they were not.
    ("spec", "vllm:corrupted_requests"): "extra",
    ("dp", "vllm:corrupted_requests"): "extra",
    ("lora", "vllm:corrupted_requests"): "extra",
    # The engine observes a step once per API server, the exporter once.
    ("dp", "vllm:iteration_tokens_total"): "",
    # The engine keeps every combination for ever, ours shows the current one. This recording does
    # not say how many adapters fit.
    ("lora", "vllm:lora_requests_info"): "",
}
"""Differences to accept, by run and family; empty for any."""

RUNS = ("main", "spec", "dp", "lora")


@pytest.mark.parametrize(
    ("name", "legacy", "openmetrics"),
    [("main.prom", False, False), ("legacy.prom", True, False), ("openmetrics.txt", False, True)],
)
async def test_the_page_equals_the_golden_file(
    name: str, legacy: bool, openmetrics: bool, start: Start, golden: Callable[[str, str], None]
) -> None:
    """The engines' families after the main run are equal to the byte."""
    async with start(metrics_legacy=legacy) as exporter:
        await replay(exporter, MAIN_RUN, "golden")

        golden(name, render(exporter.registry, openmetrics=openmetrics).decode())


async def replayed(start: Start, run: str, directory: Path) -> dict[str, Family]:
    """Return the exporter's page after the calls of ``run``, which the plugin translates."""
    path = convert(DATA / f"iterations_{run}.jsonl.gz", directory / "calls.rec")
    async with start() as exporter:
        await replay(exporter, path, "golden")
        return parse(await get(exporter.url))


@pytest.mark.parametrize("run", RUNS)
async def test_the_page_equals_the_engines_own(run: str, start: Start, tmp_path: Path) -> None:
    """The page has every family, label set, bucket and value of the engine's page, and no others."""
    ours = await replayed(start, run, tmp_path)
    engines = parse(page_of_engine(f"page_{run}"))

    found = [
        (name, what)
        for name, what in differences(engines, ours, tolerance=TOLERANCE)
        if not {ALLOWED.get((run, name)), ALLOWED.get(("*", name))} & {what, ""}
    ]

    assert found == []
    assert len([name for name in ours if name.startswith("vllm:")]) > 35
