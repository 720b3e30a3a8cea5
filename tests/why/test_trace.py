"""``sidestep timeline``: a trace in Chrome's Trace Event Format, of an exporter and of files."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from command_line import one_line, sidestep
from exporters import Start, recorded_run
from ports import free_port
from slow_engines import Load, SlowEngine, fed

LOAD = Load(capacity=700, interval=0.15, output=80)
"""A small cache: requests wait, and are preempted."""


def checked(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace without metadata, after checking them against the format.

    The times of all events are sorted, and slices of one track are disjoint or within one another.
    """
    found = json.loads(path.read_text())
    assert found["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = []
    named: set[tuple[int, int]] = set()
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str)
        assert {type(event[key]) for key in ("pid", "tid", "ts")} == {int}
        if event["ph"] == "M":
            assert not events, "metadata comes first"
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            named.add((event["pid"], event["tid"]))
            continue
        events.append(event)
        assert (event["pid"], event["tid"]) in named
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
        else:
            assert (event["ph"], event["s"]) == ("i", "t")
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    open_slices: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for event in events:
        ends = open_slices[event["pid"], event["tid"]]
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1], event
            ends.append(end)
    return events


async def write(*arguments: object) -> None:
    """Run the command."""
    done = await asyncio.to_thread(sidestep, "timeline", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ui.perfetto.dev" in done.stdout


async def test_the_trace_of_an_exporter(start: Start, tmp_path: Path) -> None:
    """It has every step and request with its parts, and an instant for each preemption."""
    path = tmp_path / "trace.json"
    async with fed(start, LOAD) as url:
        await write(url, "-o", path)

    found = checked(path)
    kinds = [type(event).__name__ for event in SlowEngine(LOAD).events()]
    steps = [event for event in found if event["tid"] == 1]
    assert len(steps) == kinds.count("Iteration")
    assert {step["args"]["limit"] for step in steps} >= {"none", "kv_blocks"}
    assert all(step["args"]["requests"] > 0 for step in steps)
    requests = [event for event in found if event["name"].startswith("req-")]
    assert len(requests) == kinds.count("Finished") == LOAD.requests
    for request in requests:
        parts = request["args"]["parts"]
        assert sum(parts.values()) * 1e6 == pytest.approx(request["dur"], abs=3)
    instants = [event for event in found if event["ph"] == "i"]
    assert len(instants) == kinds.count("Preempted") > 0
    limits = [event for event in found if event["tid"] == 2]
    assert {event["name"] for event in limits} >= {"none", "kv_blocks"}
    # Those in flight at the same time have tracks of their own, which later ones use again.
    tracks = {event["tid"] for event in requests}
    assert 1 < len(tracks) < LOAD.requests


@pytest.mark.parametrize("run", ["core_lora", "core_dp"])
async def test_the_trace_of_a_recording(run: str, tmp_path: Path) -> None:
    """Recordings of real engines have steps and requests, of each rank."""
    path = tmp_path / "trace.json"

    await write(recorded_run(run), "-o", path)

    found = checked(path)
    assert {event["pid"] for event in found} == ({1, 2} if run == "core_dp" else {1})
    assert {1, 10} <= {event["tid"] for event in found}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/no/such/file", "-o", "x.json"], 2, "cannot read /no/such/file"),
        ([f"127.0.0.1:{free_port()}", "-o", "x.json"], 1, "cannot connect"),
        ([recorded_run("core"), "-o", "/no/such/folder/x"], 2, "cannot write /no/such/folder/x"),
        ([recorded_run("core")], 2, "-o"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[object], code: int, message: str) -> None:
    """It says what is expected."""
    one_line(sidestep("timeline", *arguments), code, message)


def test_the_file_that_was_read_is_not_overwritten(tmp_path: Path) -> None:
    """Not by another name either: a recording cannot be made again."""
    run, link = tmp_path / "run", tmp_path / "link"
    run.write_bytes(recorded_run("core_lora").read_bytes())
    link.symlink_to(run)

    one_line(sidestep("timeline", run, "-o", link), 2, "is the file that was read")

    assert run.read_bytes() == recorded_run("core_lora").read_bytes()
