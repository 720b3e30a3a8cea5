"""Records of a real vLLM's requests: one for each request of its clients, with their own numbers."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporters import until
from real_engines.comparison import (
    Page,
    assert_complete,
    count,
    idle,
    parse,
    report,
    settled_alone,
    value,
)
from real_engines.comparison import total as observed
from real_engines.load import MAIN_ENVIRON, MAIN_FLAGS, Answer, Ask, Client, generated, reasons
from real_engines.processes import ExporterProcess
from real_engines.sites import TAP, VllmSite
from request_runs import lines

pytestmark = pytest.mark.engine

IDENTITY = {"SIDESTEP_REQUEST_IDENTITY": "full"}
SENDERS = {"tap": (TAP, {}), "plugin": ([], {"SIDESTEP_VLLM_MODE": "instead"})}
"""Flags and variables with which requests' events are sent, by the part that sends them."""
HANG = 5.0
"""Seconds for which a core hangs."""


@pytest.fixture(params=SENDERS)
def sender(request: pytest.FixtureRequest) -> tuple[list[str], dict[str, str]]:
    """Return the flags and variables of one that sends requests' events."""
    return SENDERS[request.param]


def ends(records: list[dict[str, Any]]) -> Counter[str]:
    """Count records by reason."""
    return Counter(record["reason"] for record in records)


async def test_records_have_the_objectives_of_the_page(
    vllm: VllmSite, tmp_path: Path, sender: tuple[list[str], dict[str, str]]
) -> None:
    """Where no client leaves, they agree with counters and with the clients' own books."""
    log = tmp_path / "requests.jsonl"
    flags, environ = sender
    server = vllm.server([*MAIN_FLAGS, *flags], {**MAIN_ENVIRON, **IDENTITY, **environ})
    limits = ("--slo", "ttft=200ms", "--slo", "e2e=1s")
    async with vllm.with_exporter(server, "--requests.log", str(log), *limits) as exporter:
        async with Client(server.base) as client:
            answers = await client.mixed(leave=False, stop_strings=False)
        await settled_alone(exporter, idle)
        completed = [answer for answer in answers if not answer.refused]

        async def is_complete() -> bool:
            ended = value(parse(await exporter.page()), "vllm:request_success")
            return len(lines(log)) == ended == reasons(completed).total()

        await until(is_complete, 30.0, "a record for each request that ended")
        page = parse(await exporter.page())
    records = lines(log)
    _assert_as_on_the_page(records, page)
    _assert_objectives(records, page)
    assert ends(records) == reasons(completed)
    assert sum(record["output_tokens"] for record in records) == generated(completed)
    # Those of a request count once for all of its samples.
    prompts = sum(record["prompt_tokens"] for record in records if record["sample"] == 0)
    assert prompts == sum(answer.prompt_tokens for answer in completed)
    assert all(record["id"].startswith("cmpl-") for record in records)
    assert len({record["key"] for record in records}) == len(records)
    _assert_plausible(records, completed)


def _assert_as_on_the_page(records: list[dict[str, Any]], page: Page) -> None:
    """Compare times with the histograms of the front end: records have them in microseconds."""
    for field, family in (
        ("ttft_seconds", "vllm:time_to_first_token_seconds"),
        ("e2e_seconds", "vllm:e2e_request_latency_seconds"),
    ):
        # Aborted requests are in no histogram of their ends.
        is_ended = field == "e2e_seconds"
        kept = [r for r in records if not (is_ended and r["reason"] == "abort")]
        times = [record[field] for record in kept if record[field] is not None]
        assert len(times) == count(page, family), field
        assert sum(times) == pytest.approx(observed(page, family), abs=1e-6 * len(times))


def _assert_objectives(records: list[dict[str, Any]], page: Page) -> None:
    """Without aborts, the objectives of records, their counters and goodput are the same."""
    for name in ("ttft", "e2e"):
        met = Counter(record["objectives"][name] for record in records)
        for result, is_met in (("good", True), ("bad", False)):
            assert met[is_met] == value(page, "sidestep_slo_requests", slo=name, result=result)
    goodput = sum(all(record["objectives"].values()) for record in records)
    assert goodput == value(page, "sidestep_goodput_requests")
    report("objectives", page, [], goodput=goodput, records=len(records))


