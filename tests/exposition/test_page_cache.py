"""Pages are rendered when they are asked for; concurrent and immediate requests share a render."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator

import aiohttp
import pytest

from exporters import Start
from harm import World
from rendered import render
from sidestep.app.exporter import Exporter
from sidestep.exposition import pages
from sidestep.exposition.negotiation import Format
from sidestep.exposition.pages import CACHE_SECONDS, PageCopier, Pages
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.protocol.messages import EngineInfo

ALL: list[tuple[str, Format]] = [
    (view, form)
    for view in ("engine", "pod")
    for form in ("text", "openmetrics", "protobuf")
    if (view, form) != ("pod", "protobuf")
]
"""Views and formats."""


class Fleet:
    """Many engines and their pages, which change with each ``observe``."""

    def __init__(self, engines: int = 50) -> None:
        self.world = World()
        self.registry = self.world.intake.registry
        for number in range(engines):
            labels = {"engine": str(number), "model_name": "m"}
            self.registry.register(EngineInfo(str(number), "vllm", labels))
        passthrough = PassthroughRegistry(self.registry.names)
        self.pages = Pages(PageCopier(self.registry, passthrough, self.world.own))

    def observe(self) -> None:
        """Change the histograms of every engine."""
        for one in self.registry.engines.values():
            for histogram in one.histograms:
                if histogram is not None:
                    histogram.observe(1.0)
            self.registry.touch(one)


@pytest.mark.parametrize(("view", "form"), ALL)
async def test_concurrent_requests_share_a_render(view: str, form: Format) -> None:
    """Plain or in gzip; each view and format has its own."""
    fleet = Fleet()
    found = await asyncio.gather(*(fleet.pages.page(view, form) for _ in range(5)))
    first = found[0]
    packed = await asyncio.gather(*(body.packed() for body in found))

    assert all(body is first for body in found)
    assert all(parts is packed[0] for parts in packed)
    assert gzip.decompress(b"".join(packed[0])) == b"".join(first.parts)
    others = [await fleet.pages.page(*other) for other in ALL if other != (view, form)]
    assert b"".join(first.parts) not in {b"".join(body.parts) for body in others}


@pytest.mark.parametrize(("view", "form"), ALL)
async def test_a_page_is_cached_briefly(
    view: str, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that, a request renders the present values."""
    fleet = Fleet()
    monkeypatch.setattr(pages, "CACHE_SECONDS", 3600.0)
    first = await fleet.pages.page(view, form)
    fleet.observe()
    assert await fleet.pages.page(view, form) is first

    monkeypatch.undo()
    again = Fleet()
    old = await again.pages.page(view, form)
    again.observe()
    begun = asyncio.get_running_loop().time()
    async with asyncio.timeout(30):
        while (new := await again.pages.page(view, form)) is old:
            await asyncio.sleep(CACHE_SECONDS / 20)
    assert asyncio.get_running_loop().time() - begun >= CACHE_SECONDS / 2
    assert len(b"".join(new.parts)) != len(b"".join(old.parts))
    if form == "text" and view == "engine":
        assert b"".join(new.parts).startswith(render(again.registry))


async def test_a_page_of_some_families_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached whole page is unaffected."""
    monkeypatch.setattr(pages, "CACHE_SECONDS", 3600.0)
    fleet = Fleet()
    names = frozenset({"vllm:e2e_request_latency_seconds_count"})
    whole = await fleet.pages.page("engine", "text")
    before = b"".join((await fleet.pages.page("engine", "text", names)).parts)
    fleet.observe()
    after = b"".join((await fleet.pages.page("engine", "text", names)).parts)

    assert b'seconds_count{engine="7",model_name="m"} 0\n' in before
    assert b'seconds_count{engine="7",model_name="m"} 1\n' in after
    assert await fleet.pages.page("engine", "text") is whole


async def test_a_large_page_does_not_block_the_loop() -> None:
    """It is written in a thread, while engines change."""
    fleet = Fleet()
    making = asyncio.create_task(fleet.pages.page("engine", "text"))
    turns = 0
    while not making.done():
        await asyncio.sleep(0)
        turns += 1
        labels = {"engine": f"late{turns}", "model_name": "m"}
        fleet.registry.register(EngineInfo(f"late{turns}", "vllm", labels))
    page = b"".join((await making).parts)
    assert turns > 5
    assert b'vllm:request_params_n_count{engine="49",model_name="m"} 0\n' in page


async def test_a_failed_render_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """All who waited for it get the error; the next request renders again."""
    fleet = Fleet()
    with monkeypatch.context() as broken:
        broken.setattr(fleet.pages, "_copier", None)
        asks = [fleet.pages.page("pod", "text") for _ in range(3)]
        found = await asyncio.gather(*asks, return_exceptions=True)
    assert [type(one) for one in found] == [AttributeError] * 3

    assert b"vllm:" in b"".join((await fleet.pages.page("pod", "text")).parts)


@pytest.fixture
async def exporter(start: Start) -> AsyncIterator[Exporter]:
    """Start an exporter without engines."""
    async with start() as running:
        yield running


@pytest.mark.parametrize("path", ["", "/pod"])
async def test_a_client_that_disconnects_does_not_cancel_the_render(
    exporter: Exporter, path: str
) -> None:
    """Even if its request began the render."""
    async with aiohttp.ClientSession() as session:

        async def one() -> bytes:
            async with session.get(exporter.url + path) as answer:
                return await answer.read()

        asks = [asyncio.create_task(one()) for _ in range(20)]
        await asyncio.sleep(0)
        asks[0].cancel()
        found = await asyncio.gather(*asks[1:])

    assert all(b"sidestep_build_info" in page for page in found)
