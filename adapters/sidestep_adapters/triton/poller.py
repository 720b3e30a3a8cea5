"""The source that polls one Triton server while the exporter runs; see ``--triton``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from sidestep.config.triton_servers import Server
from sidestep.errors import PollError, WireError
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.polling.poll_state import STATES
from sidestep_adapters.polling.poll_task import PollTask
from sidestep_adapters.polling.server_state import OUTCOMES, UNREACHABLE, ServerState
from sidestep_adapters.triton.http import ADVICE, DEFAULT_ADVICE, TritonApi
from sidestep_adapters.triton.models import Models, PollTime, VersionUpdate
from sidestep_adapters.triton.queries import Queries
from sidestep_adapters.triton.statistics_reader import StatisticsReader


class TritonState(ServerState):
    """State of one server.

    Args:
        feed: The ingest side of the server.
        server: The engine that represents the server itself.
        name: The server's name in the log.
        interval: Seconds between polls.
        lines: Rate-limited log.
    """

    def __init__(
        self,
        feed: ServerFeed,
        server: EngineInfo,
        name: str,
        interval: float,
        lines: RateLimitedLog,
    ) -> None:
        super().__init__(
            feed,
            name,
            interval,
            lines,
            advice=lambda cause: ADVICE.get(cause, DEFAULT_ADVICE),
            export=self._export_state,
        )
        self._server = server
        self._polled: tuple[Family, ...] = ()
        """Families of the complete poll that is being noted."""

    def polled(self, now: float, seconds: float, versions: int) -> None:
        """Note a complete poll, with its number of versions and its duration in seconds."""
        duration = Family(
            "sidestep_triton_poll_duration_seconds",
            "histogram",
            samples=[Sample(observations=[seconds])],
        )
        number = Family(
            "sidestep_triton_model_versions", "gauge", samples=[Sample(value=float(versions))]
        )
        self._polled = duration, number
        self.succeeded(now, f"model versions: {versions}")
        self._polled = ()

    def _export_state(self, now: float, outcome: str) -> None:
        states = [Sample([state], float(state == self.state)) for state in STATES]
        counted = dict.fromkeys(OUTCOMES, 0.0)
        if outcome:
            counted[outcome] = 1.0
        polls = [Sample([name], count) for name, count in counted.items()]
        item = Samples(
            0,
            now,
            [
                Family("sidestep_triton_state", "gauge", ["state"], states),
                Family("sidestep_triton_polls_total", "counter", ["outcome"], polls),
                *self._polled,
            ],
        )
        try:
            self._feed.apply(self._server, item)
        except WireError as error:
            self._feed.intake.reject(error.reason)
            self._lines.warning(
                "export", "%s: the server's state is not exposed: %s", self._name, error
            )


log = logging.getLogger("sidestep.triton")

UPDATES_PER_WAKE = 32
"""Number of updates applied in one turn: waking the source costs as much as an update."""
SLICE = 0.0005
"""Maximum seconds of one turn: running all other sources after each update costs more than it."""
REJECTED_FOR = 60.0
"""Seconds after which a rejected version is tried again."""


class TritonPoller:
    """Polls one server; implements ``sidestep.ingest.source.Source``.

    The updates of a poll wait for their turn and are applied in parts; the next poll waits until
    all are applied.

    Args:
        server: The configured server.
        api: The server's API; closed with the source.
        feed: The ingest side of the server.
        has_failures: Whether failed requests are exposed under Triton's own name: its page can
            have them by reason.
    """

    def __init__(
        self, server: Server, api: TritonApi, feed: ServerFeed, *, has_failures: bool
    ) -> None:
        target = server.target
        self._interval = target.interval
        self._api = api
        self._feed = feed
        self._lines = lines = RateLimitedLog(log)
        self._name = name = f"triton {target.name}"
        self._models = Models(target.name, dict(target.labels), has_failures=has_failures)
        self._queries = Queries(api, server.models, name, lines)
        self._reader = StatisticsReader(
            self._models, self._queries, feed, emit=self._queue_update, lines=lines, name=name
        )
        self.state = TritonState(feed, self._models.server, name, target.interval, lines)
        self._pending: deque[Callable[[], None]] = deque()
        self._is_applied = asyncio.Event()
        """Set when all updates of the last poll are applied."""
        self._rejected_until: dict[str, float] = {}
        """Rejected engines, and when each is tried again."""
        self._task = PollTask()
        self._poll_task: asyncio.Task[None] | None = None
        self._wake: Callable[[], None] = lambda: None

    def open(self, wake: Callable[[], None]) -> None:
        """Start polling; the server may start later."""
        self._wake = wake
        self._task.start(self._run())

    def receive(self, now: float) -> bool:  # noqa: ARG002 - updates carry their own time
        """Apply some updates; return whether there may be more."""
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

    def tick(self, now: float) -> None:
        """Detect a slow server."""
        self.state.expire(now)

    def cut(self) -> None:
        """Discard the state of the server's models and the waiting updates."""
        if self._poll_task is not None:
            self._poll_task.cancel()
        self._pending.clear()
        self._rejected_until.clear()
        self._models.clear()
        self._is_applied.set()

    def close(self) -> None:
        """Stop polling."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""
        await self._task.wait()

    async def _run(self) -> None:
        try:
            await self._poll_all()
        finally:
            await self._api.close()

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
                # Queries end before the connection is closed.
                await asyncio.wait((poll_task,))
            if not poll_task.cancelled():
                poll_task.result()
            if self._pending:
                self._is_applied.clear()
                self._wake()
                await self._is_applied.wait()
            # Polls that are missed because one took longer than an interval are skipped.
            due = max(due + self._interval, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _poll(self) -> None:
        """Query the server and queue the updates."""
        try:
            await self._queries.check()
            started = time.monotonic()
            answer = await self._queries.statistics()
            poll_time = PollTime(time.monotonic(), time.time())
            found = await self._reader.pieces_by_version(answer.pieces)
            self._pending.append(partial(self.state.statistics_received, time.monotonic()))
            await self._reader.update(found, answer, poll_time)
        except PollError as error:
            self._fail(error)
            return
        if answer.failure is not None:
            self._fail(answer.failure)
        else:
            now, seconds = poll_time.stamp, poll_time.stamp - started
            self._pending.append(lambda: self.state.polled(now, seconds, len(self._models)))

    def _fail(self, error: PollError) -> None:
        if error.cause == UNREACHABLE:
            self._queries.reset()
        self._pending.append(partial(self.state.failed, time.monotonic(), error.without_frames()))

    def _queue_update(self, update: VersionUpdate) -> None:
        self._pending.append(partial(self._apply_update, update))
        if len(self._pending) >= UPDATES_PER_WAKE:
            self._wake()

    def _apply_update(self, update: VersionUpdate) -> None:
        identity = update.info.id
        if update.item is not None and time.monotonic() >= self._rejected_until.get(identity, 0.0):
            self._rejected_until.pop(identity, None)
            try:
                self._feed.apply(update.info, update.item)
            except WireError as error:
                self._rejected_until[identity] = time.monotonic() + REJECTED_FOR
                self._feed.intake.reject(error.reason)
                self._lines.warning(
                    "export", "%s: %s is not exposed: %s", self._name, identity, error
                )
        if update.detach:
            self._rejected_until.pop(identity, None)
            self._feed.unbind(identity)
