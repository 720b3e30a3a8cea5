"""The limit that binds a step in real engines: each limit is forced, and page and ``why`` name it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest

from command_line import sidestep
from exporters import until
from real_engines.comparison import (
    Page,
    assert_nothing_refused,
    labels_of,
    parse,
    settled_alone,
    value,
)
from real_engines.load import Ask, Client
from real_engines.processes import ExporterProcess, Server
from real_engines.sites import TAP, SglangSite, Site, VllmSite
from real_engines.tiny_model import make_adapter
from sidestep.protocol.request_events import LIMITS

pytestmark = pytest.mark.engine

SECONDS, STEPS = "sidestep_step_limit_seconds", "sidestep_steps"
RIGHT = 0.95
"""Least share of the waiting time that has the forced limit."""
ADAPTERS = ("lora-a", "lora-b", "lora-c")
PAUSE = 3.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A limit, the flags that force it, and the requests that meet it.

    Attributes:
        prompt: Tokens of each prompt.
        tokens: Tokens that each request asks for.
        models: Names that the requests ask for in turn.
        is_told: Whether ``sidestep why`` must name the limit.
    """

    limit: str
    flags: str
    prompt: int
    tokens: int
    requests: int = 24
    models: tuple[str, ...] = ("tiny",)
    is_told: bool = False


CASES = (
    Case("slots", "--max-num-seqs 2", 30, 60, is_told=True),
    Case("kv_blocks", "--num-gpu-blocks-override 24 --max-model-len 512", 200, 120, is_told=True),
    Case("tokens", "--max-num-batched-tokens 64 --max-num-seqs 64", 600, 2),
    Case("lora", "--enable-lora --max-loras 1 --max-lora-rank 8", 30, 60, models=ADAPTERS),
)

SGLANG_CASES = (
    Case("slots", "--max-running-requests 2", 30, 60, is_told=True),
    Case("kv_blocks", "--max-total-tokens 700", 100, 100),
    Case("tokens", "--chunked-prefill-size 64", 600, 2),
)


def times(page: Page) -> dict[str, float]:
    """Return the seconds by limit."""
    return {limit: value(page, SECONDS, limit=limit) for limit in LIMITS}


def share(found: Mapping[str, float], limit: str) -> float:
    """Return the share of the waiting time in which ``limit`` held."""
    waiting = sum(seconds for name, seconds in found.items() if name != "none")
    return found[limit] / waiting if waiting else 0.0


async def why(exporter: ExporterProcess) -> str:
    """Return the largest cause that ``sidestep why`` names."""
    url = exporter.url.removesuffix("/metrics")
    done = await asyncio.to_thread(sidestep, "why", url, "--json")
    assert done.returncode == 0, done.stderr
    cause: str = json.loads(done.stdout)["engines"][0]["causes"][0]["cause"]
    return cause


