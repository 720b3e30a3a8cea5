"""The source that polls one server of ``--engine`` while the exporter runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from sidestep.errors import PollError, WireError
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.messages import EngineInfo
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.polling.api import EngineApi, Poll, Update
from sidestep_adapters.polling.poll_task import PollTask
from sidestep_adapters.polling.server_state import OUTCOMES, UNREACHABLE, ServerState

log = logging.getLogger("sidestep.engine")

PREFIX = "sidestep_engine_poll"
"""Prefix of the metrics about polls."""
ADVICE: Mapping[str, str] = {
    UNREACHABLE: "check that the server runs and listens there",
    "slow": "no counts are lost meanwhile",
    "unreadable": "every poll reads the file again",
    "http_401": "set the server's key: header.Authorization=Bearer @/FILE",
    "http_403": "set the server's key: header.Authorization=Bearer @/FILE",
}
DEFAULT_ADVICE = "check the URL and the kind of the server"


class EnginePoller:
    """Polls one server; implements ``sidestep.ingest.source.Source``.

    The updates of a poll wait for their turn, and the next poll waits until all are applied.

    Args:
        name: The server's name in labels and log lines.
        interval: Seconds from one poll to the next.
        api: The server; closed with the source.
        feed: The ingest side of the server.
        metrics: The exporter's own metrics.
        advice: What to do about a failed poll, by its cause, besides ``ADVICE``.
    """

    def __init__(
        self,
        name: str,
        interval: float,
        api: EngineApi,
        feed: ServerFeed,
        *,
        metrics: SelfMetrics,
        advice: Mapping[str, str],
    ) -> None:
        self.name = name
        self._interval = interval
        self._api = api
        self._feed = feed
        self._metrics = metrics
        self._lines = RateLimitedLog(log)
        known = {**ADVICE, **advice}
        self.state = ServerState(
            feed,
            name,
            interval,
            self._lines,
            advice=lambda cause: known.get(cause, DEFAULT_ADVICE),
            export=self._count,
        )
        self._pending: deque[Callable[[], None]] = deque()
        self._is_applied = asyncio.Event()
        self._bound: dict[str, EngineInfo] = {}
        """Engines by identity, as the feed knows them."""
        self._task = PollTask()
        self._wake: Callable[[], None] = lambda: None
        for outcome in OUTCOMES:
            metrics.add(f"{PREFIX}s_total", 0, name, outcome)

    def open(self, wake: Callable[[], None]) -> None:
        """Start polling; the server may start later."""
        self._wake = wake
        self._is_applied = asyncio.Event()
        self._task.start(self._run())

    def receive(self, now: float) -> bool:  # noqa: ARG002 - updates carry their own time
        """Apply one update; return whether there may be more."""
        if self._pending:
            self._pending.popleft()()
        if not self._pending:
            self._is_applied.set()
        return bool(self._pending)

    def tick(self, now: float) -> None:
        """Detect a slow server."""
        self.state.expire(now)

    def cut(self) -> None:
        """Discard the waiting updates."""
        self._pending.clear()
        self._is_applied.set()

    def close(self) -> None:
        """Stop polling."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""
        await self._task.wait()

    async def _run(self) -> None:
        try:
            while True:
                started = time.monotonic()
                self.state.poll_started(started)
                try:
                    poll = await self._api.poll()
                except PollError as error:
                    poll = Poll((), error.without_frames())
                self._queue(poll, started)
                self._is_applied.clear()
                self._wake()
                await self._is_applied.wait()
                # Polls that are missed because one took longer than an interval are skipped.
                await asyncio.sleep(max(started + self._interval - time.monotonic(), 0.0))
        finally:
            await self._api.close()

    def _queue(self, poll: Poll, started: float) -> None:
        now = time.monotonic()
        if poll.updates or poll.failure is None:
            self._pending.append(partial(self.state.statistics_received, now))
        self._pending.extend(partial(self._apply, update, now) for update in poll.updates)
        if poll.failure is not None:
            self._pending.append(partial(self.state.failed, now, poll.failure))
        else:
            self._metrics.set(f"{PREFIX}_duration_seconds", now - started, self.name)
            self._pending.append(partial(self.state.succeeded, now, _listed(poll)))

    def _apply(self, update: Update, now: float) -> None:
        info = update.info
        if self._bound.get(info.id, info) != info:
            # A bound engine keeps its description.
            self._feed.unbind(info.id)
        self._bound[info.id] = info
        try:
            for item in update.items:
                self._feed.apply(info, item)
        except WireError as error:
            self._feed.intake.reject(error.reason)
            self._lines.warning("export", "%s: %s is not exposed: %s", self.name, info.id, error)
        if update.detach:
            self._bound.pop(info.id)
            self._feed.unbind(info.id)
        elif update.progress is not None:
            self._feed.report(info.id, update.progress, now)

    def _count(self, _: float, outcome: str) -> None:
        if outcome:
            self._metrics.add(f"{PREFIX}s_total", 1, self.name, outcome)


def _listed(poll: Poll) -> str:
    models = [update.info.labels.get("model_name", "") for update in poll.updates]
    return f"models: {', '.join(models) or 'none'}"