def _assert_plausible(records: list[dict[str, Any]], answers: list[Answer]) -> None:
    longest = max(answer.seconds for answer in answers)
    for record in records:
        parts = record["queue_seconds"] + record["prefill_seconds"] + record["decode_seconds"]
        # Each of the parts is rounded to microseconds.
        assert parts <= record["e2e_seconds"] + 2e-6 <= longest + 0.5
        assert 0 < record["ttft_seconds"] <= record["e2e_seconds"]


LORA = shlex.split("--enable-lora --max-loras 2 --max-lora-rank 8")
TOTALS: dict[str, Callable[[Page], float]] = {
    "requests": lambda page: value(page, "vllm:request_success"),
    "failed_requests": lambda page: sum(
        value(page, "vllm:request_success", finished_reason=reason) for reason in ("abort", "error")
    ),
    "prompt_tokens": lambda page: value(
        page, "vllm:prompt_tokens_by_source", source="local_compute"
    ),
    "cached_prompt_tokens": lambda page: sum(
        value(page, "vllm:prompt_tokens_by_source", source=source)
        for source in ("local_cache_hit", "external_kv_transfer")
    ),
    "generation_tokens": lambda page: value(page, "vllm:generation_tokens"),
}
"""The engine's own total, by what is counted for tenants."""
TENANTS = ("acme", "globex", "initech", "umbrella")


def groups(client: Client) -> Iterator[list[Ask]]:
    """Yield requests of all kinds, to be asked for at the same time."""
    text, plain = client.text, {"ignore_eos": True}
    shared = text(200)
    yield [Ask(text(60), 24) for _ in range(6)]
    yield [Ask(shared + text(10), 16, model=m) for m in ("tiny", "lora-a", "lora-b") * 3]
    yield [Ask(text(30), 800, options={"stop": list("aeio"), **plain}) for _ in range(4)]
    yield [Ask(text(60), 1500, leave=1 + n, model="lora-a") for n in range(5)]
    yield [Ask(text(40), 12, options={"n": 3, **plain}) for _ in range(2)]
    yield [Ask(text(60), 350, stream=n % 2 > 0) for n in range(16)]
    yield [Ask(text(400), 8, options={"priority": 0, **plain}) for _ in range(6)]
    # Refused by the front end, before the engine knows them.
    yield [Ask(text(3000), 4), Ask(text(9), 0), Ask(text(9), 4, model="none")]
    yield [Ask(text(9), 4, stream=False, options={"temperature": -1.0})]
    yield [Ask(text(100), 1) for _ in range(4)]


async def watch(exporter: ExporterProcess, pages: list[Page], is_over: asyncio.Event) -> None:
    """Read the page until the load is over."""
    while not is_over.is_set():
        pages.append(parse(await exporter.page()))
        await asyncio.sleep(0.02)


