"""The pages that ``--scrape`` asks for, and ``metrics=`` of ``--triton``."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager

from sidestep.config.scrape_targets import Target
from sidestep.config.settings import Config
from sidestep.engines.triton.rows import FROM_STATISTICS
from sidestep.errors import ConfigError
from sidestep.exposition.passthrough.page import Page
from sidestep.ingest.intake import Intake
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.scrape.http_client import Answer, Client
from sidestep_adapters.scrape.poller import Poller, Question, states

PREFIX = "sidestep_scrape_"
ACCEPT = "text/plain;version=0.0.4;q=1,text/plain;q=0.5,*/*;q=0.1"
KINDS = ("text/plain",)


def sources(config: Config, intake: Intake) -> Sequence[Poller[Answer]]:
    """One for each target.

    Raises:
        ConfigError: A file that one needs cannot be read.
    """
    passed, metrics = intake.registry.passthrough, intake.metrics
    found: list[Poller[Answer]] = []
    pages: list[tuple[Target, Page]] = []
    for flag, target, excluded in _targets(config):
        try:
            Client(target).check()
        except ConfigError as error:
            raise ConfigError(f"{flag} {target.name}: {error}") from None
        page = passed.page(target.labels, excluded)
        pages.append((target, page))
        found.append(page_poller(target, page, metrics))
    metrics.read(f"{PREFIX}state", states(found))
    metrics.read(
        f"{PREFIX}samples",
        lambda: [
            ((target.name,), float(page.plan.samples if page.plan is not None else 0))
            for target, page in pages
        ],
    )
    metrics.read(
        f"{PREFIX}left_out_samples",
        lambda: [
            ((target.name, reason), float(count))
            for target, page in pages
            for reason, count in passed.left_out(page).items()
        ],
    )
    return found


def _targets(config: Config) -> Iterator[tuple[str, Target, Collection[str]]]:
    """Yield the flag, the target, and the families to leave out of its page."""
    for target in config.scrape:
        yield "--scrape", target, ()
    for server in config.triton:
        if server.metrics:
            target = dataclasses.replace(server.target, url=server.metrics)
            yield "--triton", target, FROM_STATISTICS


def page_poller(target: Target, page: Page, metrics: SelfMetrics) -> Poller[Answer]:
    """Poll ``target`` for ``page``."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[Callable[[], Awaitable[Answer]]]:
        client = Client(target)
        client.open()
        try:
            yield lambda: client.ask(target.url, ACCEPT, KINDS)
        finally:
            await client.close()

    def take(answer: Answer) -> Iterator[None]:
        return page.take(answer.chunks)

    return Poller(target, Question(connect, take, page.hide), metrics, PREFIX)
