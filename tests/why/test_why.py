"""``sidestep why``: of a simulated engine that one thing makes slow, it names that and nothing else."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from command_line import one_line, sidestep
from exporters import Start, until
from lookup_senders import serve
from pages import get
from ports import free_port
from reporting_processes import process
from sidestep.app.demo import recording
from sidestep.catalog.tuning import CAUSES
from sidestep.engines.sglang.wire import SglangRequest, SglangRequests
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.errors import ConfigError
from sidestep.metrics.timeline import Timeline
from sidestep.protocol.iteration_stats import FinishedRequestStats, IterationStats
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import EngineInfo, Heartbeat, Hello
from sidestep.protocol.progress import Progress
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_tools.request_records import Record
from sidestep_tools.why.analysis import report
from sidestep_tools.why.command import Question, _chosen
from sidestep_tools.why.evidence import evidence
from sidestep_tools.why.sources import from_file
from sidestep_tools.why.text import joined_line, report_lines, request_lines
from sidestep_tools.why.timeline import EngineTimeline, Steps, steps_of
from sidestep_tools.why.timeline import Timeline as Read
from sidestep_tools.why.trace import trace
from slow_engines import INFO, Load, connected, fed
from socket_peers import batch, connect
from web_servers import server

SLOW = {
    "front_end_in": Load(front_end=1.0),
    "slots": Load(slots=2),
    "tokens": Load(budget=64, prompt=600, long_prompt=600, interval=0.25, output=10),
    "kv_blocks": Load(capacity=700, interval=0.25),
    "lora": Load(adapters=1),
    "interference": Load(long_prompt=20000, budget=20000, per_token=0.00004, interval=0.15),
    "stalled": Load(stall=3.0),
}
"""By cause: an engine and a load of which this is wrong."""
SETTINGS = {
    "front_end_in": "--api-server-count",
    "slots": "--max-num-seqs",
    "tokens": "--max-num-batched-tokens",
    "kv_blocks": "--gpu-memory-utilization",
    "lora": "--max-loras",
    "interference": "--long-prefill-token-threshold",
    "stalled": "docs/health.md",
}


async def why(*arguments: object) -> str:
    """Return what the command prints."""
    done = await asyncio.to_thread(sidestep, "why", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("cause", SLOW)
async def test_it_names_what_is_wrong_and_nothing_else(cause: str, start: Start) -> None:
    """It says so in at most ten lines, with what to change."""
    async with fed(start, SLOW[cause]) as url:
        text = await why(url)
        (engine,) = json.loads(await why(url, "--json"))["engines"]

    assert [named["cause"] for named in engine["causes"]] == [cause]
    lines = text.splitlines()
    assert len(lines) <= 10
    assert f"\n{cause}: " in text
    assert SETTINGS[cause] in text
    assert "nothing binds" not in text
    if cause in engine["limits"]:
        assert f"the limit {cause} held {engine['limits'][cause]:.0%} of the time" in text


async def test_nothing_binds_a_well_engine(start: Start) -> None:
    """There is nothing to change, and all is seen."""
    async with fed(start, Load()) as url:
        text = await why(url)

    assert "nothing binds" in text
    assert "change:" not in text
    assert "not seen" not in text
    assert "limits of admission, by time: 100% none" in text


def test_one_request_is_known() -> None:
    """A quiet night has no more, and it takes no time from its end to its end."""
    ended = Record(key="e/1/1", time=datetime.now(timezone.utc), e2e_seconds=1.0)
    engine = EngineTimeline(id="e", engine="0", model="m", dialect="vllm", requests=[ended])

    assert "1 request ended and 0 steps in 0s" in next(report_lines(report(engine, ())))


async def test_few_requests_name_no_cause(start: Start) -> None:
    """However slow they are; it says why."""
    async with fed(start, Load(requests=19, slots=1)) as url:
        text = await why(url)

    assert "19 requests ended" in text
    assert "too few to name a cause" in text
    assert "change:" not in text


async def test_latencies_and_shares_are_those_of_the_simulation(start: Start) -> None:
    """Parts before the first token sum to the TTFT, and all parts to the e2e latency."""
    async with fed(start, SLOW["slots"]) as url:
        (engine,) = json.loads(await why(url, "--json"))["engines"]
        requests = json.loads(await why(url, "--slowest", 99, "--json"))["requests"]

    records = [each["record"] for each in requests]
    assert len(records) == engine["requests"] == 60
    assert [r["e2e_seconds"] for r in records] == sorted(r["e2e_seconds"] for r in records)[::-1]
    for record in records:
        assert sum(record["parts"].values()) == pytest.approx(record["e2e_seconds"], abs=2e-6)
    firsts = sorted(record["ttft_seconds"] for record in records)
    assert engine["ttft"]["p50"] == firsts[30]
    assert engine["ttft"]["p95"] == firsts[57]
    waited = sum(record["parts"].get("queue.slots", 0.0) for record in records)
    total = sum(record["e2e_seconds"] for record in records)
    assert engine["e2e"]["parts"]["queue.slots"] == pytest.approx(waited / total, abs=1e-5)
    assert sum(engine["limits"].values()) == pytest.approx(1.0)


async def test_a_requests_time_line(start: Start) -> None:
    """Its phases follow one another from its arrival to its end."""
    async with fed(start, SLOW["kv_blocks"]) as url:
        text = await why(url, "req-30")
        (request,) = json.loads(await why(url, "req-30", "--json"))["requests"]
        missing = await asyncio.to_thread(sidestep, "why", url, "req-99")

    head, *lines = text.splitlines()
    assert head.startswith("req-30 (engine 0, length): TTFT ")
    assert [line.split()[1] for line in lines][:4] == ["front_end_in", "queue", "prefill", "decode"]
    phases = request["phases"]
    assert all(a["end"] == b["start"] for a, b in pairwise(phases))
    length = (phases[-1]["end"] - phases[0]["start"]) / 1e6
    assert length == pytest.approx(request["record"]["e2e_seconds"], abs=2e-6)
    one_line(missing, 2, "request req-99: none with this id or key has ended")


async def test_both_parts_of_a_request(start: Start) -> None:
    """Whichever exporters have them, one id finds them, in their order and with both latencies."""

    def record(transfer: str, begin: str, seconds: float, **more: str) -> Record:
        at = datetime.fromisoformat(f"2026-11-24T12:00:{begin}+00:00")
        ended = at + timedelta(seconds=seconds)
        found = Record(key=transfer, time=ended, arrival=at, e2e_seconds=seconds, ttft_seconds=0.5)
        return msgspec.structs.replace(found, transfer=transfer, **more)

    handed_over = record("handed_over", "01.000", 2.0, engine="p", id="router", join_key="k")
    received = record("received", "03.250", 4.0, engine="d", id="other", join_key="k", trace_id="t")
    bystander = record("received", "03.250", 4.0, id="bystander")
    engines = [
        EngineTimeline(id=name, engine=name, requests=requests)
        for name, requests in (("d", [bystander, received]), ("p", [handed_over]))
    ]
    for name in ("router", "k", "t", "other"):
        chosen = _chosen(engines, Question(request=name))
        found = [each.transfer for _, each in chosen]
        # The trace and the id of one part do not name the other, which has their key.
        assert found == ["handed_over", "received"], name
    text = joined_line([each for _, each in chosen])
    assert text == (
        "other: TTFT 2.75s, e2e 6.25s over both engines: prefill_remote 2.00s on engine p, 250ms until it"
        " arrived on engine d"
    )
    assert joined_line([received]) == ""
    slow_clock = record("received", "00.500", 4.0, engine="d", id="other")
    assert joined_line([handed_over, slow_clock]) == (
        "other: TTFT 500ms, e2e 4.00s over both engines: prefill_remote 2.00s on engine p, but by its clock"
        " it arrived on engine d 500ms before"
    )

    async with start() as exporter:
        url = exporter.url.removesuffix("/metrics")
        missing = await asyncio.to_thread(sidestep, "why", "--request", "k", url, url)
    one_line(missing, 2, "request k: none with this id or key has ended")


async def test_twice_the_cache(start: Start) -> None:
    """Where the cache is full, it says what a larger one would hit, as the curve has it."""
    async with start() as exporter, connected(exporter, SLOW["kv_blocks"]) as publisher:
        await until(lambda: bool(publisher.lookup_key))
        await asyncio.to_thread(serve, publisher)
        await until(lambda: publisher.drained)
        url = exporter.url.removesuffix("/metrics")
        (curve,) = json.loads(await get(f"{url}/api/v1/kv/curve"))["engines"]
        text = await why(url)

    ratios = {point["capacity"]: point["hit_ratio"] for point in curve["curve"]}
    rise = 100 * (ratios[2.0] - ratios[1.0])
    assert rise > 5
    assert f"at twice the cache the hit ratio rises by {rise:.0f} points" in text


def test_steps_of_an_asynchronous_engine_take_what_they_add() -> None:
    """A step that is scheduled while another runs takes as long as it runs after that one."""
    ends = [1000.0 + 0.11 * (number // 2) + 0.1 * (number % 2) for number in range(100)]
    kinds = [number % 2 for number in range(100)]
    none = [0] * 100
    steps = Steps(
        end=ends,
        seconds=[0.11] * 100,
        prefill_requests=kinds,
        prefill_tokens=none,
        decode_requests=[8] * 100,
        decode_tokens=none,
        limit=none,
    )
    cause = next(each for each in CAUSES if each.name == "interference")

    found = [*evidence(cause, [*steps_of(EngineTimeline(id="e", steps=steps), ["none"])], {}, ())]

    assert found == ["a step with prefill takes 100ms (median), without 10.0ms"]


async def test_records_and_recordings_give_the_same_answer(start: Start, tmp_path: Path) -> None:
    """A file of records has no steps, so no limits; parts are the same."""
    log = tmp_path / "requests.jsonl"
    async with fed(start, SLOW["slots"], requests_log=str(log)) as url:
        (live,) = json.loads(await why(url, "--json"))["engines"]
    (read,) = json.loads(await why("--from", log, "--json"))["engines"]

    assert [each["cause"] for each in read["causes"]] == ["slots"]
    assert {**read["e2e"]} == live["e2e"]
    assert read["limits"] == {}
    assert any("they come with steps" in each for each in read["unseen"])
    assert "req-7 " in await why("--from", log, "req-7")


async def test_the_slowest_engine_comes_first(start: Start) -> None:
    """The others are one line; --engine selects one."""
    well = EngineInfo("w", "vllm", {"engine": "1", "model_name": "m"}, features=INFO.features)
    async with (
        start() as exporter,
        connected(exporter, Load(), well),
        connected(exporter, SLOW["slots"]),
    ):
        url = exporter.url.removesuffix("/metrics")
        both, one = await why(url), await why(url, "--engine", "1")
        unknown = await asyncio.to_thread(sidestep, "why", url, "--engine", "2")

    assert both.startswith("engine 0 (m)")
    assert "1 other engine (--engine NAME): 1 without a cause" in both
    assert one.startswith("engine 1 (m)")
    one_line(unknown, 2, "--engine 2: there is no such engine; known: w, e")


async def test_a_full_engine_without_requests(start: Start) -> None:
    """Without the tap and request events, the live numbers name what they support."""
    info = EngineInfo("p", "vllm", {"engine": "0", "model_name": "m"})
    async with start() as exporter:
        publisher = Publisher(exporter.endpoints[0], "s", [info], flush_interval=0.01)
        stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=7, kv_cache_usage=0.99)
        publisher.push(VllmStep(0, time.monotonic(), time.time(), stats))
        url = exporter.url.removesuffix("/metrics")

        async def is_full() -> bool:
            return "is full" in await get(f"{url}/api/v1/live")

        await until(is_full)
        text = await why(url)
        await asyncio.to_thread(publisher.close)

    assert text.startswith("engine 0 (m) is full: 7 requests wait, KV cache 99% in use: neither ")
    assert "\nkv_blocks: " in text
    assert "its requests: none has ended, or it sends no request events" in text
    assert "by the tap (docs/vllm-core.md)" in text


async def test_a_hang_without_a_live_page(start: Start) -> None:
    """The timeline has the states of engines, so the one that hangs is first."""
    async with (
        start(web_disable_ui="true") as exporter,
        process(exporter, "ns/m/0", "one", 1),
        process(exporter, "ns/m/1", "other", 2) as hung,
    ):
        hung.progress = [Progress(0, steps=5, unfinished=2, step_age=200.0)]
        url = exporter.url.removesuffix("/metrics")

        async def is_stalled() -> bool:
            return '"state":"stalled"' in await get(f"{url}/api/v1/timeline")

        await until(is_stalled)
        text = await why(url)

    assert text.startswith("engine ns/m/1 (m) is stalled (step): ")
    assert "\nstalled: " in text


async def test_replicas_are_named_as_on_the_live_page(start: Start) -> None:
    """Replicas have the same label, and only their identities tell them apart; the busiest is first."""
    labels = {"engine": "0", "model_name": "m"}
    ended = IterationStats(finished_requests=[FinishedRequestStats(e2e_latency=0.2)])
    async with start() as exporter, connect(exporter) as peer:
        infos = [EngineInfo(f"{name}/m/0", "vllm", labels) for name in ("a", "b")]
        await peer.greet(Hello(VERSION, "s", 1, 1, 1, infos))
        url = exporter.url.removesuffix("/metrics")
        seq = 0

        async def has_ended() -> bool:
            nonlocal seq
            seq += 1
            await peer.send(batch(seq, VllmStep(1, 1.0, 1.0, None, ended)))
            await peer.send(Heartbeat(1, seq, 0))
            rows = json.loads(await get(f"{url}/api/v1/live"))["engines"]
            return any(row["id"] == "b/m/0" and row["finished"] for row in rows)

        await until(has_ended)
        both, one = await why(url), await why(url, "--engine", "a/m/0")
        neither = await asyncio.to_thread(sidestep, "why", url, "--engine", "0")

    assert both.startswith("engine b/m/0 (m)")
    assert one.startswith("engine a/m/0 (m)")
    one_line(neither, 2, "--engine 0: there is no such engine; known: a/m/0, b/m/0")


async def test_an_sglang_tokenizer_has_its_schedulers_limits(start: Start) -> None:
    """Requests wait in the tokenizer's process, and a scheduler in another one says for what."""
    shared = {"model_name": "m", "engine_type": "unified"}
    ranks = {"moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0"}
    infos = [EngineInfo(name, "sglang", labels) for name, labels in (
        ("s", {**shared, **ranks}), ("t", shared)
    )]  # fmt: skip
    ended = [
        SglangRequest(n, 1e9, 10.0, 16.0, "stop", queued=10.1, scheduled=15.0, first=15.2)
        for n in range(30)
    ]

    def held(seconds: float) -> Samples:
        name = "sidestep_step_limit_seconds_total"
        samples = [Sample(["slots"], 9 * seconds), Sample(["none"], seconds)]
        return Samples(0, time.monotonic(), [Family(name, "counter", ["limit"], samples)])

    async with start() as exporter:
        scheduler, tokenizer = (
            Publisher(exporter.endpoints[0], info.id, [info], flush_interval=0.01) for info in infos
        )
        scheduler.push(held(1.0))
        engines = exporter.registry.engines
        await until(lambda: "s" in engines and bool(engines["s"].part(Timeline).limits))
        scheduler.push(held(1.0))
        tokenizer.push(SglangRequests(0, 1.0, 1, ended))
        await until(lambda: scheduler.drained and tokenizer.drained)
        text = await why(exporter.url.removesuffix("/metrics"))
        await asyncio.to_thread(scheduler.close)
        await asyncio.to_thread(tokenizer.close)

    assert "limits of admission, by time: 90% slots, 10% none" in text
    assert "\nslots: " in text
    assert "raise --max-running-requests" in text


