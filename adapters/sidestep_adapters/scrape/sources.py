"""The sources of ``--scrape`` and of ``metrics=`` in ``--triton``: one poller for each page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from sidestep.config.scrape_targets import INTERVAL, Target
from sidestep.config.settings import Config
from sidestep.errors import ConfigError
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.ingest.intake import Intake
from sidestep_adapters.polling.http_client import Client
from sidestep_adapters.polling.state import STATES
from sidestep_adapters.scrape.poller import PagePoller
from sidestep_adapters.triton.rows import FROM_STATISTICS


def sources(
    config: Config, intake: Intake, passthrough: PassthroughRegistry
) -> Sequence[PagePoller]:
    """Return one poller for each target.

    Raises:
        ConfigError: A file that a target needs cannot be read.
    """
    metrics = intake.metrics
    pollers: list[PagePoller] = []
    names: Counter[str] = Counter()
    for flag, target, excluded in _targets(config):
        try:
            Client(target).check()
        except ConfigError as error:
            raise ConfigError(f"{flag} {target.name}: {error}") from None
        names[target.name] += 1
        number = names[target.name]
        name = target.name if number == 1 else f"{target.name} #{number}"
        # A Triton of --triton has statistics lines already.
        of_lines = name if flag == "--scrape" else ""
        page = passthrough.page(target.labels, excluded, of_lines)
        pollers.append(PagePoller(target, name, page, metrics))
    metrics.read(
        "sidestep_scrape_state",
        lambda: [
            ((each.name, state), float(each.state.state == state))
            for each in pollers
            for state in STATES
        ],
    )
    metrics.read(
        "sidestep_scrape_samples",
        lambda: [
            ((each.name,), float(each.page.parsed.exposed if each.page.parsed else 0))
            for each in pollers
        ],
    )
    metrics.read(
        "sidestep_scrape_left_out_samples",
        lambda: [
            ((each.name, reason), float(count))
            for each in pollers
            for reason, count in passthrough.left_out(each.page).items()
        ],
    )
    return pollers


def _targets(config: Config) -> Iterator[tuple[str, Target, Collection[str]]]:
    """Yield each flag and target, and the families to leave out of its page."""
    for target in config.scrape:
        yield "--scrape", target, ()
    for server in config.triton:
        if server.metrics:
            # What the page has is not lost between polls, and a page is larger than statistics.
            interval = max(server.target.interval, INTERVAL)
            target = dataclasses.replace(server.target, url=server.metrics, interval=interval)
            yield "--triton", target, FROM_STATISTICS
