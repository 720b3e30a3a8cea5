"""Polling of one target at an interval, one request at a time, and the handling of responses."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from sidestep.config.poll_state import STATES, PollState
from sidestep.config.scrape_targets import Target
from sidestep.errors import PollError
from sidestep.telemetry.logs import Limited
from sidestep.telemetry.self_metrics import Reading, SelfMetrics
from sidestep_adapters.scrape.poll_task import PollTask

log = logging.getLogger(__name__)

Response = TypeVar("Response")
PollConnection = AbstractAsyncContextManager[Callable[[], Awaitable[Response]]]
"""A context manager that yields a function to send requests; the function raises PollError."""


@dataclasses.dataclass(frozen=True, slots=True)
class PollQuery(Generic[Response]):
    """Functions that query a target and handle its responses.

    Attributes:
        connect: Opens a connection.
        apply: Applies a response, a slice at each step; raises PollError if it is invalid.
        hide: Called when the last response must not be exposed any more.
    """

    connect: Callable[[], PollConnection[Response]]
    apply: Callable[[Response], Iterator[None]]
    hide: Callable[[], None]


class Poller(Generic[Response]):
    """Polls one target at an interval; implements ``sidestep.ingest.source.Source``.

    The next request waits until the last response is applied.

    Args:
        target: The target.
        query: Queries the target and applies responses.
        metrics: The exporter's own metrics.
        prefix: Prefix of the metrics about polls.
        clock: Monotonic clock.

    Attributes:
        state: Whether the target is up.
    """

    def __init__(
        self,
        target: Target,
        query: PollQuery[Response],
        metrics: SelfMetrics,
        prefix: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.state = PollState(target.interval)
        self._metrics = metrics
        self._prefix = prefix
        self._query = query
        self._clock = clock
        self._task = PollTask()
        self._applying: Iterator[None] | None = None
        self._is_applied = asyncio.Event()
        self._wake: Callable[[], None] = lambda: None
        self._lines = Limited(log)
        self._count("ok", 0)

    def open(self, wake: Callable[[], None]) -> None:
        """Start polling."""
        self._wake = wake
        self._is_applied = asyncio.Event()
        self._task.start(self._run())

    def receive(self, now: float) -> bool:
        """Apply a slice of a response; return whether there may be more."""
        if self._applying is None:
            return False
        try:
            next(self._applying)
        except StopIteration:
            if not self.state.is_shown:
                self._lines.info("answers", "%s: polls succeed", self.target.name)
            self.state.answered()
            self._count("ok", 1)
        except PollError as error:
            self._fail(error, now)
        else:
            return True
        self._applying = None
        self._is_applied.set()
        return False

    def pass_time(self, now: float) -> None:
        """Hide the last response of a target that has not answered for too long."""
        was_shown = self.state.is_shown
        self.state.tick(now)
        if was_shown and not self.state.is_shown:
            self._lines.warning("silent", "%s: no response for too long", self.target.name)
            self._query.hide()

    def cut(self) -> None:
        """Discard the last response, and start again."""
        self.close()
        self.state = PollState(self.target.interval)
        self._query.hide()
        self.open(self._wake)

    def close(self) -> None:
        """Stop polling."""
        self._applying = None
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""
        await self._task.wait()

    async def _run(self) -> None:
        async with self._query.connect() as fetch:
            while True:
                started = self._clock()
                self.state.started(started)
                try:
                    answer = await fetch()
                except PollError as error:
                    self._fail(error, self._clock())
                else:
                    await self._apply(answer, started)
                    del answer
                await asyncio.sleep(max(started + self.target.interval - self._clock(), 0.0))

    async def _apply(self, answer: Response, started: float) -> None:
        took = self._clock() - started
        self._metrics.set(f"{self._prefix}poll_duration_seconds", took, self.target.name)
        self._is_applied.clear()
        self._applying = self._query.apply(answer)
        self._wake()
        await self._is_applied.wait()

    def _fail(self, error: PollError, now: float) -> None:
        was_shown = self.state.is_shown
        self.state.failed(error.cause, now)
        self._count(error.cause, 1)
        self._lines.warning("failed", "%s: %s", self.target.name, error)
        if was_shown and not self.state.is_shown:
            self._query.hide()

    def _count(self, outcome: str, more: int) -> None:
        self._metrics.add(f"{self._prefix}polls_total", more, self.target.name, outcome)


def states(pollers: list[Poller[Response]]) -> Reading:
    """Return a reading for ``SelfMetrics.read``: 1 for each target's current state, 0 for others."""
    return lambda: [
        ((each.target.name, state), float(each.state.state == state))
        for each in pollers
        for state in STATES
    ]
