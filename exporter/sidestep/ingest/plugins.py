"""Sources and collectors of installed packages, found by entry points."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Protocol

from prometheus_client.registry import Collector

from sidestep.config.settings import Config
from sidestep.errors import ConfigError
from sidestep.ingest.intake import Intake

SOURCES_GROUP = "sidestep.sources"
"""Entry point group of sources: functions of the configuration and the intake that return
``Source`` objects."""
COLLECTORS_GROUP = "sidestep.collectors"
"""Entry point group of additional prometheus_client collectors: classes or functions without
arguments that return one."""


class Source(Protocol):
    """A source that runs inside the exporter, such as a poller or a subscriber."""

    def open(self, wake: Callable[[], None]) -> None:
        """Start in the running event loop; call ``wake`` when a message may be ready.

        Raises:
            ConfigError: The source's input is not available.
        """

    def receive(self, now: float) -> bool:
        """Apply at most one message; return whether more may be ready."""

    def tick(self, now: float) -> None:
        """Run periodic work, such as timeouts; called several times a second."""

    def cut(self) -> None:
        """Close connections, free the memory that peers filled and start again."""

    def close(self) -> None:
        """Start closing all connections."""

    async def wait_closed(self) -> None:
        """Return when all connections are closed."""


def collectors() -> list[Collector]:
    """Return the collectors that installed packages register under ``sidestep.collectors``."""
    found: list[Collector] = []
    for point in entry_points(group=COLLECTORS_GROUP):
        try:
            found.append(point.load()())
        except Exception as error:
            raise ConfigError(f"collector {point.name}: {error!r}") from error
    return found


def sources(config: Config, intake: Intake, passthrough: object) -> list[Source]:
    """Return the sources that installed packages register under ``sidestep.sources``.

    ``passthrough`` is the registry of other exporters' pages.

    Raises:
        ConfigError: A source cannot be created, or a setting needs one and none is installed.
    """
    found: list[Source] = []
    # A package that is installed twice registers the same entry point twice.
    points = {point.value: point for point in entry_points(group=SOURCES_GROUP)}
    for point in points.values():
        try:
            found += point.load()(config, intake, passthrough)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"source {point.name}: {error!r}") from error
    if config.has_sources and not found:
        raise ConfigError(
            "no source is installed that can subscribe or poll: reinstall sidestep with its entry points"
        )
    return found
