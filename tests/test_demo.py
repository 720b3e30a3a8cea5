"""The demo: what it plays, what it stages, and what it prints."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import pytest

from command_line import ENVIRON, serving, sidestep
from exporters import Start, until
from pages import get
from sidestep.app.demo import LONGEST_PAUSE, Player, recording, status_line
from sidestep.app.demo_schedule import ROUND, RUNS, WELL, Clock, Run, Window
from sidestep.app.exporter import Exporter
from sidestep.metrics.computed_gauges import scalar
from sidestep.tracking.health.states import EngineState
from sidestep_adapters.recording.format import Items, read

FIXED = ("--web.listen-address", "127.0.0.1:0")
ONCE = ("demo", "--once", "--speed", "max", *FIXED)
ABORTS = 'engine="vllm-aborts"'
TOTALS = "records 11025  vLLM: prompt tokens 100588  generated tokens 11516"


def test_each_run_is_played_once() -> None:
    """The totals are those of the recordings, whatever the order in which the runs end."""
    done = sidestep(*ONCE)

    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert "http://127.0.0.1:" in first
    assert last == TOTALS
    assert "\x1b" not in done.stdout


async def test_it_ends_on_ctrl_c() -> None:
    """Even in the middle of a run it exits with 0 and without a traceback."""
    async with serving("demo", *FIXED) as (process, url):
        async with asyncio.timeout(20):
            while "vllm:generation_tokens_total{" not in await get(url):
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 20)

    assert process.returncode == 0
    text = output.decode()
    assert "Traceback" not in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert f"{url.removesuffix('/metrics')}/\n" in text
    assert "Recorded runs" in text
    assert "hangs from 1:45 to 3:15: its replay pauses" in text
    assert f"   0:00  {WELL}\n" in text


def test_the_status_fits_80_columns() -> None:
    """On a terminal of 80 columns no update wraps, and the totals are the last line."""
    code, output = on_terminal(*ONCE)
    updates = output.split("\x1b[K")

    assert code == 0
    assert len(updates) > 1
    assert all(len(line) <= 80 for update in updates for line in update.splitlines())
    assert updates[-1].strip() == TOTALS


async def test_all_dialects_and_features_are_there(start: Start) -> None:
    """Every series that the demo promises has the recordings' totals, under distinguishable labels."""
    async with start() as exporter:
        await play(exporter, *RUNS)
        page = await get(exporter.url)
        dialects = {engine.layout.dialect for engine in exporter.registry.engines.values()}

    assert dialects == {"vllm", "sglang", "triton"}
    for run in RUNS:
        if run.labels:
            labels = (f'engine="{run.name}"', f'model_name="{run.name}"')
            assert value(page, "vllm:generation_tokens_total", *labels) > 0
            assert value(page, "sidestep_step_limit_seconds_total", *labels) > 0
            assert value(page, "sidestep_request_part_seconds_total", *labels) > 0
    assert re.search(r'^vllm:lora_requests_info\{.*max_lora="1"', page, re.MULTILINE)
    assert re.search(r"^vllm:cache_config_info\{", page, re.MULTILINE)
    assert value(page, "vllm:kv_block_lifetime_seconds_count", 'engine="vllm-cache"') > 0
    assert value(page, "vllm:num_preemptions_total", 'engine="vllm-cache"') > 0
    aborted = value(page, "vllm:request_success_total", 'finished_reason="abort"', ABORTS)
    assert (aborted, value(page, "vllm:request_success_total", ABORTS)) == (15, 31)
    assert value(page, "sglang:num_requests_total") > 0
    assert value(page, "sidestep_step_limit_seconds_total", 'engine_type="unified"') > 0
    assert value(page, "nv_inference_request_success", 'model="dynbatch"') > 0


@pytest.mark.parametrize("run", [run for run in RUNS if run.fills], ids=lambda run: run.name)
def test_a_slowed_run_fills_its_window(run: Run) -> None:
    """Although its longest pauses are shortened: alerts wait until the end."""
    player = Player(run, "ipc:///unused", Clock(ROUND), realtime=True)
    times = [one.at for one in read(recording(f"{run.name}.rec.gz")) if isinstance(one, Items)]
    pauses = [(after - before) / player.pace for before, after in itertools.pairwise(times)]
    assert run.window is not None

    assert sum(min(each, LONGEST_PAUSE) for each in pauses) == pytest.approx(
        run.window.end - run.window.start
    )


async def test_an_engine_hangs_and_recovers(start: Start) -> None:
    """It is stalled in a step, with the stack of its replay, then ok again; it generates tokens again."""
    run = next(run for run in RUNS if run.hang is not None)._replace(hang=Window(2.0, 11.0))
    async with (
        start(health_min_threshold="3", health_max_threshold="3") as exporter,
        playing(exporter, run, round_seconds=60.0),
    ):
        await until(lambda: state(exporter) is EngineState.STALLED, 30)
        health = next(health for _, health in exporter.intake.health)
        assert "vllm-hangs stalled" in status_line(exporter, 0, 10.0, "")
        await until(lambda: state(exporter) is EngineState.OK, 30)
        tokens = generated(exporter)
        await until(lambda: generated(exporter) > tokens, 30)

    assert health.reason is not None
    assert health.reason.value == "step"
    assert any("_staged_hang" in frame for frame in health.stack)


def state(exporter: Exporter) -> EngineState | None:
    """Return the state of the first engine."""
    return next((health.state for _, health in exporter.intake.health), None)


def generated(exporter: Exporter) -> float:
    """Return the tokens that vLLM's engines have generated."""
    return sum(
        scalar(engine, "vllm:generation_tokens_total")
        for engine in exporter.registry.engines.values()
    )


def value(page: str, name: str, *labels: str) -> float:
    """Return the sum of a family's samples that have all these labels."""
    lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.split()[-1]) for line in lines if all(each in line for each in labels))


async def play(exporter: Exporter, *runs: Run) -> None:
    """Play runs once, as ``--once --speed max`` does."""
    for run in runs:
        player = Player(run, exporter.endpoints[0], None, realtime=False)
        await asyncio.to_thread(player.run)


@contextlib.asynccontextmanager
async def playing(exporter: Exporter, run: Run, round_seconds: float) -> AsyncIterator[None]:
    """Play a run over and over, with what is staged."""
    stop = threading.Event()
    player = Player(run, exporter.endpoints[0], Clock(round_seconds), realtime=True)
    task = asyncio.create_task(asyncio.to_thread(player.run, once=False, stop=stop))
    try:
        yield
    finally:
        stop.set()
        await task


def on_terminal(*arguments: str) -> tuple[int, str]:
    """Run a command on a terminal of 80 columns; return its exit code and all that it writes."""
    terminal, its_end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "sidestep", *arguments],
        stdin=its_end, stdout=its_end, stderr=its_end, env={**ENVIRON, "COLUMNS": "80"},
    )  # fmt: skip
    os.close(its_end)
    output = b""
    # Reading fails when the process has closed its end.
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 4096):
            output += data
    os.close(terminal)
    return process.wait(20), output.decode()
