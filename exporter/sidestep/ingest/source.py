"""Sources inside the exporter process, such as pollers and subscribers, and their scheduling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

PATIENCE = 1.0
"""Seconds to wait for connections to close during shutdown."""


class Source(Protocol):
    """A source that runs inside the exporter; found by the entry points ``sidestep.sources``."""

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


class Sources:
    """All sources; those that may have messages are read in turn."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._all = list(sources)
        self._ready: dict[Source, None] = {}
        """Sources that may have messages, in the order in which they are read."""

    def open(self, drain: Callable[[], None]) -> None:
        """Start all sources; ``drain`` is called when a message may be ready.

        Raises:
            ConfigError: The input of a source is not available.
        """

        def wake(source: Source) -> None:
            self._ready.setdefault(source)
            drain()

        for source in self._all:
            source.open(partial(wake, source))
            self._ready.setdefault(source)

    def receive(self, now: float) -> bool:
        """Apply one message of the next ready source; return whether there was one."""
        while self._ready:
            source = next(iter(self._ready))
            del self._ready[source]
            if source.receive(now):
                self._ready[source] = None
                return True
        return False

    def tick(self, now: float) -> None:
        """Run the periodic work of each source, and read each once."""
        for source in self._all:
            source.tick(now)
            self._ready.setdefault(source)

    def cut(self) -> bool:
        """Free the memory that peers filled, in each source; return whether there is a source."""
        for source in self._all:
            source.cut()
        return bool(self._all)

    def close(self) -> None:
        """Start closing all sources."""
        for source in self._all:
            source.close()

    async def wait_closed(self) -> None:
        """Return when every source has closed its connections; they close concurrently."""
        for source in self._all:
            await source.wait_closed()
