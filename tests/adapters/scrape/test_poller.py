"""A page is applied in a thread, between two requests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from exporters import until
from polled import Polled, page, polled
from sidestep.config.scrape_targets import parse
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.scrape.poller import PagePoller

LINES = "".join(f"a{number} 1\n" for number in range(600))


class Polling:
    """A server and its poller, which polls once unless it starts again."""

    def __init__(self, server: Polled) -> None:
        self.server = server
        self.metrics = SelfMetrics()
        target = parse(f"{server.url},interval=60")
        pages = PassthroughRegistry(list)
        self.poller = PagePoller(target, target.name, pages.page((), ()), self.metrics)
        self.poller.open(lambda: None)

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


async def test_cut_restarts_polling(polling: Polling) -> None:
    """The page is dropped; one connection remains."""
    poller, server = polling.poller, polling.server
    await until(lambda: polling.successes >= 1)
    poller.cut()
    assert poller.page.parsed is None
    before = polling.successes
    await until(lambda: polling.successes > before)

    assert server.connections == 2
    assert poller.page.parsed is not None
