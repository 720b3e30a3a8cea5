"""A real vLLM that hangs is found, with the reason and the place; one that is slow or idle is not.

All tests share an exporter. Each prints what it measured: ``pytest -s``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
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
from real_engines.sites import TAP, VllmSite
from sidestep_adapters.vllm.front_end_progress import CALM

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

YOUNG, FOUND_WITHIN_LATER = 60.0, 10.0
"""An engine that has run for so many seconds is found within so many."""
IDLE_SECONDS, ASLEEP_SECONDS = 120.0, 12.0
LONG_PROMPT = 16_384
"""Tokens of a prompt that one step prefills."""
LONG = [
    *shlex.split("--max-model-len 17408 --max-num-batched-tokens 17408 --hf-overrides"),
    json.dumps({"max_position_embeddings": 32_768, "num_hidden_layers": 16}),
]
"""Flags with which such a step lasts for seconds, on one core."""


CORE = "EngineCore"
SEVERAL = "--api-server-count"


@dataclasses.dataclass(frozen=True)
class VllmWedge(Wedge):
    """A way for an engine to hang.

    Attributes:
        prompt: Tokens of a request's prompt.
        tokens: Tokens that a request asks for.
    """

    core: ClassVar[str] = CORE
    prompt: int = 40
    tokens: int = 1900


WEDGES = [
    VllmWedge("stop EngineCore", "publisher"),
    VllmWedge("stop Worker", "step", "get_response"),
    VllmWedge("asleep", "step", "sleep_while_set"),
    VllmWedge("spinning", "step", "spin_while_set"),
    VllmWedge("lock_in_step", "step", "wait_for_lock"),
    VllmWedge("lock_between_steps", "no_steps", "wait_for_lock", is_running=False),
    VllmWedge("asleep_above_the_tap", "no_steps", "sleep_while_set", is_running=False),
    VllmWedge("gil", "publisher"),
    VllmWedge("admission", "no_steps", "run_busy_loop", is_running=False),
    VllmWedge("recompute", "no_output", "run_busy_loop", is_running=False, prompt=1500, tokens=400),
    VllmWedge("input", "queue", is_running=False),
    VllmWedge("output", "queue", is_running=False, tokens=20),
]


@dataclasses.dataclass
class Engine:
    """One server, and the model name that distinguishes its engine at the exporter."""

    server: Server
    name: str
    began_at: float = 0.0

    @property
    def identity(self) -> str:
        """Return the engine's ID."""
        return f"test/{self.name}/0"

    def ask(self, client: Client, prompt: int, tokens: int) -> Ask:
        """Return a request with a random prompt of so many tokens."""
        return Ask(client.text(prompt), tokens, model=self.name)

    async def started(self) -> None:
        """Wait until the server accepts requests."""
        await self.server.started()
        self.began_at = time.monotonic()


@dataclasses.dataclass
class Bench:
    """The exporter that all tests share."""

    site: VllmSite
    watch: HealthWatch

    @property
    def wedges(self) -> Path:
        """Return the folder whose files are the wedges."""
        return self.site.home / "wedges"

    @contextlib.asynccontextmanager
    async def engine(self, name: str, *flags: str, **environ: str) -> AsyncIterator[Engine]:
        """Run a server of the model ``name``; only ``vllm serve`` can have several API servers."""
        settings = {"SIDESTEP_NAMESPACE": "test", **environ}
        flags = ("--served-model-name", name, *flags)
        server = self.site.server(flags, settings, command=SEVERAL in flags)
        async with server:
            engine = Engine(server, name)
            await engine.started()
            yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(vllm_python: Path, tiny: Path) -> AsyncIterator[Bench]:
    """Start the exporter."""
    home = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
    site = VllmSite(vllm_python, tiny, home, f"ipc://{home}/ingest.ipc")
    (home / "wedges").mkdir()
    async with site.exporter() as exporter:
        await exporter.started()
        async with HealthWatch(exporter) as watch:
            yield Bench(site, watch)
    shutil.rmtree(home)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wedged(bench: Bench) -> AsyncIterator[Engine]:
    """Start a server that hangs when asked to."""
    flags = shlex.split("--max-num-batched-tokens 256 --max-num-seqs 16 --scheduler-cls")
    path = {"WEDGES": str(bench.wedges), "PYTHONPATH": str(Path(__file__).parent)}
    scheduler = "vllm_wedges.WedgedScheduler"
    async with bench.engine("wedged", *flags, scheduler, **path) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def calm(bench: Bench) -> AsyncIterator[Engine]:
    """Start a server that never hangs."""
    lora = shlex.split("--enable-lora --max-loras 1 --max-cpu-loras 1 --max-lora-rank 8")
    more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    async with bench.engine("calm", *TAP, *LONG, *lora, **more) as engine:
        yield engine


