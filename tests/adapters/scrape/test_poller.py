"""Pages are applied in slices, between two requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from exporters import until
from polled import Polled, page, polled
from sidestep.config.scrape_targets import parse
from sidestep.exposition.passthrough.page import SLICE
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.scrape.poller import PagePoller

LINES = "".join(f"a{number} 1\n" for number in range(3 * SLICE))


class Polling:
    """A server whose page takes several slices, and its poller, which polls often."""

    def __init__(self, server: Polled) -> None:
        self.server = server
        self.metrics = SelfMetrics()
        target = parse(f"{server.url},interval=0.05")
        pages = PassthroughRegistry(list)
        self.poller = PagePoller(target, target.name, pages.page((), ()), self.metrics)
        self.woken = 0
        self.poller.open(self.wake)

    def wake(self) -> None:
        """Count the responses."""
        self.woken += 1

    @property
    def successes(self) -> float:
        """Return the number of successful polls."""
        return self.metrics.value("sidestep_scrape_polls_total", self.server.url, "ok")


@pytest.fixture
async def polling() -> AsyncIterator[Polling]:
    """Return a server and its poller."""
    async with polled(page(LINES)) as server:
        found = Polling(server)
        yield found
        found.poller.close()
        await found.poller.wait_closed()


async def test_the_next_request_waits_until_the_page_is_applied(polling: Polling) -> None:
    """Each turn applies one slice."""
    poller, server = polling.poller, polling.server
    await until(lambda: polling.woken == 1)
    await asyncio.sleep(0.2)
    assert (server.connections, poller.page.parsed) == (1, None)
    turns = 1
    while poller.receive(0.0):
        assert (poller.state.state, polling.successes) == ("down", 0)
        turns += 1
    assert turns > 3
    assert (poller.state.state, polling.successes) == ("up", 1)
    assert not poller.receive(0.0)
    await until(lambda: polling.woken == 2)


async def test_cut_restarts_polling(polling: Polling) -> None:
    """A partly applied page is dropped; one connection remains."""
    poller, server = polling.poller, polling.server
    await until(lambda: polling.woken == 1)
    assert poller.receive(0.0)
    poller.cut()
    assert not poller.receive(0.0)
    await until(lambda: polling.woken == 2)
    await asyncio.sleep(0.1)

    assert server.connections == 2
    assert poller.page.parsed is None
