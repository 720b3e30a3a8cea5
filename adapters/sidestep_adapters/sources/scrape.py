"""The pages that ``--scrape`` asks for, and ``metrics=`` of ``--triton``."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager

from sidestep.catalogue.triton import FED
from sidestep.config import Config
from sidestep.errors import ConfigError
from sidestep.intake import Intake
from sidestep.pages import Page
from sidestep.polls import Target
from sidestep.selfmetrics import SelfMetrics
from sidestep_adapters.sources.http_client import Answer, Client
from sidestep_adapters.sources.poller import Poller, Question, states

PREFIX = "sidestep_scrape_"
ACCEPT = "text/plain;version=0.0.4;q=1,text/plain;q=0.5,*/*;q=0.1"
KINDS = ("text/plain",)


def sources(config: Config, intake: Intake) -> Sequence[Poller[Answer]]:
    """One for each target.

    Raises:
        ConfigError: A file that one needs cannot be read.
    """
    passed, metrics = intake.registry.passed, intake.metrics
    found: list[Poller[Answer]] = []
    pages: list[tuple[Target, Page]] = []
    for flag, target, excluded in _targets(config):
        try:
            Client(target).check()
        except ConfigError as error:
            raise ConfigError(f"{flag} {target.name}: {error}") from None
        page = passed.page(target.labels, excluded)
        pages.append((target, page))
        found.append(page_poller(target, target.url, page, metrics, PREFIX))
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
    """Who says so, the target, and the families that are not wanted from there."""
    for target in config.scrape:
        yield "--scrape", target, ()
    for server in config.triton:
        if server.metrics:
            yield "--triton", dataclasses.replace(server.target, url=server.metrics), FED


def page_poller(
    target: Target, url: str, page: Page, metrics: SelfMetrics, prefix: str
) -> Poller[Answer]:
    """Fetches ``url`` for ``page``, with what ``target`` says."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[Callable[[], Awaitable[Answer]]]:
        client = Client(target)
        client.open()
        try:
            yield lambda: client.ask(url, ACCEPT, KINDS)
        finally:
            await client.close()

    question = Question(connect, lambda answer: page.take(answer.chunks), page.hide)
    return Poller(target, question, metrics, prefix)