async def assert_answers(engine: Engine, client: Client) -> None:
    """Assert that the engine completes a request."""
    answer = await client.ask(engine.ask(client, 20, 4))
    assert (200, ["length"]) == (answer.status, answer.reasons)


async def test_an_engine_that_starts_is_well(calm: Engine, bench: Bench) -> None:
    """Its start, with the warm-up of the model, is no hang."""
    await bench.watch.found(calm.identity, is_well, 30, "well")
    assert no_alarm(bench.watch.states(calm.identity), "start")


@pytest.mark.parametrize("wedge", WEDGES, ids=lambda wedge: wedge.name.replace(" ", "_"))
async def test_a_wedge_is_found(wedge: VllmWedge, wedged: Engine, bench: Bench) -> None:
    """The engine is stalled within seconds, with reason and place, and well soon after the release."""
    engine, watch = wedged, bench.watch
    async with Client(engine.server.base) as client, Requests(client) as requests:
        asks = [engine.ask(client, wedge.prompt, wedge.tokens) for _ in range(2)]
        if wedge.is_running:
            requests.keep(*asks)
            await watch.found(engine.identity, lambda each: each.unfinished == 2, 30, "requests")
        else:
            await watch.found(engine.identity, lambda each: each.unfinished == 0, 30, "no request")
        with wedge.applied(engine.server, bench.wedges):
            began_at = time.monotonic()
            if not wedge.is_running:
                requests.begin(*asks)
            is_young = began_at - engine.began_at < YOUNG
            # Some steps may pass without output, each as long as the longest.
            is_late = is_young or wedge.reason == "no_output"
            limit = FOUND_WITHIN if is_late else FOUND_WITHIN_LATER
            seen = await watch.found(engine.identity, is_stalled, limit, wedge.name)
            stack = await assert_shown(watch, engine.identity, wedge.reason, model_name=engine.name)
            await watch.more(engine.identity, STAYS)
            stayed = watch.states(engine.identity, seen.at)
        released_at = time.monotonic()
        well = await watch.found(engine.identity, is_well, OK_WITHIN, f"{wedge.name} released")
    async with Client(engine.server.base) as client:
        await assert_answers(engine, client)
    figures = {
        "reason": seen.reason,
        "seconds": round(seen.at - began_at, 1),
        "released": round(well.at - released_at, 1),
        "stack": stack.split("\n")[-5:],
    }
    print(f"\n{wedge.name}: {json.dumps(figures)}")  # noqa: T201 - for the one who runs it
    assert [f"stalled {wedge.reason}"] == [*stayed]
    assert wedge.frame in stack


