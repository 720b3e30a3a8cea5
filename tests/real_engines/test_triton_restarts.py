"""A real Triton that loads and unloads models, stops, is killed and restarts: counters continue."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from exporters import until
from real_engines.comparison import Page, assert_nothing_refused, labels_of, parse, value
from real_engines.triton_load import Answer, Ask, Client, succeeded
from real_engines.triton_pages import SUCCESS, Sampler, answered, reached, settled, state
from real_engines.triton_server import Ended, Place, TritonServer, exporter_of

pytestmark = pytest.mark.engine

MODELS = ["batched", "cached", "queued"]
BATCHED = 20
"""Requests of one model in a round."""
RESETS = "sidestep_triton_resets"
SLACK = 2.5
"""Seconds that one graceful end of Triton may take longer than another: it checks once a second,
and a busy machine can make it miss a check. A poll that delayed it would do so for 30.
"""


class Run:
    """An exporter that polls one server after the other, and the answers that clients got."""

    def __init__(self, target: str, home: Path, client: Client) -> None:
        self.target = target
        self.home = home
        self.client = client
        self.sampler = Sampler()
        self.answers: list[Answer] = []

    @property
    def succeeded(self) -> Counter[tuple[str, str]]:
        """Return the requests that have succeeded, by model and version."""
        return succeeded(self.answers)

    async def start_exporter(self) -> None:
        """Start an exporter that keeps its state."""
        kept = ["--state.dir", str(self.home / "state")]
        self.exporter = exporter_of(self.target, self.home, "exporter", *kept)
        self.sampler.exporter = await self.exporter.started()

    async def kill_exporter(self) -> None:
        """Kill the exporter, which has no time to save anything."""
        self.sampler.exporter = None
        await self.exporter.stop(signal.SIGKILL)

    async def ask(self, *versions: str) -> None:
        """Send requests to each model, and to each of these versions of one model."""
        asks = [Ask("batched", [1.0] * (1 + turn % 3)) for turn in range(BATCHED)]
        answers = await self.client.ask_all(asks)
        answers += await self.client.ask_in_turn(Ask("queued") for _ in range(2))
        for version in versions:
            ask = Ask("cached", [2.0], version)
            answers += await self.client.ask_in_turn(ask for _ in range(3))
        # On a busy machine a request may wait for too long in its model's queue.
        assert {("queued", 503)} >= {(a.ask.model, a.status) for a in answers if a.status != 200}
        self.answers += answers

    async def counted(self) -> Page:
        """Return the exporter's page once it has all requests that have succeeded."""
        page = Page()

        async def is_complete() -> bool:
            nonlocal page
            page = parse(await self.exporter.page())
            return answered(page) == self.succeeded

        try:
            await until(is_complete, 15)
        except AssertionError:
            assert answered(page) == self.succeeded
        return page

    def is_without(self, model: str) -> Callable[[], Awaitable[bool]]:
        """Return a condition that the page has no series of ``model``."""

        async def is_gone() -> bool:
            page = parse(await self.exporter.page())
            return not any(labels["model"] == model for labels in labels_of(page, SUCCESS))

        return is_gone


@contextlib.asynccontextmanager
async def running(place: Place, target: str, home: Path) -> AsyncIterator[Run]:
    """Yield a run whose exporter is sampled."""
    async with Client(place) as client:
        run = Run(target, home, client)
        try:
            await run.start_exporter()
            async with run.sampler:
                yield run
        finally:
            run.exporter.kill()


async def test_loading_and_unloading_lose_nothing(triton_python: Path, home: Path) -> None:
    """Whatever counts a load resets in Triton, totals are those of the clients, and none decreases."""
    place = Place.chosen(triton_python, home)
    async with running(place, place.base, home) as run, TritonServer(place, MODELS) as server:
        await server.started()
        await run.ask("1", "3")
        await run.counted()

        await run.client.load("batched")
        await run.ask("1", "3")
        unchanged = (await server.statistics())["batched", "1"]
        await run.counted()

        for model in ("batched", "cached"):
            place.touch(model)
            await run.client.load(model)
        await run.ask("1", "3")
        touched = (await server.statistics())["batched", "1"]
        await run.counted()

        place.add("cached", [5])
        await run.client.load("cached")
        await run.ask("1", "3", "5")
        await run.counted()

        await run.client.unload("queued")
        await until(run.is_without("queued"), 60, "a page without the unloaded model")
        await run.client.call(["load", "queued"])
        await run.ask("1", "3", "5")
        page = await run.counted()

    assert unchanged["inference_stats"]["success"]["count"] == 2 * BATCHED
    assert touched["inference_stats"]["success"]["count"] == BATCHED
    assert answered(page) == run.succeeded
    assert value(page, RESETS, model="batched") == 1
    assert value(page, RESETS, model="queued") == 1
    run.sampler.check()
    assert_nothing_refused(page)