async def test_each_record_is_one_of_the_clients_requests(
    vllm: VllmSite,
    adapters: dict[str, Path],
    tmp_path: Path,
    sender: tuple[list[str], dict[str, str]],
) -> None:
    """With adapters, stop strings, aborts and bad requests; tenants sum up to totals on every page."""
    log = tmp_path / "requests.jsonl"
    modules = [f"{name}={path}" for name, path in adapters.items()]
    flags = [*MAIN_FLAGS, *sender[0], *LORA, "--lora-modules", *modules]
    server = vllm.server(flags, {**MAIN_ENVIRON, **IDENTITY, **sender[1]})
    pages: list[Page] = []
    asked: list[tuple[Ask, Answer]] = []
    options = ("--requests.log", str(log), "--tenants.by", "id-prefix", "--tenants.max", "2")
    async with vllm.with_exporter(server, *options) as exporter:
        is_over = asyncio.Event()
        watching = asyncio.create_task(watch(exporter, pages, is_over))
        async with Client(server.base) as client:
            while len(pages) < 100:
                for group in groups(client):
                    for number, ask in enumerate(group, len(asked)):
                        ask.headers["X-Request-Id"] = f"{TENANTS[number % 4]}-{number}"
                    asked += zip(group, await client.ask_all(group), strict=True)
        await settled_alone(exporter, idle)

        # An idle engine's last items may still be on their way.
        expected = sum(int(a.options.get("n", 1)) for a, answer in asked if not answer.refused)

        async def is_complete() -> bool:
            ended = value(parse(await exporter.page()), "vllm:request_success")
            return len(lines(log)) == ended == expected

        await until(is_complete, 30.0, "a record for each request that ended")
        # A record waits for its latencies, which come from the front end after the core is idle.
        last = parse(await exporter.page())
        is_over.set()
        await watching
    records = lines(log)
    for page in (*pages, last):
        for name, total in TOTALS.items():
            assert value(page, f"sidestep_tenant_{name}") == total(page), name
    refused = [answer for _, answer in asked if answer.refused]
    by_id: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_id.setdefault(record["id"].removesuffix("-0"), []).append(record)
    known = {answer.id: (ask, answer) for ask, answer in asked if not answer.refused}
    assert by_id.keys() == known.keys()
    extra = [_check(ask, answer, by_id[name]) for name, (ask, answer) in known.items()]
    kinds = ends(records)
    more = {"records": dict(kinds), "pages": len(pages), "after stop strings": Counter(extra)}
    report("records", last, [answer for _, answer in asked], **more)
    assert len(refused) >= 4
    assert kinds["abort"] > 0
    assert {record["adapter"] for record in records} == {"", *adapters}
    assert any(record["preemptions"] for record in records)
    assert {record["tenant"] for record in records} == set(TENANTS)
    _assert_as_on_the_page(records, last)
    for record in records:
        parts = record["queue_seconds"], record["prefill_seconds"], record["decode_seconds"]
        if None not in parts and record["e2e_seconds"] is not None:
            assert sum(parts) <= record["e2e_seconds"] + 2e-6


def _check(ask: Ask, answer: Answer, records: list[dict[str, Any]]) -> int:
    """Compare the records of a request with its client's book; return tokens after a stop string."""
    assert sorted(r["sample"] for r in records) == [*range(ask.options.get("n", 1))]
    assert {r["adapter"] for r in records} == {"" if ask.model == "tiny" else ask.model}
    assert {r["max_tokens"] for r in records} == {ask.tokens}
    tokens: int = sum(r["output_tokens"] for r in records)
    if answer.left:
        # The client may leave after the engine's last token.
        assert {r["reason"] for r in records} <= {"abort", "length"}
        assert tokens >= answer.chunks
        return 0
    assert Counter(r["reason"] for r in records) == Counter(answer.reasons)
    assert {r["prompt_tokens"] for r in records} == {answer.prompt_tokens}
    if "stop" in ask.options and answer.reasons == ["stop"]:
        # The core goes on until the front end, which found the string, ends the request.
        assert tokens >= answer.tokens
    else:
        assert tokens == answer.tokens
    return tokens - answer.tokens


async def test_a_core_that_hangs_is_a_part_of_its_requests(vllm: VllmSite, tmp_path: Path) -> None:
    """Of those in the batch as ``stalled``, of those that wait as ``queue.stalled``, for as long as it hung."""
    log = tmp_path / "requests.jsonl"
    server = vllm.server(["--max-num-seqs", "2", *TAP])
    async with (
        vllm.with_exporter(server, "--requests.log", str(log)) as exporter,
        Client(server.base) as client,
    ):

        async def have_ended(count: int) -> bool:
            return len(lines(log)) >= count

        # What is usual must be known. Of eight, two run and six wait.
        await client.ask_all([Ask(client.text(40), 100) for _ in range(4)])
        asked = asyncio.create_task(client.ask_all([Ask(client.text(40), 400)] * 8))
        await until(lambda: have_ended(6), 120, "two of the eight")
        (core,) = server.titled("EngineCore")
        began_at = time.monotonic()
        os.kill(core, signal.SIGSTOP)
        await until(lambda: time.monotonic() - began_at > HANG, HANG + 10)
        os.kill(core, signal.SIGCONT)
        hung = time.monotonic() - began_at
        assert_complete(await asked)
        await until(lambda: have_ended(12), 30, "all records")
        page = parse(await exporter.page())
    parts = [record["parts"] for record in lines(log)]
    report("hang", page, [], hung=hung, parts=parts)
    stalled = Counter(key for each in parts for key in each if "stalled" in key)
    assert stalled == {"stalled": 2, "queue.stalled": 4}
    for each in parts:
        for key in stalled.keys() & each.keys():
            assert HANG - 0.1 <= each[key] <= hung + 0.5