async def test_without_a_tap_a_stopped_core_is_found(bench: Bench) -> None:
    """The plugin alone knows of a long prefill, which is no hang, and of requests without an answer."""
    watch, wedge = bench.watch, VllmWedge(f"stop {CORE}", "queue")
    async with (
        bench.engine("plain", *LONG) as engine,
        Client(engine.server.base) as client,
        Requests(client) as requests,
    ):
        await assert_answers(engine, client)
        requests.begin(*(engine.ask(client, 40, 1900) for _ in range(2)))
        await watch.found(engine.identity, lambda each: each.unfinished == 2, 30, "requests")
        with wedge.applied(engine.server, bench.wedges):
            began_at = time.monotonic()
            seen = await watch.found(engine.identity, is_stalled, FOUND_WITHIN, "stalled")
            await assert_shown(watch, engine.identity, seen.reason, model_name=engine.name)
        await watch.found(engine.identity, is_well, OK_WITHIN, "well")
        since = time.monotonic()
        for tokens in (LONG_PROMPT, 40, 300, LONG_PROMPT):
            answer = await client.ask(engine.ask(client, tokens, 20))
            assert answer.status == 200
        assert no_alarm(watch.states(engine.identity, since), "plugin alone")
    print(f"\nplugin alone: {seen.reason} {seen.at - began_at:.1f} s")  # noqa: T201 - as above
    assert seen.reason == wedge.reason


@pytest.mark.parametrize("tapped", [True, False], ids=["tap", "plugin"])
async def test_one_of_two_api_servers_whose_loop_stands_is_found(
    tapped: bool, bench: Bench
) -> None:
    """The other one serves all the while; the state names the one that does not, and where it stands."""
    watch, wedge = bench.watch, bench.wedges / "loop"
    flags = [*(TAP if tapped else []), SEVERAL, "2"]
    flags += ["--middleware", "vllm_middleware.hold_loop"]
    path = {"WEDGES": str(bench.wedges), "PYTHONPATH": str(Path(__file__).parent)}
    async with (
        bench.engine(f"two-{tapped}".lower(), *flags, **path) as engine,
        Client(engine.server.base) as client,
        Requests(client) as requests,
    ):
        requests.keep(*(engine.ask(client, 40, 300) for _ in range(2)))
        # Its loop counts once it has run for ten seconds.
        await until(lambda: time.monotonic() - engine.began_at > CALM + 5.0, 60)
        wedge.touch()
        began_at = time.monotonic()
        held = dataclasses.replace(engine.ask(client, 20, 4), headers={"x-hold-loop": wedge.name})
        requests.begin(held)
        seen = await watch.found(engine.identity, is_stalled, FOUND_WITHIN, "stalled")
        status, body = await watch.get(f"/-/engines/{engine.identity}")
        stack = await assert_shown(watch, engine.identity, "front_end", model_name=engine.name)
        await assert_answers(engine, client)
        wedge.unlink()
        released_at = time.monotonic()
        well = await watch.found(engine.identity, is_well, OK_WITHIN, "well")
    figures = {
        "seconds": round(seen.at - began_at, 1),
        "stream": body["stream"],
        "unfinished": body["unfinished_requests"],
        "released": round(well.at - released_at, 1),
    }
    print(f"\none of two API servers: {json.dumps(figures)}")  # noqa: T201 - as above
    assert (status, seen.reason) == (503, "front_end")
    assert "/api" in body["stream"]
    assert "hold_while_set" in stack


async def test_an_idle_engine_is_well(calm: Engine, bench: Bench) -> None:
    """Minutes without a request are no hang, whatever other engines do."""
    engine = calm
    await until(lambda: time.monotonic() - engine.began_at > IDLE_SECONDS, IDLE_SECONDS + 10)
    assert no_alarm(bench.watch.states(engine.identity), "idleness")
    await bench.watch.found(engine.identity, lambda each: each.state == "idle", 5, "idle")


async def test_long_prefills_are_no_hang(calm: Engine, bench: Bench) -> None:
    """Steps of 16k tokens among short ones, also among those of other requests, are not overdue."""
    engine, since = calm, time.monotonic()
    async with Client(engine.server.base) as client:
        gaps = await long_prefills(client, partial(engine.ask, client), LONG_PROMPT)
    assert no_alarm(
        bench.watch.states(engine.identity, since), f"long prefills, with gaps of {gaps} s"
    )