async def test_an_exporter_without_a_timeline_or_engines(start: Start) -> None:
    """One line says so, with the flag."""
    async with start(web_disable_timeline="true") as exporter:
        url = exporter.url.removesuffix("/metrics")
        one_line(await asyncio.to_thread(sidestep, "why", url), 1, "--web.disable-timeline")
    async with start() as exporter:
        text = await why(exporter.url.removesuffix("/metrics"))

    assert text == "no engine has sent anything yet\n"


@pytest.mark.parametrize(
    "wrong", [{"limit_seconds": {"slots": 1.0, "none": -1.0}}, {"steps": {"end": [1.0]}}]
)
async def test_a_timeline_that_cannot_be_is_one_line(wrong: dict[str, Any]) -> None:
    """Limits of negative length, and columns of different lengths."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"engines": [{"id": "e", **wrong}]})

    async with server(answer, "/api/v1/timeline") as url:
        one_line(await asyncio.to_thread(sidestep, "why", url), 1, "it has no timeline")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n", "line 1 is no record of a request"),
        (b"\xff", "line 1 is no record of a request"),
        (b"sidestep recording 1\n", "the recording has no requests"),
        (b"sidestep recording 1\n\0\0", "cut short"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    """It says what is wrong where."""
    path = tmp_path / "file"
    path.write_bytes(content)

    one_line(sidestep("why", "--from", path), 2, message)


RECORD: dict[str, Any] = {
    "key": "e/1/1",
    "time": "2026-11-20T14:48:56.611683Z",
    "arrival": "2026-11-20T14:48:50Z",
    "queued": "2026-11-20T14:48:51Z",
    "e2e_seconds": 6.6,
    "queue_seconds": 2.0,
    "prefill_seconds": 1.0,
    "decode_seconds": 2.0,
    "ttft_seconds": 4.0,
    "preempted_seconds": 0.5,
    "preempted_at": [[3.5, 0.5]],
    "parts": {"queue.slots": 2.0, "decode": 1.5, "preempted": 0.5},
}
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]),
    st.just({"decode": 1e9}), st.just([[0.0, 1e9]]),
    st.datetimes(timezones=st.just(timezone.utc)).map(str), st.datetimes().map(str),
)  # fmt: skip


@given(st.lists(st.dictionaries(st.sampled_from([*RECORD]), ODD, max_size=4), max_size=30))
def test_damage_is_one_line_or_an_answer(changes: list[dict[str, Any]]) -> None:
    """Whatever records have, there is a report, a time line and a trace, or one clear line."""
    lines = [json.dumps({**RECORD, **change}) for change in changes]
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("\n".join(lines))
        file.flush()
        try:
            timeline = from_file(Path(file.name))
        except ConfigError as error:
            timeline, message = Read(engines=[]), str(error)
        else:
            message = file.name
    assert file.name in message
    for engine in timeline.engines:
        shown = [*report_lines(report(engine, timeline.limits))]
        shown += [line for each in engine.requests for line in request_lines(engine, each)]
        assert shown
    events = trace(timeline)["traceEvents"]
    assert msgspec.json.decode(msgspec.json.encode(events)) == events
    assert all(event.get("dur", 0) >= 0 for event in events)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--from", "/no/such/file"], 2, "cannot read /no/such/file"),
        (["--from", "/dev/null"], 2, "/dev/null: no requests"),
        ([f"127.0.0.1:{free_port()}"], 1, "cannot connect"),
        (["ftp://x"], 2, "must be a URL"),
        (["--minutes", "11"], 2, "--minutes"),
        (["http://x", "id", "--from", "file"], 2, "not both"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], code: int, message: str) -> None:
    """It says what is expected."""
    one_line(sidestep("why", *arguments), code, message)


MADE_WRONG = {
    "vllm-full": ["slots"],
    "vllm-hangs": [],
    "vllm-aborts": [],
    "vllm-lora": ["lora"],
    "vllm-cache": ["kv_blocks"],
    "sglang": [],
}
"""Causes by run of the demo; the others have a light load."""


@pytest.mark.parametrize("run", MADE_WRONG)
async def test_it_names_what_was_made_wrong_in_the_demos_runs(run: str) -> None:
    """And nothing else; each has enough requests to name a cause, and limits."""
    file = recording(f"{run}.rec.gz")
    (engine, *_) = json.loads(await why("--from", file, "--json"))["engines"]
    text = await why("--from", file)

    assert [each["cause"] for each in engine["causes"]] == MADE_WRONG[run]
    assert engine["requests"] >= 20
    assert ("\naborts: " in text) == (run == "vllm-aborts")
    assert ("nothing binds" in text) == (not MADE_WRONG[run] and run != "sglang")
    # SGLang tells the limits of its steps, but not those of a single one.
    assert ("not seen: limits" in text) == (run == "sglang")