async def measure(
    site: Site, server: Server, case: Case
) -> tuple[dict[str, float], dict[str, float], float]:
    """Return the seconds by limit of one request alone, and of all requests, and how long these took."""

    async def idle_page(exporter: ExporterProcess, ended: float) -> Page:
        return await settled_alone(exporter, lambda page: value(page, site.finished) >= ended)

    async with site.with_exporter(server) as exporter:
        async with Client(server.base) as client:
            # SGLang has had a request to warm up.
            start = parse(await exporter.page())
            first, ended = times(start), value(start, site.finished)
            alone = await client.ask(Ask(client.text(20), 20, model=case.models[0]))
            await idle_page(exporter, ended + 1)
            # A scheduler of SGLang's is read once a second.
            await asyncio.sleep(PAUSE)
            second = times(parse(await exporter.page()))
            asks = [
                Ask(client.text(case.prompt), case.tokens, model=name)
                for name in case.models * (case.requests // len(case.models))
            ]
            began = time.monotonic()
            answers = await client.ask_all(asks)
            took = time.monotonic() - began
            await idle_page(exporter, ended + 1 + len(answers))
        await asyncio.sleep(PAUSE)
        idle = parse(await exporter.page())
        await asyncio.sleep(2 * PAUSE)
        after = parse(await exporter.page())
        cause = await why(exporter) if case.is_told else case.limit
    assert cause == case.limit
    assert all(answer.status == 200 for answer in (alone, *answers))
    assert times(idle) == times(after)
    assert {*LIMITS} == {labels["limit"] for labels in labels_of(after, STEPS)} & {*LIMITS}
    assert value(after, "sidestep_waiting_prompt_tokens") == 0
    assert value(after, "sidestep_unfinished_prefill_tokens") == 0
    assert_nothing_refused(after)
    alone_found = {limit: second[limit] - first[limit] for limit in LIMITS}
    found = {limit: seconds - second[limit] for limit, seconds in times(after).items()}
    return alone_found, found, took


def check(
    case: Case, run: str, found: dict[str, float], alone: dict[str, float], took: float
) -> None:
    """Print what was measured, and compare it with the forced limit."""
    print(  # noqa: T201
        f"\n{case.limit} {run}: {share(found, case.limit):.1%} of the waiting time,"
        f" {sum(found.values()):.2f} of {took:.2f} s busy:",
        {limit: round(seconds, 3) for limit, seconds in found.items() if seconds},
    )

    assert {"none"} == {limit for limit, seconds in alone.items() if seconds}
    assert share(found, case.limit) >= RIGHT
    # Nearly all of the time, and never more: the front end and the client take the rest.
    assert 0.8 * took <= sum(found.values()) <= took


@pytest.mark.parametrize("scheduling", ["--async-scheduling", "--no-async-scheduling"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.limit)
async def test_a_forced_limit_is_named(
    case: Case, scheduling: str, vllm: VllmSite, tmp_path: Path
) -> None:
    """For the whole time in which requests wait; one request alone has no limit, and idle time none."""
    modules = [f"{name}={make_adapter(tmp_path / name)}" for name in ADAPTERS]
    lora = ["--lora-modules", *modules] if case.models == ADAPTERS else []
    server = vllm.server([*shlex.split(case.flags), *TAP, scheduling, *lora])
    alone, found, took = await measure(vllm, server, case)

    check(case, scheduling, found, alone, took)


@pytest.mark.parametrize("case", SGLANG_CASES, ids=lambda case: case.limit)
async def test_a_forced_limit_of_sglang_is_named(case: Case, sglang: SglangSite) -> None:
    """As of vLLM, from what its scheduler has made of the first request that waits."""
    alone, found, took = await measure(sglang, sglang.server(shlex.split(case.flags)), case)

    check(case, "SGLang", found, alone, took)


PROGRAM = Path(__file__).with_name("vllm_limits_program.py")
STEPS_BY_CASE = {
    "priorities": {"kv_blocks", "none"},
    "lora_and_slots": {"slots", "none"},
    "grammar": {"grammar", "none"},
    "paused": {"paused", "none"},
}
"""The limits of each case of the program; the last one is that of the last requests."""


async def test_each_step_of_vllms_scheduler_has_its_limit(vllm: VllmSite) -> None:
    """The scheduler of the release that is installed, driven step by step."""
    code, output = await vllm.run_program(PROGRAM, environ={})
    lines = [line for line in output.splitlines() if line.startswith('["')]
    found = dict(map(json.loads, lines))
    print(found)  # noqa: T201

    assert code == 0, output
    assert {name: {limit for limit, _ in runs} for name, runs in found.items()} == STEPS_BY_CASE
    # Of six requests with 20 tokens, four wait for 40 steps.
    assert [["slots", 40], ["none", 20]] == found["lora_and_slots"]
    assert [["grammar", 30], ["none", 10]] == found["grammar"]
    assert [["none", 1], ["paused", 19], ["none", 20]] == found["paused"]


async def test_a_pause_is_named_while_it_lasts(vllm: VllmSite) -> None:
    """Requests that arrive at a paused engine wait for it, and it runs no step."""
    server = vllm.server(TAP, {"VLLM_SERVER_DEV_MODE": "1"})
    async with vllm.with_exporter(server) as exporter, Client(server.base) as client:
        await client.ask(Ask(client.text(20), 20))
        # The server closes a connection that waits.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            async with session.post(f"{server.base}/pause") as answer:
                assert answer.status == 200
            asks = [Ask(client.text(20), 20) for _ in range(3)]
            asking = asyncio.create_task(client.ask_all(asks))

            async def has_waited() -> bool:
                page = parse(await exporter.page())
                waits = value(page, "sidestep_waiting_prompt_tokens")
                return times(page)["paused"] > PAUSE and waits >= 3 * 20

            await until(has_waited, 60, "a pause on the page")
            async with session.post(f"{server.base}/resume") as answer:
                assert answer.status == 200
        await asking
        found = times(
            await settled_alone(exporter, lambda p: value(p, "vllm:request_success") >= 4)
        )

    assert share(found, "paused") >= RIGHT
