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
from sidestep.telemetry.logs import Limited
from sidestep_adapters.triton.models import Models, VersionUpdate
from sidestep_adapters.triton.poll import StatisticsPoll
from sidestep_adapters.triton.queries import Queries
from sidestep_adapters.triton.server import Server as ServerApi
from sidestep_adapters.triton.state import ServerState

log = logging.getLogger("sidestep.triton")

UPDATES_PER_WAKE = 32
"""Looks that are handed over at once: each turn costs as much as one of them."""
SLICE = 0.0005
"""Seconds that one turn may take: to look at all other sources after each version costs more
than the version."""
REJECTED_FOR = 60.0
"""Seconds after which a version that could not be shown is tried again."""


class Connection(Protocol):
    """What the answers come over."""

    def open(self) -> None:
        """Begin, in the running event loop."""

    async def close(self) -> None:
        """End."""


class TritonSource:
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
        api: ServerApi,
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
        self._lines = Limited(log)
        self._name = f"triton {server.target.name}"
        self._models = Models(
            server.target.name,
            dict(server.target.labels),
            api.stats,
            has_failures=has_failures,
        )
        queries = Queries(api, server.models, self._name, self._lines)
        self._statistics_poll = StatisticsPoll(
            server=api,
            models=self._models,
            queries=queries,
            on_statistics=self._queue_statistics_received,
            on_update=self._queue_update,
            reject=reject,
            attached=lambda: feed.engines,
            lines=self._lines,
            name=self._name,
        )
        self.state = ServerState(feed, self._name, self._interval, self._apply_server_item, log)
        self._pending: deque[Callable[[], None]] = deque()
        self._is_applied = asyncio.Event()
        """Whether all that was found has had its turn."""
        self._rejected_until: dict[str, float] = {}
        """Engines that cannot be shown, and until when that is not tried."""
        self._task: asyncio.Task[None] | None = None
        self._poll_task: asyncio.Task[None] | None = None
        self._wake: Callable[[], None] = lambda: None

    def open(self, wake: Callable[[], None]) -> None:
        """Begin to poll; the server may come later."""
        self._wake = wake
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(lambda task: None if task.cancelled() else task.result())

    def receive(self, now: float) -> bool:  # noqa: ARG002 - what happened has its time with it
        """Hand over some versions; whether there may be more."""
        if not self._pending:
            self._is_applied.set()
            return False
        until = time.perf_counter() + SLICE
        while self._pending:
            self._pending.popleft()()
            if time.perf_counter() > until:
                break
        else:
            self._is_applied.set()
        return True

    def pass_time(self, now: float) -> None:
        """Notice a server that takes long."""
        self.state.expire(now)

    def cut(self) -> None:
        """Let go of all that the server has said."""
        if self._poll_task is not None:
            self._poll_task.cancel()
        self._pending.clear()
        self._rejected_until.clear()
        self._models.clear()
        self._is_applied.set()

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
            self.state.poll_started(time.monotonic())
            poll_task = self._poll_task = asyncio.ensure_future(self._poll())
            try:
                await asyncio.wait((poll_task,))
            finally:
                poll_task.cancel()
            if not poll_task.cancelled():
                poll_task.result()
            if self._pending:
                self._is_applied.clear()
                self._wake()
                await self._is_applied.wait()
            # What took longer than an interval has missed its turns, which do not come back.
            due = max(due + self._interval, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _poll(self) -> None:
        try:
            found = await self._statistics_poll.poll()
        except PollError as error:
            self._fail(error)
            return
        now, seconds = found.poll_time.stamp, found.seconds
        if found.failure is not None:
            self._fail(found.failure)
        else:
            self._pending.append(lambda: self.state.succeeded(now, seconds, len(self._models)))

    def _fail(self, error: PollError) -> None:
        if error.cause == "unreachable":
            self._statistics_poll.queries.reset()
        self._pending.append(partial(self.state.failed, time.monotonic(), error))

    def _queue_statistics_received(self) -> None:
        self._pending.append(partial(self.state.statistics_received, time.monotonic()))

    def _queue_update(self, update: VersionUpdate) -> None:
        self._pending.append(partial(self._apply_update, update))
        if len(self._pending) >= UPDATES_PER_WAKE:
            self._wake()

    def _apply_update(self, update: VersionUpdate) -> None:
        identity = update.info.id
        until = self._rejected_until.get(identity, 0.0) if self._rejected_until else 0.0
        if update.item is not None and (not until or time.monotonic() >= until):
            self._rejected_until.pop(identity, None)
            try:
                self._feed.tell(update.info, update.item)
            except WireError as error:
                self._rejected_until[identity] = time.monotonic() + REJECTED_FOR
                self._reject(error.reason)
                self._lines.warning("tell", "%s: %s is not shown: %s", self._name, identity, error)
        if update.detach:
            self._rejected_until.pop(identity, None)
            self._feed.leave(identity)

    def _apply_server_item(self, item: Item) -> None:
        try:
            self._feed.tell(self._models.server, item)
        except WireError as error:
            self._reject(error.reason)
            self._lines.warning("tell", "%s: its state is not shown: %s", self._name, error)
