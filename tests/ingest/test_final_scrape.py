"""The scrape of the last counts, which an exporter waits for before it stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from exporters import Start, until
from intakes import Fed
from pages import get
from sidestep.app.exporter import Exporter
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.exposition import pages
from sidestep.http.routes import SCRAPE_TIMEOUT
from sidestep.ingest.final_scrape import FinalScrape
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import Batch, Bye, EngineInfo, encode
from sidestep_adapters.publisher.publisher import Publisher

ENGINE = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})


@contextlib.asynccontextmanager
async def engine(exporter: Exporter, name: str = "s") -> AsyncIterator[None]:
    """Run an engine that counts tokens; after the block, close it and wait until the exporter has detached it."""
    made = Publisher(exporter.endpoints[0], name, [ENGINE])
    try:
        made.push(VllmStep(0, 1.0, 1.0, None, IterationStats(5)))
        await until(lambda: made.drained)
        yield
    finally:
        await asyncio.to_thread(made.close)
    await until(lambda: not any(one.feeds.streams for one in exporter.registry.engines.values()))


async def scraped(exporter: Exporter, *, by_prometheus: bool = False) -> bool:
    """Scrape the page; return whether that was the final scrape."""
    await get(exporter.url, **({SCRAPE_TIMEOUT: "10"} if by_prometheus else {}))
    return exporter.final_scrape.done()


async def test_an_exporter_without_engines_waits_for_no_scrape(start: Start) -> None:
    """Nothing is left to scrape before an engine connects."""
    async with start() as exporter:
        assert exporter.final_scrape.done()


async def test_the_first_page_after_the_last_goodbye_is_final(start: Start) -> None:
    """Neither a page of a connected engine nor one of selected families is the final scrape."""
    async with start() as exporter:
        for name in ("one", "two"):
            async with engine(exporter, name):
                assert not await scraped(exporter)
            assert not exporter.final_scrape.done()
            await get(f"{exporter.url}?name[]=vllm:generation_tokens_total")
            assert not exporter.final_scrape.done()
            await until(lambda: scraped(exporter), 20)


async def test_a_page_from_before_the_goodbye_is_not_final(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that the exporter had cached before the engine ended may lack its last counts."""
    monkeypatch.setattr(pages, "CACHE_SECONDS", 3600.0)
    async with start() as exporter:
        async with engine(exporter):
            await scraped(exporter)

        assert not await scraped(exporter)


def test_a_page_without_items_that_have_arrived_is_not_final() -> None:
    """A goodbye can arrive with items, which are applied in slices between which pages are rendered."""
    fed = Fed(now=1.0)
    final = FinalScrape(fed.intake, lambda: fed.now)
    fed.send_hello("s", [ENGINE])
    item = encode_item(VllmStep(0, 1.0, 1.0, None, IterationStats(5)))
    for message in (Batch(1, 1, [msgspec.Raw(item)]), Bye(1, 1)):
        fed.intake.accept(b"s", [encode(message)], fed.now)
    fed.now = 2.0
    final.note(final.stamp(), by_prometheus=True)
    while fed.intake.busy:
        fed.intake.work()

    assert not final.done()
    final.note(final.stamp(), by_prometheus=True)
    assert final.done()


async def test_polls_of_routers_are_not_final_where_prometheus_scrapes(start: Start) -> None:
    """Prometheus stores what it scrapes; an endpoint picker polls many times a second, and stores nothing."""
    async with start() as exporter:
        async with engine(exporter):
            await scraped(exporter, by_prometheus=True)

        begun = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < begun + 3 * pages.CACHE_SECONDS:
            assert not await scraped(exporter)
        await until(lambda: scraped(exporter, by_prometheus=True), 20)
