"""A real SGLang that hangs is found, with the reason and the place; one that is slow or idle is not.

All tests share an exporter and a server, in the order of this file. Each prints what it measured:
``pytest -s``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest
import pytest_asyncio

from exporters import until
from real_engines.hangs import (
    FOUND_WITHIN,
    OK_WITHIN,
    STAYS,
    Requests,
    Wedge,
    assert_shown,
    is_stalled,
    is_well,
    long_prefills,
    no_alarm,
)
from real_engines.health_watch import HealthWatch
from real_engines.load import Ask, Client
from real_engines.processes import Server
from real_engines.sites import SglangSite

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

IDLE_SECONDS, PAUSED_SECONDS = 60.0, 12.0
LONG_PROMPT = 8_192
"""Tokens of a prompt that one step prefills."""
LONG = [
    *shlex.split("--context-length 17408 --max-total-tokens 20000 --chunked-prefill-size -1"),
    "--json-model-override-args",
    json.dumps({"max_position_embeddings": 32_768, "num_hidden_layers": 8}),
]
"""Flags with which such a step lasts for seconds, on one core."""
SCHEDULER = "test/tiny/sglang/scheduler/engine_type=unified,moe_ep_rank=0,pp_rank=0,tp_rank=0"
TOKENIZER = "test/tiny/sglang/tokenizer/engine_type=unified"


@dataclasses.dataclass(frozen=True)
class SglangWedge(Wedge):
    """A way for a server to hang."""

    core: ClassVar[str] = "sglang::scheduler"
    engine: str = SCHEDULER


WEDGES = [
    SglangWedge("stop sglang::scheduler", "publisher"),
    SglangWedge("asleep", "step", "sleep_while_set"),
    SglangWedge("lock_in_step", "step", "wait_for_lock"),
    SglangWedge("lock_between_steps", "no_steps", "wait_for_lock", is_running=False),
    SglangWedge("gil", "publisher"),
    SglangWedge("admission", "no_steps", "event_loop_normal", is_running=False),
    SglangWedge("input", "queue", "run", is_running=False, engine=TOKENIZER),
    SglangWedge("stop sglang::detokenizer", "queue", "run", engine=TOKENIZER),
]


@dataclasses.dataclass
class Bench:
    """The exporter and the server that the tests share."""

    watch: HealthWatch
    server: Server
    wedges: Path


def install_wedges(folder: Path) -> None:
    """Write the entry point of the plugin ``sglang_wedges`` into ``folder``."""
    described = folder / "wedges-1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: wedges\nVersion: 1\n")
    entry_point = "[sglang.srt.plugins]\nwedges = sglang_wedges:plugin\n"
    (described / "entry_points.txt").write_text(entry_point)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(sglang_python: Path, tiny: Path) -> AsyncIterator[Bench]:
    """Start an exporter, and a server with wedges."""
    home = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
    site = SglangSite(sglang_python, tiny, home, f"ipc://{home}/ingest.ipc")
    (wedges := home / "wedges").mkdir()
    install_wedges(home / "plugins")
    paths = [str(home / "plugins"), str(Path(__file__).parent)]
    environ = {
        "SIDESTEP_NAMESPACE": "test",
        "WEDGES": str(wedges),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    async with site.exporter() as exporter:
        await exporter.started()
        async with HealthWatch(exporter) as watch, site.server(LONG, environ) as server:
            await server.started()
            yield Bench(watch, server, wedges)
    shutil.rmtree(home)


def states_of(bench: Bench, since: float = 0.0) -> Counter[str]:
    """Count the states of both engines since a monotonic time."""
    return bench.watch.states(SCHEDULER, since) + bench.watch.states(TOKENIZER, since)


async def test_an_idle_engine_is_well(bench: Bench) -> None:
    """Neither its start with a warm-up nor a minute of idleness is a hang."""
    began_at = time.monotonic()
    await until(lambda: time.monotonic() - began_at > IDLE_SECONDS, IDLE_SECONDS + 10)

    assert no_alarm(states_of(bench), "start and idleness")
    for engine in (SCHEDULER, TOKENIZER):
        await bench.watch.found(engine, lambda each: each.state == "idle", 5, "idle")


async def test_long_prefills_are_no_hang(bench: Bench) -> None:
    """Steps of 8k tokens among short ones, also among those of other requests, are not overdue."""
    since = time.monotonic()
    async with Client(bench.server.base) as client:
        gaps = await long_prefills(
            client, lambda prompt, tokens: Ask(client.text(prompt), tokens), LONG_PROMPT
        )

    assert no_alarm(states_of(bench, since), f"long prefills, with gaps of {gaps} s")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_an_engine_that_is_paused_is_no_hang(mode: str, bench: Bench) -> None:
    """Requests that run when it is paused, and others that arrive later, wait until it continues."""
    watch, since = bench.watch, time.monotonic()
    async with (
        Client(bench.server.base) as client,
        aiohttp.ClientSession(bench.server.base) as session,
        Requests(client) as requests,
    ):
        requests.begin(*(Ask(client.text(40), 1000) for _ in range(2)))
        await watch.found(SCHEDULER, lambda each: each.unfinished == 2, 30, "requests")
        async with session.post("/pause_generation", json={"mode": mode}) as answer:
            assert answer.status == 200
        for engine in (SCHEDULER, TOKENIZER):
            await watch.found(engine, lambda each: each.state == "asleep", 5, "paused")
        requests.begin(*(Ask(client.text(40), 20) for _ in range(2)))
        paused_at = time.monotonic()
        await until(lambda: time.monotonic() - paused_at > PAUSED_SECONDS, 30)
        async with session.post("/continue_generation", json={}) as answer:
            assert answer.status == 200
        answers = await requests.answers()
        for engine in (SCHEDULER, TOKENIZER):
            await watch.found(engine, is_well, OK_WITHIN, "continued")

    assert {200} == {answer.status for answer in answers}
    assert no_alarm(states_of(bench, since), f"paused {mode}")


@pytest.mark.parametrize("wedge", WEDGES, ids=lambda wedge: wedge.name.replace(" ", "_"))
async def test_a_wedge_is_found(wedge: SglangWedge, bench: Bench) -> None:
    """The engine is stalled within seconds, with reason and place, and well soon after the release."""
    watch = bench.watch
    for engine in (SCHEDULER, TOKENIZER):
        await watch.found(engine, is_well, 30, "a well engine")
    async with Client(bench.server.base) as client, Requests(client) as requests:
        asks = [Ask(client.text(40), 4000) for _ in range(2)]
        count = 0
        if wedge.is_running:
            requests.begin(*asks)
            count = 2
        for engine in (SCHEDULER, TOKENIZER):
            await watch.found(engine, lambda each: each.unfinished == count, 30, "requests")
        with wedge.applied(bench.server, bench.wedges):
            began_at = time.monotonic()
            if not wedge.is_running:
                requests.begin(*asks)
            seen = await watch.found(wedge.engine, is_stalled, FOUND_WITHIN, wedge.name)
            stack = await assert_shown(watch, wedge.engine, wedge.reason, engine=wedge.engine)
            await watch.more(wedge.engine, STAYS)
            stayed = watch.states(wedge.engine, seen.at)
            others = watch.states(SCHEDULER if wedge.engine == TOKENIZER else TOKENIZER, began_at)
        released_at = time.monotonic()
        for engine in (SCHEDULER, TOKENIZER):
            well = await watch.found(engine, is_well, OK_WITHIN, f"{wedge.name} released")
    async with Client(bench.server.base) as client:
        answer = await client.ask(Ask(client.text(20), 4))
    figures = {
        "reason": seen.reason,
        "seconds": round(seen.at - began_at, 1),
        "released": round(well.at - released_at, 1),
        "the other engine": dict(others),
        "stack": stack.split("\n")[-5:],
    }
    print(f"\n{wedge.name}: {json.dumps(figures)}")  # noqa: T201 - for the one who runs it
    assert (200, ["length"]) == (answer.status, answer.reasons)
    assert [f"stalled {wedge.reason}"] == [*stayed]
    assert (wedge.frame in stack) if wedge.frame else not stack


async def test_a_tokenizer_without_a_scheduler_is_found(bench: Bench) -> None:
    """The scheduler has ended, and the tokenizer accepts requests that nobody answers."""
    wedge = SglangWedge("exit", "queue", engine=TOKENIZER)
    async with Client(bench.server.base) as client, Requests(client) as requests:
        (bench.wedges / wedge.name).touch()
        await bench.watch.found(SCHEDULER, lambda each: each.state == "stopped", 30, "its end")
        began_at = time.monotonic()
        requests.begin(Ask(client.text(40), 100))
        seen = await bench.watch.found(TOKENIZER, is_stalled, FOUND_WITHIN, "stalled")
        await assert_shown(bench.watch, wedge.engine, wedge.reason, engine=wedge.engine)
    # It would wait for the requests' answers first.
    bench.server.kill()
    print(f"\nexit: {seen.reason} {seen.at - began_at:.1f} s")  # noqa: T201 - as above

    assert seen.reason == wedge.reason
