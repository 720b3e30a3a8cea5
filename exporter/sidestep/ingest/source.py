"""What brings items by itself, in this process: whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

PATIENCE = 1.0
"""Seconds for all connections to end in, once nobody needs them any more."""


class Source(Protocol):
    """One that runs inside the exporter; found by the entry points ``sidestep.ingest.source``."""

    def open(self, wake: Callable[[], None]) -> None:
        """Begin, in the running event loop; call ``wake`` when there may be something.

        Raises:
            ConfigError: What it reads cannot be had.
        """

    def receive(self, now: float) -> bool:
        """Hand over one message at most; whether there may be more."""

    def pass_time(self, now: float) -> None:
        """Look after what nobody wakes it for; several times a second."""

    def cut(self) -> None:
        """Let go of all memory that others filled, and begin anew."""

    def close(self) -> None:
        """End."""

    async def wait_closed(self) -> None:
        """Once no connection is left."""


class Sources:
    """All of them; those that may have something take turns."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._all = list(sources)
        self._ready: dict[Source, None] = {}
        """In the order of their turns."""

    def open(self, drain: Callable[[], None]) -> None:
        """Begin; ``drain`` is called when there is something to take.

        Raises:
            ConfigError: What one reads cannot be had.
        """

        def wake(source: Source) -> None:
            self._ready.setdefault(source)
            drain()

        for source in self._all:
            source.open(partial(wake, source))
            self._ready.setdefault(source)

    def take(self, now: float) -> bool:
        """Take in one message; whether there was any."""
        while self._ready:
            source = next(iter(self._ready))
            del self._ready[source]
            if source.receive(now):
                self._ready[source] = None
                return True
        return False

    def pass_time(self, now: float) -> None:
        """Let each look around, and look at each."""
        for source in self._all:
            source.pass_time(now)
            self._ready.setdefault(source)

    def cut(self) -> None:
        """Let go of all memory that others filled."""
        for source in self._all:
            source.cut()

    def close(self) -> None:
        """End."""
        for source in self._all:
            source.close()

    async def wait_closed(self) -> None:
        """Once none of them has a connection left; all end at the same time."""
        for source in self._all:
            await source.wait_closed()
