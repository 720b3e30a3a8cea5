"""Records of requests: one for each request that ended, whatever is killed, full or slow."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from command_line import ENVIRON
from exporters import Start, recorded_run
from pages import get, parse
from records_of import recorded
from replays import replay
from request_runs import lines
from schedulers import WALL, Scheduler, actions
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Identity,
    Iteration,
    Output,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.requests.log_file import LogFile
from sidestep.transport.process import lowest_free_descriptor
from sidestep_adapters.recording.replay import Replay

STOP = FINISH_REASONS.index("stop")


@given(actions)
def test_a_record_for_each_request_that_ended(chosen: list[tuple[str, int, int]]) -> None:
    """Its reason, tokens and latencies follow from the definitions."""
    events = Scheduler().run(chosen)
    made = {record.key: record for record in recorded(events).records}
    ends = {f"e/1/{e.request}": e for e in events if isinstance(e, Finished)}
    assert made.keys() == ends.keys()
    queued = {f"e/1/{e.request}": e for e in events if isinstance(e, Queued)}
    for key, end in ends.items():
        record, begin = made[key], queued[key]
        outputs = [
            (event, output.tokens[at] if output.tokens else 1)
            for event in events
            if isinstance(event, Iteration)
            for output in event.outputs
            for at in [i for i, number in enumerate(output.requests) if number == end.request]
        ]
        gaps = [b.stamp - a.stamp for (a, _), (b, _) in pairwise(outputs)]
        assert record.reason == FINISH_REASONS[end.reason]
        assert record.prompt_tokens == begin.prompt_tokens
        assert record.output_tokens == end.generation_tokens
        assert record.extra_tokens == sum(count - 1 for _, count in outputs[1:])
        assert record.sample == begin.sample
        assert record.max_itl_seconds == pytest.approx(max(gaps), abs=1e-5) if gaps else True
        if outputs:
            assert record.ttft_seconds == pytest.approx(
                outputs[0][0].wall - begin.arrival, abs=1e-5
            )
        assert record.e2e_seconds == pytest.approx(end.wall - begin.arrival, abs=1e-5)


def simple(number: int, stamp: float, **more: Any) -> list[Event]:
    """Return the events of a request of one token."""
    step = Iteration(stamp, stamp + 0.01, WALL + stamp + 0.01, [Output(stamp + 0.01, [number])])
    return [
        Queued(number, stamp, WALL + stamp, 5, **more),
        Scheduled(number, stamp + 0.001),
        step,
        Finished(number, stamp + 0.01, WALL + stamp + 0.01, STOP, 5, 1),
    ]


def test_an_engine_that_dies_leaves_records() -> None:
    """Another process numbers the requests, so those of the first have no other end."""
    begun = simple(7, 1.0)[:-1]
    (record,) = recorded(begun, RequestEvents(0, 2.0, 2)).records
    assert (record.key, record.reason, record.output_tokens) == ("e/1/7", "engine_died", 1)
    assert record.e2e_seconds is None


def test_dropped_events_are_not_a_death() -> None:
    """The requests go on; those that ended unseen are counted."""
    kept = recorded(simple(7, 1.0)[:-1], RequestEvents(0, 2.0, 2, unseen=3))
    assert (kept.records, kept.lost) == ([], 3)


def test_identity() -> None:
    """The trace context is taken apart."""
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    (record,) = recorded(simple(1, 1.0, identity=Identity("cmpl-1", "", "", trace, -2))).records
    assert (record.id, record.trace_id, record.parent_span_id) == ("cmpl-1", "a" * 32, "b" * 16)
    assert record.priority == -2


async def test_a_recorded_run_of_a_real_engine(start: Start, tmp_path: Path) -> None:
    """As many lines as requests of each reason on the page; latencies add up to the page's."""
    log = tmp_path / "requests.jsonl"
    async with start(requests_log=str(log)) as exporter:
        await replay(exporter, "core_aborts")
        page = parse(await get(exporter.url))
    found = lines(log)
    reasons = Counter(record["reason"] for record in found)
    counted = {
        dict(key)["finished_reason"]: value
        for (_, key), value in page["vllm:request_success"].samples.items()
        if value
    }
    assert reasons == counted
    assert reasons["abort"] > 0
    sums = {
        name: value for (name, _), value in page["vllm:request_queue_time_seconds"].samples.items()
    }
    served = [record for record in found if record["reason"] != "abort"]
    queued = sum(record["queue_seconds"] for record in served)
    assert queued == pytest.approx(sums["vllm:request_queue_time_seconds_sum"], abs=1e-3)
    assert len({record["key"] for record in found}) == len(found)
    assert {record["id"] for record in found} == {""}
    assert page["sidestep_request_records"].samples.popitem()[1] == len(found)


