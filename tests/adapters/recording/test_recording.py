"""The recorded times of a replay."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from benchmarks.stat_logger_calls import convert

from exporters import Start
from sidestep_adapters.recording.replay import Replay


def line(call: str, instance: int, at: float, **fields: Any) -> str:
    """Return one recorded call."""
    return json.dumps({"call": call, "instance": instance, "t_mono": at, **fields}) + "\n"


async def test_real_speed_keeps_the_recorded_times(start: Start, tmp_path: Path) -> None:
    """A second between two items takes a second; the minute before the first item is skipped."""
    described = {"engine_indexes": [0], "model": "tiny", "max_model_len": 64}
    file = tmp_path / "iterations.jsonl"
    scheduler = {"__type__": "SchedulerStats", "num_running_reqs": 1}
    stats = {"scheduler_stats": scheduler, "iteration_stats": None, "mm_cache_stats": None}
    records = [line("record", 1, at, engine_idx=0, **stats) for at in (65.0, 66.0)]
    file.write_text(line("__init__", 1, 5.0, **described) + "".join(records))

    async with start() as exporter:
        path = convert(file, tmp_path / "calls.rec")
        player = Replay(path, exporter.endpoints[0], realtime=True, namespace="ns")
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.to_thread(player.run)

    assert 1.0 <= loop.time() - started < 30.0