async def test_what_ends_after_an_unload_is_lost(triton_python: Path, home: Path) -> None:
    """Statistics are gone once the state is UNLOADING, while Triton's own page counts until the end."""
    place = Place.chosen(triton_python, home, "slow")
    async with running(place, place.base, home) as run, TritonServer(place, ["slow"]) as server:

        async def shows(family: str, number: int) -> bool:
            return value(parse(await server.page()), family, model="slow") == number

        await server.started()
        run.answers += await run.client.ask_in_turn([Ask("slow")])
        await run.counted()
        asked = [asyncio.create_task(run.client.ask(Ask("slow"))) for _ in range(2)]
        # One of them is executed, and the other one waits.
        pending = "nv_inference_pending_request_count"
        await until(lambda: shows(pending, 1), 60, "a request that waits")
        await run.client.unload("slow")
        states, statistics = await run.client.states(), await server.statistics()
        await until(lambda: shows(SUCCESS, 2), 60, "a request on Triton's own page")
        ended = await asyncio.gather(*asked)
        await until(run.is_without("slow"), 60, "a page without the unloaded model")
        await run.client.call(["load", "slow"])
        await until(lambda: shows(SUCCESS, 0), 60, "Triton's own page, which starts again at 0")
        page = await run.counted()

    assert states == {"slow": "UNLOADING"}
    assert statistics == {}
    assert [answer.status for answer in ended] == [200, 200]
    assert answered(page) == {("slow", "1"): 1}
    run.sampler.check()


@pytest.mark.parametrize("has_page", [False, True])
async def test_ends_and_kills_lose_nothing(has_page: bool, triton_python: Path, home: Path) -> None:
    """Totals continue, whichever side has ended, gracefully or not."""
    place = Place.chosen(triton_python, home)
    # One of them with Triton's own page, which is absent and restarts at 0 as well.
    target = f"{place.base},metrics={place.page}" if has_page else place.base
    async with running(place, target, home) as run:
        await reached(run.exporter, "down")
        codes = []
        for number in (signal.SIGTERM, signal.SIGKILL):
            async with TritonServer(place, MODELS) as server:
                await server.started()
                await run.ask("1", "3")
                await run.counted()
                codes.append((await server.end(number)).code)
            await reached(run.exporter, "down")

        async with TritonServer(place, MODELS) as server:
            await server.started()
            await run.ask("1", "3")
            await run.counted()
            await run.kill_exporter()
            await run.ask("1", "3")
            await run.start_exporter()
            await run.ask("1", "3")
            page = await run.counted()

    assert codes == [0, -signal.SIGKILL]
    assert answered(page) == run.succeeded
    assert value(page, RESETS, model="batched") == 2
    run.sampler.check()
    assert state(page) == "up"
    assert run.sampler.states.count("down") >= 2
    assert_nothing_refused(page)


async def test_polls_do_not_delay_its_end(triton_python: Path, home: Path) -> None:
    """A server that is polled ends as soon after SIGTERM as one that is not."""
    place = Place.chosen(triton_python, home)
    page = f",metrics={place.page}"
    targets = {
        "unpolled": "",
        "http": place.base,
        "http-page": place.base + page,
    }
    took: dict[str, Ended] = {}
    for name, target in targets.items():
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(TritonServer(place, ["batched"]))
            if target:
                exporter = await stack.enter_async_context(exporter_of(target, home, name))
                await exporter.started()
            await server.started()
            if target:
                await reached(exporter, "up")
            took[name] = await server.end()
    print({name: f"{ended.seconds:.1f} s" for name, ended in took.items()})  # noqa: T201

    assert {0} == {ended.code for ended in took.values()}
    assert max(ended.seconds for ended in took.values()) < took["unpolled"].seconds + SLACK


async def test_a_load_over_http_makes_it_stale(triton_python: Path, home: Path) -> None:
    """While a load stops Triton's HTTP port it is stale, never down, and no request is lost."""
    place = Place.chosen(triton_python, home, "late")
    # With more threads, a load blocks only connections of its own thread, rarely a new one.
    arguments = ["--http-thread-count=1"]
    models = ["batched", "streaming"]
    async with (
        running(place, place.base, home) as run,
        TritonServer(place, models, arguments) as server,
    ):
        await server.started()
        await reached(run.exporter, "up")
        run.sampler.states.clear()
        await run.client.ask_all(Ask("batched") for _ in range(BATCHED))
        load = asyncio.create_task(run.client.load("late"))
        await reached(run.exporter, "stale")
        # Its gRPC port accepts requests in the meantime.
        (streamed,) = await run.client.call(["stream", "streaming", [1, 2]])
        assert not load.done()
        await load
        await run.client.ask_all(Ask("late") for _ in range(3))
        page, found = await settled(server, run.exporter)
        states = set(run.sampler.states)

    assert found == []
    assert streamed["responses"] == [1, 2]
    assert answered(page) == {("batched", "1"): BATCHED, ("streaming", "1"): 2, ("late", "1"): 3}
    assert states == {"up", "stale"}
    assert state(page) == "up"
    run.sampler.check()
