"""`sidestep compare` of request logs, of recordings, and of the last ten minutes of exporters."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import msgspec
import pytest
from aiohttp import web

from command_line import one_line, sidestep
from exporters import DATA, Start, recorded_run
from ports import free_port
from replays import replay
from request_runs import run, write
from web_servers import server

API = "/api/v1/{name:.+}"


def compare(*arguments: object) -> CompletedProcess[str]:
    """Run the command."""
    return sidestep("compare", *arguments)


def report(done: CompletedProcess[str]) -> dict[str, Any]:
    """Return the report of a command that was run with ``--json``."""
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows of a report by their quantities."""
    return {row["quantity"]: row for row in found["rows"]}


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """Return a request log."""
    return write(tmp_path / "before.jsonl", run(1))


def test_a_run_does_not_differ_from_itself(before: Path) -> None:
    """No change, in no row, and each interval has it."""
    done = compare(before, before, "--json")

    found = report(done)
    assert (done.returncode, found["verdict"]) == (0, "no difference seen")
    assert {"requests/s", "TTFT p95", "ITL of a request p50", "e2e p50"} <= rows(found).keys()
    for row in found["rows"]:
        value, low, high = row["change"]
        assert value == 0
        assert low is None or low <= 0 <= high


@pytest.mark.parametrize(("slower", "code", "verdict"), [(1.5, 1, "worse"), (0.67, 0, "better")])
def test_other_latencies_are_found(
    slower: float, code: int, verdict: str, before: Path, tmp_path: Path
) -> None:
    """Load comes first, and is the same; the verdict names the latencies."""
    after = write(tmp_path / "after.jsonl", run(2, slower=slower))

    done = compare(before, after)

    *_, last = lines = done.stdout.splitlines()
    assert done.returncode == code
    assert last.startswith(f"{verdict}: ")
    assert any(line.startswith("  TTFT p50") and line.endswith(verdict) for line in lines)
    heads = [line.split()[0] for line in lines if line.endswith("95 % interval")]
    assert heads == ["load", "latency", "throughput"]
    (rate,) = (line for line in lines if line.startswith("  requests/s"))
    assert not rate.endswith("differs")


def test_the_threshold_is_what_counts(before: Path, tmp_path: Path) -> None:
    """A change of a half is no regression where one of three quarters is allowed."""
    after = write(tmp_path / "after.jsonl", run(2, slower=1.5))

    assert compare(before, after, "--threshold", 75).returncode == 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"longer": 2.0}, "prompt tokens, mean"),
        ({"rate": 20.0}, "requests/s"),
    ],
)
def test_another_load_is_not_comparable(
    more: dict[str, Any], named: str, before: Path, tmp_path: Path
) -> None:
    """The reason names what differs, and a wider tolerance allows it."""
    after = write(tmp_path / "after.jsonl", run(2, **more))

    done = compare(before, after, "--json")

    found = report(done)
    assert (done.returncode, found["verdict"]) == (3, "not comparable")
    assert named in found["reason"]
    assert compare(before, after, "--load-tolerance", 300).returncode != 3


def test_a_slower_engine_serves_fewer_of_as_many_clients(before: Path, tmp_path: Path) -> None:
    """Of clients that wait for their answers, the rate follows from the engine."""
    after = write(tmp_path / "after.jsonl", run(2, slower=1.5, rate=10 / 1.5))

    done = compare(before, after, "--json")

    assert rows(report(done))["requests/s"]["verdict"] == "differs"
    assert done.returncode == 1


def test_requests_that_fail_are_worse(before: Path, tmp_path: Path) -> None:
    """None of 400 against one in eight."""
    failed = [
        record if number % 8 else msgspec.structs.replace(record, reason="abort")
        for number, record in enumerate(run(2))
    ]
    done = compare(before, write(tmp_path / "after.jsonl", failed))

    assert done.returncode == 1
    assert "requests not served +12.5 points" in done.stdout.splitlines()[-1]


def test_few_requests_have_no_verdict(tmp_path: Path) -> None:
    """Five requests say nothing of the next five."""
    few = write(tmp_path / "few.jsonl", run(1, 5))

    done = compare(few, few)

    assert done.returncode == 3
    assert "too few requests" in done.stdout.splitlines()[-1]


def test_one_log_has_both_runs(tmp_path: Path) -> None:
    """A time range selects requests by their arrival, and labels by their fields."""
    log = write(tmp_path / "log.jsonl.gz", [*run(1), *run(2, model="other", slower=1.5)])
    log.write_bytes(gzip.compress(log.read_bytes()))

    done = compare(f"{log}{{model=m}}", f'{log}{{model_name="other"}}', "--json")
    early = compare(
        f"{log}{{model=m}}@2026-11-20T10:00:00Z/2026-11-20T10:00:20Z",
        f"{log}{{model=m}}@1795168820/1795168840",
        "--json",
    )

    assert report(done)["a"]["extent"].startswith("m, 400 requests")
    assert done.returncode == 1
    shown = [report(early)[side]["extent"].split()[1] for side in "ab"]
    assert sum(map(int, shown)) == 400


