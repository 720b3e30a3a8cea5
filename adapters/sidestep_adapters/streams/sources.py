"""The sources of ``--subscribe``: one subscriber for each engine stream."""

from __future__ import annotations

from collections.abc import Sequence

from sidestep.config.settings import Config
from sidestep.errors import ConfigError, WireError
from sidestep.ingest.intake import Intake
from sidestep.ingest.local_stream import RankFeed
from sidestep_adapters.streams.frames import SharedContext
from sidestep_adapters.streams.readers import READERS
from sidestep_adapters.streams.subscriber import Subscriber


def sources(config: Config, intake: Intake, _: object) -> Sequence[Subscriber]:
    """Return one subscriber for each ``--subscribe``.

    Raises:
        ConfigError: The labels of a subscription cannot be an engine's.
    """
    if not config.subscribe:
        return []
    context = SharedContext()
    subscribers: list[Subscriber] = []
    for subscription in config.subscribe:
        reader = READERS[subscription.kind]
        feed = RankFeed(intake, subscription, reader.feature)
        try:
            feed.check()
        except WireError as error:
            raise ConfigError(f"--subscribe {subscription.name}: {error}") from None
        subscribers.append(Subscriber(feed, reader(feed), context))
    intake.metrics.read(
        "sidestep_subscription_connected",
        lambda: [((each.subscription.name,), float(each.connected)) for each in subscribers],
    )
    return subscribers
