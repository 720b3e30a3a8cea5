"""One target, asked again and again: one question in flight, and what becomes of its answer."""

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
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import Reading, SelfMetrics

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Asking = AbstractAsyncContextManager[Callable[[], Awaitable[Answer]]]
"""As long as it is entered, questions can be asked; each raises PollError where it has no answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question(Generic[Answer]):
    """What is asked, and what for.

    Attributes:
        connect: Makes what asks.
        take: Works an answer off, a slice at each step; raises PollError where it is none.
        hide: Called when nothing of what was answered shall be shown any more.
    """

    connect: Callable[[], Asking[Answer]]
    take: Callable[[Answer], Iterator[None]]
    hide: Callable[[], None]


class Poller(Generic[Answer]):
    """Asks one question at an interval, in the place of a ``sources.Source``.

    The next question waits until the last answer has been worked off.

    Args:
        prefix: How the metrics about it begin.

    Attributes:
        state: Whether the target is there.
    """

    def __init__(
        self,
        target: Target,
        question: Question[Answer],
        metrics: SelfMetrics,
        prefix: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.state = PollState(target.interval)
        self._metrics = metrics
        self._prefix = prefix
        self._question = question
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._work: Iterator[None] | None = None
        self._worked_off = asyncio.Event()
        self._wake: Callable[[], None] = lambda: None
        self._lines = RateLimitedLog(log)
        self._count("ok", 0)

    def open(self, wake: Callable[[], None]) -> None:
        """Ask from now on."""
        self._wake = wake
        self._worked_off = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        # What fails here is a bug, and the process's.
        self._task.add_done_callback(lambda task: None if task.cancelled() else task.result())

    def receive(self, now: float) -> bool:
        """Work a slice of an answer off; whether there may be more."""
        if self._work is None:
            return False
        try:
            next(self._work)
        except StopIteration:
            if not self.state.is_shown:
                self._lines.info("answers", "%s answers", self.target.name)
            self.state.answered()
            self._count("ok", 1)
        except PollError as error:
            self._fail(error, now)
        else:
            return True
        self._work = None
        self._worked_off.set()
        return False

    def pass_time(self, now: float) -> None:
        """What was not answered for too long is shown no more."""
        was_shown = self.state.is_shown
        self.state.tick(now)
        if was_shown and not self.state.is_shown:
            self._lines.warning("silent", "%s: no answer for long", self.target.name)
            self._question.hide()

    def cut(self) -> None:
        """Let go of all that was answered, and begin anew."""
        self.close()
        self.state = PollState(self.target.interval)
        self._question.hide()
        self.open(self._wake)

    def close(self) -> None:
        """Ask no more."""
        self._work = None
        if self._task is not None:
            self._task.cancel()

    async def wait_closed(self) -> None:
        """Once no connection is left."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        async with self._question.connect() as ask:
            while True:
                started = self._clock()
                self.state.started(started)
                try:
                    answer = await ask()
                except PollError as error:
                    self._fail(error, self._clock())
                else:
                    await self._hand_over(answer, started)
                    del answer
                await asyncio.sleep(max(started + self.target.interval - self._clock(), 0.0))

    async def _hand_over(self, answer: Answer, started: float) -> None:
        took = self._clock() - started
        self._metrics.set(f"{self._prefix}poll_duration_seconds", took, self.target.name)
        self._worked_off.clear()
        self._work = self._question.take(answer)
        self._wake()
        await self._worked_off.wait()

    def _fail(self, error: PollError, now: float) -> None:
        was_shown = self.state.is_shown
        self.state.failed(error.cause, now)
        self._count(error.cause, 1)
        self._lines.warning("failed", "%s: %s", self.target.name, error)
        if was_shown and not self.state.is_shown:
            self._question.hide()

    def _count(self, outcome: str, more: int) -> None:
        self._metrics.add(f"{self._prefix}polls_total", more, self.target.name, outcome)


def states(pollers: list[Poller[Answer]]) -> Reading:
    """For ``SelfMetrics.read``: of each target each state, 1 where it is the present one."""
    return lambda: [
        ((each.target.name, state), float(each.state.state == state))
        for each in pollers
        for state in STATES
    ]