async def test_a_recording_has_the_requests_that_the_exporter_logs(
    start: Start, tmp_path: Path
) -> None:
    """Real records and a recording of the same run: nothing differs, not even by rounding."""
    log = tmp_path / "requests.jsonl"
    async with start(requests_log=str(log)) as exporter:
        await replay(exporter, "core_aborts")

    done = compare(log, recorded_run("core_aborts"), "--json")

    found = report(done)
    assert found["a"]["extent"] == found["b"]["extent"]
    assert {row["change"][0] for row in found["rows"]} == {0}
    assert rows(found)["requests not served"]["a"][0] == 5 / 73


def test_errors_are_one_line(before: Path, tmp_path: Path) -> None:
    """Each names the input, and the exit code is that of errors."""
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(before.read_bytes() + b'{"key": 1}\n')
    naive = tmp_path / "naive.jsonl"
    naive.write_text(before.read_text().replace("Z", ""))
    mixed = write(tmp_path / "mixed.jsonl", [*run(1), *run(2, dialect="sglang")])
    cases = {
        naive: "line 1 is no record of a request",
        tmp_path / "none": f"cannot read {tmp_path / 'none'}: No such file",
        tmp_path: "Is a directory",
        empty: f"{empty}: no requests",
        broken: f"{broken}: line 401 is no record of a request",
        mixed: f"{mixed}: requests of several kinds of engines (sglang, vllm): select one, as in",
        DATA / "iterations_lora.jsonl.gz": "line 1 is no record of a request",
        DATA / "sglang_dp.rec.gz": "no requests",
        f"{before}@now": "behind @ must be START/END",
        "http://h{model_name=m@-1h/now": "must be like PLACE{LABEL=VALUE,...}@START/END",
        "": "must be like PLACE{LABEL=VALUE,...}@START/END",
        f"127.0.0.1:{free_port()}@-1h/now": "cannot connect",
        f"[::1]:{free_port()}": "cannot connect",
        f"{before}@now/-1h": "the range ends before it begins",
        f"{before}@-2h/-1h": "no such requests",
        f"{before}{{engine}}": "labels must be like",
        f"{before}{{pod=a}}": "records have no label pod",
    }
    for source, message in cases.items():
        one_line(compare(before, source), 2, message)
    one_line(compare(before), 2, "Missing argument 'B'")


async def test_a_real_exporter_without_requests(start: Start) -> None:
    """An exporter that has none, or no timeline, is compared by a Prometheus."""
    async with start() as exporter:
        done = await asyncio.to_thread(compare, exporter.url, exporter.url)
    async with start(web_disable_timeline="true") as exporter:
        without = await asyncio.to_thread(compare, exporter.url, exporter.url)

    one_line(done, 2, "no engine has reported a request that ended in the last ten minutes")
    one_line(without, 2, "no exporter with /api/v1/timeline: of a Prometheus give a time range")


async def test_a_real_exporter_with_a_timeline(start: Start) -> None:
    """Its requests are compared one by one, with their parts."""
    async with start() as exporter:
        await replay(exporter, "core_aborts")
        done = await asyncio.to_thread(compare, exporter.url, exporter.url)

    assert done.returncode == 0
    assert "73 requests" in done.stdout
    assert "prefill" in done.stdout


async def test_errors_of_exporters_are_one_line() -> None:
    """Nothing there, another server, and an answer of another kind."""
    url = f"http://127.0.0.1:{free_port()}"
    one_line(
        await asyncio.to_thread(compare, url, url), 2, f"{url}: cannot connect: Connection refused"
    )
    one_line(await asyncio.to_thread(compare, "http://", url), 2, "must be a URL")

    async def answer(_: web.Request) -> web.Response:
        return web.json_response([1])

    async with server(answer, "/other") as other:
        one_line(
            await asyncio.to_thread(compare, other, other), 2, "of a Prometheus give a time range"
        )
    async with server(answer, API) as odd:
        one_line(
            await asyncio.to_thread(compare, odd, odd),
            2,
            f"{odd}: no answer of a sidestep exporter",
        )
        one_line(
            await asyncio.to_thread(compare, f"{odd}@-1h/now", odd), 2, "no answer of a Prometheus"
        )


def test_a_change_beyond_all_floats_is_a_number(tmp_path: Path) -> None:
    """Latencies of no time after such of centuries, and the reverse."""
    a, b = (
        write(tmp_path / str(e2e), run(1, 20, e2e_seconds=e2e, ttft_seconds=e2e))
        for e2e in (1e-300, 1e10)
    )
    for sources in ((a, b), (b, a)):
        assert report(compare(*sources, "--json"))["rows"]
