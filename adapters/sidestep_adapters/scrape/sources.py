"""The sources of ``--scrape`` and of ``metrics=`` in ``--triton``: one poller for each page."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager

from sidestep.config.scrape_targets import Target
from sidestep.config.settings import Config
from sidestep.engines.triton.rows import FROM_STATISTICS
from sidestep.errors import ConfigError
from sidestep.exposition.passthrough.page import Page
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.ingest.intake import Intake
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.scrape.http_client import Client, Response
from sidestep_adapters.scrape.poller import Poller, PollQuery, states

PREFIX = "sidestep_scrape_"
ACCEPT = "text/plain;version=0.0.4;q=1,text/plain;q=0.5,*/*;q=0.1"
KINDS = ("text/plain",)


def sources(
    config: Config, intake: Intake, passthrough: PassthroughRegistry
) -> Sequence[Poller[Response]]:
    """Return one poller for each target.

    Raises:
        ConfigError: A file that a target needs cannot be read.
    """
    metrics = intake.metrics
    pollers: list[Poller[Response]] = []
    pages: list[tuple[Target, Page]] = []
    for flag, target, excluded in _targets(config):
        try:
            Client(target).check()
        except ConfigError as error:
            raise ConfigError(f"{flag} {target.name}: {error}") from None
        page = passthrough.page(target.labels, excluded)
        pages.append((target, page))
        pollers.append(page_poller(target, page, metrics))
    metrics.read(f"{PREFIX}state", states(pollers))
    metrics.read(
        f"{PREFIX}samples",
        lambda: [
            ((target.name,), float(page.parsed.samples if page.parsed is not None else 0))
            for target, page in pages
        ],
    )
    metrics.read(
        f"{PREFIX}left_out_samples",
        lambda: [
            ((target.name, reason), float(count))
            for target, page in pages
            for reason, count in passthrough.left_out(page).items()
        ],
    )
    return pollers


def _targets(config: Config) -> Iterator[tuple[str, Target, Collection[str]]]:
    """Yield each flag and target, and the families to leave out of its page."""
    for target in config.scrape:
        yield "--scrape", target, ()
    for server in config.triton:
        if server.metrics:
            target = dataclasses.replace(server.target, url=server.metrics)
            yield "--triton", target, FROM_STATISTICS


def page_poller(target: Target, page: Page, metrics: SelfMetrics) -> Poller[Response]:
    """Return a poller that updates ``page`` from ``target``."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[Callable[[], Awaitable[Response]]]:
        client = Client(target)
        client.open()
        try:
            yield lambda: client.fetch(target.url, ACCEPT, KINDS)
        finally:
            await client.close()

    def apply(answer: Response) -> Iterator[None]:
        return page.update(answer.chunks)

    return Poller(target, PollQuery(connect, apply, page.hide), metrics, PREFIX)
