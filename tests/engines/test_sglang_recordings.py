"""Real runs of SGLang recorded through its plugin, against the pages that it served after them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exporters import Start, page_of_engine, recorded_run
from pages import Family, get, parse
from sglang_pages import ALLOWED, differences, rests, says_nothing
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


def fitting(page: dict[str, Family]) -> dict[str, Family]:
    """Return SGLang's ``page`` as the exporter's would be."""
    changed = {
        name: Family(page[name].kind, dict.fromkeys(page[name].samples, 0.0))
        for name, (rule, _) in ALLOWED.items()
        if rule is rests
    }
    silent = {name for name, (rule, _) in ALLOWED.items() if rule is says_nothing}
    return {name: family for name, family in {**page, **changed}.items() if name not in silent}


def moved(family: Family, by: float) -> Family:
    """Return ``family`` with ``by`` added to all its samples."""
    return Family(family.kind, {key: value + by for key, value in family.samples.items()})


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("sglang:num_requests", lambda family: moved(family, 1)),
        ("sglang:e2e_request_latency_seconds", lambda family: moved(family, 1e-6)),
        ("sglang:num_requests", lambda family: Family("gauge", family.samples)),
        ("sglang:num_requests", lambda family: Family(family.kind, {})),
        ("sglang:num_requests", lambda _: None),
        ("sglang:scheduler_idle_seconds", lambda family: moved(family, 1e-3)),
        ("sglang:scheduler_idle_seconds", lambda family: moved(family, -1e-3)),
        ("sglang:process_cpu_seconds", lambda _: None),
        ("sglang:gen_throughput", lambda family: moved(family, 1)),
        ("sglang:gen_throughput", lambda _: None),
        ("sglang:http_requests", lambda family: moved(family, 1)),
        ("sglang:utilization", lambda _: Family("gauge", {("sglang:utilization", ()): 0.0})),
        ("sglang:new", lambda _: Family("gauge", {("sglang:new", ()): 0.0})),
    ],
)
def test_the_comparison_finds_any_single_difference(
    family: str, change: Callable[[Family | None], Family | None]
) -> None:
    """The comparison allows the differences that the table lists, and no others."""
    engines = parse(page_of_engine("page_sglang"))
    ours = fitting(engines)
    assert [] == list(differences(engines, ours, engines, TOLERANCE))

    made = change(ours.pop(family, None))
    wrong = {**ours, **({} if made is None else {family: made})}

    assert {family} == {name for name, _ in differences(engines, wrong, engines, TOLERANCE)}


def test_a_growing_counter_may_lie_between_two_pages() -> None:
    """Any value from the first page's to the second's is allowed."""
    name = "sglang:scheduler_idle_seconds"
    since = parse(page_of_engine("page_sglang"))
    theirs = {**since, name: moved(since[name], 2)}

    for by, passes in ((-0.1, False), (0, True), (1, True), (2, True), (2.1, False)):
        ours = fitting({**since, name: moved(since[name], by)})
        assert passes == (not list(differences(theirs, ours, since, TOLERANCE)))
