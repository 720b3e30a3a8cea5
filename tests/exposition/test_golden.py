"""Replayed recordings against the pages that the real engine served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.stat_logger_calls import calls, convert

from exporters import DATA, MAIN_RUN, Start, page_of_engine
from pages import Family, differences, get, parse
from replays import replay
from sidestep.exposition.text_page import render

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
    # The engine observes a step once per API server; see the test of its own below.
    ("dp", "vllm:iteration_tokens_total"): "",
    # The engine keeps every combination for ever, ours shows the current one; see the test below.
    # This recording does not say how many adapters fit.
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


async def test_the_combination_of_adapters_is_the_engines_newest(
    start: Start, tmp_path: Path
) -> None:
    """The series without adapters is left, since the engine was idle in the end."""
    name = "vllm:lora_requests_info"
    engines = parse(page_of_engine("page_lora"))[name].samples
    ((_, ours),) = (await replayed(start, "lora", tmp_path))[name].samples
    (_, newest) = max(engines, key=lambda key: engines[key])

    assert dict(newest) == {**dict(ours), "max_lora": "1"}
    assert {value for label, value in ours if label.endswith("adapters")} == {""}


async def test_a_step_of_several_api_servers_is_counted_once(start: Start, tmp_path: Path) -> None:
    """The engine counts each API server's slice, the exporter each step that had output."""
    ours = await replayed(start, "dp", tmp_path)
    name = "vllm:iteration_tokens_total"
    engines = parse(page_of_engine("page_dp"))[name].samples
    steps: Counter[str] = Counter()
    for call in calls(DATA / "iterations_dp.jsonl.gz"):
        if call.fields.get("scheduler_stats") and call.fields.get("iteration_stats"):
            steps[str(call.fields["engine_idx"])] += 1

    for engine, count in steps.items():
        labels = (("engine", engine), ("model_name", "tiny"))
        assert ours[name].samples[name + "_count", labels] == count
        assert engines[name + "_count", labels] > count
        total = ours[name].samples[name + "_sum", labels]
        assert total == engines[name + "_sum", labels]
    assert set(steps) == {"0", "1"}
