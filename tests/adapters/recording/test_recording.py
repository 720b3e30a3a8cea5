"""The recorded times of a replay."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.stat_logger_calls import convert

from command_line import one_line, sidestep
from exporters import Start, until
from pages import get
from sidestep.app.demo import recording
from sidestep_adapters.recording.format import Items, Writer, read
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


class _Rounds(Replay):
    """A replay that ends after some rounds."""

    most = 1

    def wait_for_round(self) -> None:
        if self.progress.rounds == self.most:
            self._stop.set()


@pytest.mark.parametrize(
    ("name", "rounds", "requests"), [("vllm-aborts", 1, 31), ("sglang", 2, 31)]
)
async def test_at_real_speed_requests_end_now(
    name: str, rounds: int, requests: int, start: Start
) -> None:
    """Each round has Unix times of its own, with the recorded latencies."""
    began = time.time() - 2.0
    engines: dict[str, list[dict[str, Any]]] = {}
    async with start() as exporter:
        for namespace, most in (("now", rounds), ("recorded", 1)):
            player = _Rounds(
                recording(f"{name}.rec.gz"), exporter.endpoints[0],
                realtime=namespace == "now", namespace=namespace, pace=100.0,
            )  # fmt: skip
            player.most = most
            await asyncio.to_thread(player.run, once=False)

        async def all_have_ended() -> bool:
            engines.update({"now": [], "recorded": []})
            answer = await get(exporter.url.replace("/metrics", "/api/v1/timeline"))
            for each in json.loads(answer)["engines"]:
                engines[each["id"].partition("/")[0]] += each["requests"]
            return [*map(len, engines.values())] == [rounds * requests, requests]

        await until(all_have_ended)

    arrivals = {one["arrival"] for one in engines["now"]}
    assert len(arrivals) == rounds * len({one["arrival"] for one in engines["recorded"]})
    assert min(arrivals) > time.strftime("%FT%T", time.gmtime(began))
    now, recorded = (sorted(one["e2e_seconds"] or 0.0 for one in some) for some in engines.values())
    assert now == sorted(rounds * recorded)


def test_a_recording_on_a_disk_that_becomes_full_ends_with_a_whole_record(tmp_path: Path) -> None:
    """The disk takes a part of the next one without an error; earlier ones stay readable."""
    writer = Writer(tmp_path / "x.rec")
    first = Items(0.0, "s", [])
    writer.write(first)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            writer.write(Items(0.0, "s", [msgspec.Raw(msgspec.msgpack.encode("x" * 1000))]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*read(tmp_path / "x.rec")] == [first]

    writer.write(first)
    writer.close()
    assert [*read(tmp_path / "x.rec")] == [first, first]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_recording_on_a_full_disk_is_a_usage_error(tmp_path: Path) -> None:
    """The line names the file."""
    done = sidestep("record", "/dev/full", "--listen", f"ipc://{tmp_path}/i.ipc")
    one_line(done, 2, "cannot write /dev/full: No space left on device")
