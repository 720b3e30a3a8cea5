"""Polls one Triton server for as long as the exporter runs; see ``--triton``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from sidestep.config.triton_servers import Server
from sidestep.engines.items import Item
from sidestep.errors import PollError, WireError
from sidestep.ingest.local_stream import ServerFeed
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.triton.models import Look, Models
from sidestep_adapters.triton.poll import Poller
from sidestep_adapters.triton.queries import Questions
from sidestep_adapters.triton.server import Server as Answers
from sidestep_adapters.triton.state import State

log = logging.getLogger("sidestep.triton")

TOGETHER = 32
"""Looks that are handed over at once: each turn costs as much as one of them."""
TURN = 0.0005
"""Seconds that one turn may take: to look at all other sources after each version costs more
than the version."""
REFUSED_FOR = 60.0
"""Seconds after which a version that could not be shown is tried again."""


class Connection(Protocol):
    """What the answers come over."""

    def open(self) -> None:
        """Begin, in the running event loop."""

    async def close(self) -> None:
        """End."""


class Triton:
    """Polls one server, in the place of a ``sources.Source``.

    What a poll finds waits for its turn, some versions of models at a time; the next poll waits
    until all have had theirs.

    Args:
        feed: Where it goes.
        reject: Counts what could not be taken, by its reason.
        has_failures: Whether failed requests are shown under Triton's own name: its page can
            tell them by reason.
    """

    def __init__(
        self,
        server: Server,
        answers: Answers,
        connection: Connection,
        feed: ServerFeed,
        reject: Callable[[str], None],
        *,
        has_failures: bool,
    ) -> None:
        self._interval = server.target.interval
        self._connection = connection
        self._feed = feed
        self._reject = reject
        self._lines = RateLimitedLog(log)
        self._name = f"triton {server.target.name}"
        self._models = Models(
            server.target.name,
            dict(server.target.labels),
            answers.stats,
            has_failures=has_failures,
        )
        questions = Questions(answers, server.models, self._name, self._lines)
        self._poller = Poller(
            server=answers,
            models=self._models,
            questions=questions,
            heard=self._heard,
            hand=self._hand,
            reject=reject,
            known=lambda: feed.engines,
            lines=self._lines,
            name=self._name,
        )
        self.state = State(feed, self._name, self._interval, self._tell_server, log)
        self._turns: deque[Callable[[], None]] = deque()
        self._is_done = asyncio.Event()
        """Whether all that was found has had its turn."""
        self._refused: dict[str, float] = {}
        """Engines that cannot be shown, and until when that is not tried."""
        self._task: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._wake: Callable[[], None] = lambda: None

    def open(self, wake: Callable[[], None]) -> None:
        """Begin to poll; the server may come later."""
        self._wake = wake
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(lambda task: None if task.cancelled() else task.result())

    def receive(self, now: float) -> bool:  # noqa: ARG002 - what happened has its time with it
        """Hand over some versions; whether there may be more."""
        if not self._turns:
            self._is_done.set()
            return False
        until = time.perf_counter() + TURN
        while self._turns:
            self._turns.popleft()()
            if time.perf_counter() > until:
                break
        else:
            self._is_done.set()
        return True

    def pass_time(self, now: float) -> None:
        """Notice a server that takes long."""
        self.state.pass_time(now)

    def cut(self) -> None:
        """Let go of all that the server has said."""
        if self._polling is not None:
            self._polling.cancel()
        self._turns.clear()
        self._refused.clear()
        self._models.forget()
        self._is_done.set()

    def close(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()

    async def wait_closed(self) -> None:
        """Once no connection is left."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        self._connection.open()
        try:
            await self._poll_all()
        finally:
            await self._connection.close()

    async def _poll_all(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self.state.asking(time.monotonic())
            polling = self._polling = asyncio.ensure_future(self._poll())
            try:
                await asyncio.wait((polling,))
            finally:
                polling.cancel()
            if not polling.cancelled():
                polling.result()
            if self._turns:
                self._is_done.clear()
                self._wake()
                await self._is_done.wait()
            # What took longer than an interval has missed its turns, which do not come back.
            due = max(due + self._interval, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _poll(self) -> None:
        try:
            found = await self._poller.poll()
        except PollError as error:
            self._fail(error)
            return
        now, seconds = found.moment.stamp, found.seconds
        if found.failure is not None:
            self._fail(found.failure)
        else:
            self._turns.append(lambda: self.state.succeeded(now, seconds, len(self._models)))

    def _fail(self, error: PollError) -> None:
        if error.cause == "unreachable":
            self._poller.questions.connect_anew()
        self._turns.append(partial(self.state.failed, time.monotonic(), error))

    def _heard(self) -> None:
        self._turns.append(partial(self.state.heard, time.monotonic()))

    def _hand(self, look: Look) -> None:
        self._turns.append(partial(self._tell, look))
        if len(self._turns) >= TOGETHER:
            self._wake()

    def _tell(self, look: Look) -> None:
        identity = look.info.id
        until = self._refused.get(identity, 0.0) if self._refused else 0.0
        if look.item is not None and (not until or time.monotonic() >= until):
            self._refused.pop(identity, None)
            try:
                self._feed.tell(look.info, look.item)
            except WireError as error:
                self._refused[identity] = time.monotonic() + REFUSED_FOR
                self._reject(error.reason)
                self._lines.warning("tell", "%s: %s is not shown: %s", self._name, identity, error)
        if look.leaves:
            self._refused.pop(identity, None)
            self._feed.leave(identity)

    def _tell_server(self, item: Item) -> None:
        try:
            self._feed.tell(self._models.server, item)
        except WireError as error:
            self._reject(error.reason)
            self._lines.warning("tell", "%s: its state is not shown: %s", self._name, error)
