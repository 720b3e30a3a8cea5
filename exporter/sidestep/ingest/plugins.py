"""What other installed packages bring, by their entry points."""

from __future__ import annotations

from importlib.metadata import entry_points

from prometheus_client.registry import Collector

from sidestep.config.settings import Config
from sidestep.errors import ConfigError
from sidestep.ingest.intake import Intake
from sidestep.ingest.source import Source

SOURCES_GROUP = "sidestep.sources"
"""Entry points of what brings items by itself: functions of the configuration and the intake that
return ``sources.Source`` objects."""
COLLECTORS_GROUP = "sidestep.collectors"
"""Entry points of a user's own prometheus_client collectors: classes or functions without
arguments that return one."""


def collectors() -> list[Collector]:
    """What other installed packages register under ``sidestep.collectors``.

    Raises:
        ConfigError: One of them cannot be made, or there is none to do what is asked for.
    """
    found: list[Collector] = []
    for point in entry_points(group=COLLECTORS_GROUP):
        try:
            found.append(point.load()())
        except Exception as error:
            raise ConfigError(f"collector {point.name}: {error!r}") from error
    return found


def sources(config: Config, intake: Intake, passthrough: object) -> list[Source]:
    """Return the sources that installed packages register under ``sidestep.sources``.

    Args:
        config: The configuration.
        intake: Accepts what sources bring.
        passthrough: Registry of other exporters' pages.

    Raises:
        ConfigError: One of them cannot be made.
    """
    found: list[Source] = []
    # A package that was installed in two ways registers the same twice.
    points = {point.value: point for point in entry_points(group=SOURCES_GROUP)}
    for point in points.values():
        try:
            found += point.load()(config, intake, passthrough)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"source {point.name}: {error!r}") from error
    if (config.subscribe or config.scrape or config.triton) and not found:
        raise ConfigError(
            "nothing here can subscribe or poll: install sidestep anew, with its entry points"
        )
    return found
