"""What runs in the exporter itself: the subscribers of ``--subscribe``, the pollers of ``--triton``."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from sidestep.config.settings import Config
from sidestep.errors import ConfigError, WireError
from sidestep.ingest.intake import Intake
from sidestep.ingest.local_stream import RankFeed
from sidestep.ingest.source import Source
from sidestep_adapters.streams.readers import READERS
from sidestep_adapters.streams.subscriber import Subscriber
from sidestep_adapters.triton import sources as tritons


def sources(config: Config, intake: Intake) -> Sequence[Source]:
    """All that ``config`` asks for.

    Raises:
        ConfigError: One cannot be made.
    """
    return [*subscribers(config, intake), *tritons.sources(config, intake)]


def subscribers(config: Config, intake: Intake) -> Sequence[Subscriber]:
    """One for each publisher, all of one context, which ends with the last of them.

    Raises:
        ConfigError: One's labels cannot be an engine's.
    """
    if not config.subscribe:
        return []
    context = zmq.Context()
    left = len(config.subscribe)

    def released() -> None:
        nonlocal left
        left -= 1
        if not left:
            context.term()

    found: list[Subscriber] = []
    for subscription in config.subscribe:
        reader = READERS[subscription.kind]
        feed = RankFeed(intake, subscription, reader.feature)
        try:
            feed.check()
        except WireError as error:
            raise ConfigError(f"--subscribe {subscription.name}: {error}") from None
        found.append(Subscriber(feed, reader(feed), context, released))
    intake.metrics.read(
        "sidestep_subscription_connected",
        lambda: [((each.subscription.name,), float(each.connected)) for each in found],
    )
    return found