@pytest.mark.parametrize(
    ("sleep", "wake"),
    [
        ("/sleep?level=1&mode=keep", "/wake_up"),
        ("/sleep?level=0&mode=abort", "/wake_up?tags=scheduling"),
        ("/pause?mode=wait", "/resume"),
        ("/pause?mode=keep", "/resume"),
    ],
)
async def test_an_engine_that_sleeps_is_no_hang(
    sleep: str, wake: str, calm: Engine, bench: Bench
) -> None:
    """Requests that run when it falls asleep, and others that arrive later, wait until it wakes up."""
    engine, watch, since = calm, bench.watch, time.monotonic()
    async with (
        Client(engine.server.base) as client,
        aiohttp.ClientSession(engine.server.base) as session,
        Requests(client) as requests,
    ):
        requests.begin(*(engine.ask(client, 40, 300) for _ in range(2)))
        await watch.found(engine.identity, lambda each: each.unfinished == 2, 30, "requests")
        async with session.post(sleep) as answer:
            assert answer.status == 200
        await watch.found(engine.identity, lambda each: each.state == "asleep", 5, "asleep")
        requests.begin(*(engine.ask(client, 40, 20) for _ in range(2)))
        asleep_at = time.monotonic()
        await until(lambda: time.monotonic() - asleep_at > ASLEEP_SECONDS, 30)
        async with session.post(wake) as answer:
            assert answer.status == 200
        answers = await requests.answers()
        await watch.found(engine.identity, is_well, OK_WITHIN, "awake")
    assert {200} == {answer.status for answer in answers}
    assert no_alarm(bench.watch.states(engine.identity, since), sleep)


async def test_adapters_that_are_loaded_are_no_hang(
    adapters: dict[str, Path], calm: Engine, bench: Bench
) -> None:
    """LoRA adapters that are loaded and exchanged between requests stop no step."""
    engine, since = calm, time.monotonic()
    async with (
        Client(engine.server.base) as client,
        aiohttp.ClientSession(engine.server.base) as session,
        Requests(client) as requests,
    ):
        requests.begin(*(engine.ask(client, 40, 300) for _ in range(2)))
        for _ in range(3):
            for name, folder in adapters.items():
                body = {"lora_name": name, "lora_path": str(folder)}
                async with session.post("/v1/load_lora_adapter", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                asks = [Ask(client.text(40), 20, model=name) for _ in range(3)]
                assert {200} == {each.status for each in await client.ask_all(asks)}
                async with session.post("/v1/unload_lora_adapter", json=body) as answer:
                    assert answer.status == 200, await answer.text()
        await requests.answers()
    assert no_alarm(bench.watch.states(engine.identity, since), "adapters")


async def test_another_exporter_finds_the_wedge(wedged: Engine, bench: Bench) -> None:
    """An exporter that replaces a killed one finds the engine that has been hanging since before."""
    engine, watch, wedge = wedged, bench.watch, VllmWedge("asleep", "step", "sleep_while_set")
    async with (
        Client(engine.server.base) as client,
        Requests(client) as requests,
        contextlib.AsyncExitStack() as stack,
    ):
        requests.begin(engine.ask(client, 40, 1900))
        await watch.found(engine.identity, lambda each: each.unfinished == 1, 30, "a request")
        with wedge.applied(engine.server, bench.wedges):
            await watch.found(engine.identity, is_stalled, FOUND_WITHIN, "stalled")
            watch.exporter.kill()
            second = await stack.enter_async_context(bench.site.exporter())
            watch.exporter = await second.started()
            began_at = time.monotonic()
            # Of the engine's two streams, the front end's may be the first to connect.
            seen = await watch.found(
                engine.identity,
                lambda each: is_stalled(each) and each.reason == wedge.reason,
                FOUND_WITHIN,
                "stalled",
            )
            frames = await assert_shown(
                watch, engine.identity, wedge.reason, model_name=engine.name
            )
        await watch.found(engine.identity, is_well, OK_WITHIN, "well")
    print(f"\nafter a restart: {seen.reason} {seen.at - began_at:.1f} s")  # noqa: T201 - as above
    assert seen.reason == wedge.reason
    assert wedge.frame in frames
