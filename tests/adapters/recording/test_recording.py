"""Replays of recordings: several front ends and engines in one, and the recorded times."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from benchmarks.stat_logger_calls import convert

from exporters import Start
from pages import get, parse
from sidestep_adapters.recording.replay import Replay


def line(call: str, instance: int, at: float, **fields: Any) -> str:
    """Return one recorded call."""
    return json.dumps({"call": call, "instance": instance, "t_mono": at, **fields}) + "\n"


def record(instance: int, at: float, engine: int, tokens: int, running: int | None) -> str:
    """Return a call with one step's slice; one front end only gets the scheduler's stats."""
    scheduler = None
    if running is not None:
        scheduler = {"__type__": "SchedulerStats", "num_running_reqs": running}
    prompt = {"__type__": "PromptTokenStats", "computed": 0, "total": 0}
    iteration = {
        "__type__": "IterationStats",
        "num_generation_tokens": tokens,
        "prompt_token_stats": prompt,
    }
    return line(
        "record", instance, at, engine_idx=engine, scheduler_stats=scheduler,
        iteration_stats=iteration, mm_cache_stats=None,
    )  # fmt: skip


async def test_front_ends_and_engines_are_distinguished(start: Start, tmp_path: Path) -> None:
    """Each process is a stream, each engine a set of series; a step counts once."""
    described = {"engine_indexes": [0, 1], "model": "tiny", "max_model_len": 64}
    lines = [
        line("__init__", 11, 0.0, **described),
        line("__init__", 22, 0.0, **described),
        line("log_engine_initialized", 11, 0.0),
        line("record_admission_rejection", 22, 0.1, reason="max_num_queued_reqs"),
    ]
    for number in range(50):
        at = 0.2 + number / 1000
        lines += [
            record(22, at, 0, 1, None),
            record(11, at, 0, 2, running=number),
            record(22, at, 1, 3, running=7),
        ]
    file = tmp_path / "iterations.jsonl"
    file.write_text("".join(lines))

    async with start() as exporter:
        path = convert(file, tmp_path / "calls.rec")
        player = Replay(path, exporter.endpoints[0], realtime=False, namespace="ns")
        await asyncio.to_thread(player.run)
        page = parse(await get(exporter.url))
        streams = sorted(exporter.ingest.intake.receiver.streams)

    def of(family: str, engine: str, sample: str = "") -> float:
        labels = (("engine", engine), ("model_name", "tiny"))
        return page[family].samples[sample or family, labels]

    assert streams == ["ns/tiny/engine0/api0", "ns/tiny/engine0/api1"]
    name = "vllm:iteration_tokens_total"
    assert of(name, "0", name + "_count") == 50
    assert of(name, "0", name + "_sum") == 150
    assert of(name, "1", name + "_count") == 50
    assert of("vllm:generation_tokens", "0", "vllm:generation_tokens_total") == 150
    assert of("vllm:num_requests_running", "0") == 49
    assert of("vllm:num_requests_running", "1") == 7
    rejections = page["vllm:admission_rejections"].samples
    assert sum(rejections.values()) == 1


async def test_real_speed_keeps_the_recorded_times(start: Start, tmp_path: Path) -> None:
    """A second between two items takes a second; the minute before the first item is skipped."""
    described = {"engine_indexes": [0], "model": "tiny", "max_model_len": 64}
    file = tmp_path / "iterations.jsonl"
    records = [record(1, at, 0, 1, running=1) for at in (65.0, 66.0)]
    file.write_text(line("__init__", 1, 5.0, **described) + "".join(records))

    async with start() as exporter:
        path = convert(file, tmp_path / "calls.rec")
        player = Replay(path, exporter.endpoints[0], realtime=True, namespace="ns")
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.to_thread(player.run)

    assert 1.0 <= loop.time() - started < 5.0