async def test_goodput(start: Start, tmp_path: Path) -> None:
    """Requests and tokens that met all objectives, as their records say."""
    log = tmp_path / "requests.jsonl"
    slo = ("ttft=30ms", "e2e=2s", "inter_token=50ms")
    flags = {"tenants_by": "priority", "tenants_max": "1"}
    async with start(requests_log=str(log), slo=slo, **flags) as exporter:
        await replay(exporter, "core_aborts")
        page = parse(await get(exporter.url))
    good = [
        record
        for record in lines(log)
        if record["reason"] != "abort" and all(record["objectives"].values())
    ]
    assert {name for record in good for name in record["objectives"]} == {
        "ttft",
        "e2e",
        "inter_token",
    }
    assert 0 < len(good) < len(lines(log))
    found = {
        name: sum(page[f"sidestep_goodput_{name}"].samples.values())
        for name in ("requests", "tokens")
    }
    assert found == {
        "requests": len(good),
        "tokens": sum(record["output_tokens"] for record in good),
    }
    for name, total in found.items():
        by_tenant = page[f"sidestep_tenant_goodput_{name}"].samples
        assert {dict(labels)["tenant"] for _, labels in by_tenant} == {"0", "__other__"}
        assert sum(by_tenant.values()) == total


async def test_conditions_and_shares(start: Start, tmp_path: Path) -> None:
    """Only requests that match have a line, and of those a share."""
    log = tmp_path / "requests.jsonl"
    async with start(requests_log=str(log), requests_log_if="reason = abort") as exporter:
        await replay(exporter, "core_aborts")
    aborted = lines(log)
    assert {record["reason"] for record in aborted} == {"abort"}
    log.unlink()
    async with start(requests_log=str(log), requests_log_share="0.0") as exporter:
        await replay(exporter, "core_aborts")
    assert lines(log) == []


def test_rotation_keeps_whole_lines_within_a_bound(tmp_path: Path) -> None:
    """The oldest file is deleted."""
    path = tmp_path / "log"
    file = LogFile(path, 1000, 3)
    for number in range(100):
        file.write(b"%06d %s\n" % (number, b"x" * 92))
    kept = [tmp_path / name for name in ("log.2", "log.1", "log")]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    numbers = [int(line.split()[0]) for each in kept for line in each.read_bytes().splitlines()]
    assert numbers == list(range(70, 100))
    assert all(each.stat().st_size <= 1000 for each in kept)


def test_attempts_without_free_descriptors_delete_no_file(tmp_path: Path) -> None:
    """The former ones are renamed once, however often the new one cannot be opened."""
    path = tmp_path / "records.jsonl"
    file = LogFile(path, 10, 4)
    for number in range(4):
        file.write(b"record %d\n" % number)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor(), hard))
    try:
        for _ in range(4):
            with pytest.raises(OSError, match="Too many open files"):
                file.write(b"record 4\n")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    file.write(b"record 4\n")
    kept = b"".join(each.read_bytes() for each in sorted(tmp_path.iterdir(), reverse=True))
    assert kept == b"".join(b"record %d\n" % number for number in (1, 2, 3, 4))


def test_a_deleted_file_is_made_again(tmp_path: Path) -> None:
    """An operator deletes it where the disk is full; no record goes to what nobody can read."""
    path = tmp_path / "records.jsonl"
    file = LogFile(path, 1000, 3)
    file.write(b"record 1\n")
    path.unlink()
    file.write(b"record 2\n")
    file.write(b"record 3\n")
    assert path.read_bytes() == b"record 2\nrecord 3\n"


def test_a_line_that_was_cut_is_ended(tmp_path: Path) -> None:
    """Its successor's lines are not appended to it."""
    path = tmp_path / "log"
    path.write_bytes(b'{"key": "a"}\n{"key": "b')
    LogFile(path, 1000, 1).write(b'{"key": "b"}\n')
    assert path.read_bytes().splitlines() == [b'{"key": "a"}', b'{"key": "b', b'{"key": "b"}']


async def test_a_full_disk_costs_nothing_but_counted_records(start: Start) -> None:
    """Ingest goes on; what waits is bounded, and written once there is space."""
    async with start(requests_log="/dev/full") as exporter:
        await replay(exporter, "core_aborts")
        page = parse(await get(exporter.url))
        pending = page["sidestep_request_records_pending"].samples.popitem()[1]
        assert pending == page["sidestep_request_records"].samples.popitem()[1] > 0


async def test_standard_output(tmp_path: Path) -> None:
    """Lines go to the standard output, the log's to the other."""
    endpoint = f"ipc://{tmp_path}/i.ipc"
    exporter = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidestep", "serve", "--requests.log", "-",
        "--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", endpoint,
        stdout=asyncio.subprocess.PIPE, env=ENVIRON,
    )  # fmt: skip
    run = recorded_run("core_aborts")
    player = Replay(run, endpoint, realtime=False, namespace="test", connect_timeout=60.0)
    await asyncio.to_thread(player.run)
    exporter.terminate()
    printed, _ = await exporter.communicate()
    reasons = [json.loads(line)["reason"] for line in printed.splitlines()]
    assert "abort" in reasons
