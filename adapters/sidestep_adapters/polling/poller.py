"""Polling of one server while the exporter runs, and the sources of ``--engine``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points

from sidestep.config.engine_targets import EngineTarget
from sidestep.config.settings import Config
from sidestep.errors import ConfigError, PollError, WireError
from sidestep.ingest.intake import Intake
from sidestep.ingest.local_stream import ServerFeed
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.polling.api import EngineApi, Kind, Poll, Update
from sidestep_adapters.polling.state import OUTCOMES, STATES, UNREACHABLE, ServerState

log = logging.getLogger("sidestep.engine")

GROUP = "sidestep.server_kinds"
"""Entry point group of kinds of servers, each an ``api.Kind``."""

PREFIX = "sidestep_engine_poll"
"""Prefix of the metrics about polls."""
ADVICE: Mapping[str, str] = {
    UNREACHABLE: "check that the server runs and listens there",
    "slow": "no counts are lost meanwhile",
    "unreadable": "every poll reads the file again",
    "http_401": "set the server's key: header.Authorization=Bearer @/FILE",
    "http_403": "set the server's key: header.Authorization=Bearer @/FILE",
    "": "check the URL and the kind of the server",
}
UPDATES_PER_WAKE = 32
"""Number of updates after which some are applied: waking the source costs as much as an update."""
SLICE = 0.0005
"""Maximum seconds of one turn: running all other sources after each update costs more than it."""


class Poller:
    """Polls one server at an interval; implements ``sidestep.ingest.plugins.Source``.

    A subclass polls the server in ``poll``. The updates of a poll wait for their turn and are applied
    in parts; the next poll waits until all are applied.

    Args:
        interval: Seconds from one poll to the next; polls that are missed because one took longer are
            skipped.
        disconnect: Closes the connection to the server; the next poll connects again.
    """

    def __init__(self, interval: float, disconnect: Callable[[], Awaitable[None]]) -> None:
        self._interval = interval
        self._disconnect = disconnect
        self._pending: deque[Callable[[], None]] = deque()
        self._is_applied = asyncio.Event()
        """Set when all updates of the last poll are applied."""
        self._task: asyncio.Task[None] | None = None
        self._wake: Callable[[], None] = lambda: None

    async def poll(self) -> float:
        """Poll the server once; return the seconds until the next poll.

        Failures are reported, not raised.
        """
        raise NotImplementedError

    def queue(self, apply: Callable[[], None]) -> None:
        """Call ``apply`` when it is the source's turn."""
        self._pending.append(apply)
        if len(self._pending) >= UPDATES_PER_WAKE:
            self._wake()

    def open(self, wake: Callable[[], None]) -> None:
        """Start polling; the server may start later."""
        self._wake = wake
        self._task = asyncio.create_task(self._run(self._task))
        # An exception is a bug: raising it here ends the process.
        self._task.add_done_callback(lambda task: None if task.cancelled() else task.result())

    def receive(self, now: float) -> bool:  # noqa: ARG002 - updates carry their own time
        """Apply some updates; return whether there may be more."""
        if not self._pending:
            self._is_applied.set()
            return False
        until = time.perf_counter() + SLICE
        while self._pending and time.perf_counter() < until:
            self._pending.popleft()()
        return True

    def tick(self, now: float) -> None:
        """Detect a slow server."""
        raise NotImplementedError

    def cut(self) -> None:
        """Discard the waiting updates, and start again."""
        self.close()
        self._pending.clear()
        self.open(self._wake)

    def close(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def _run(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        # A cancelled task keeps its frames, with what it had read of a body and with the task before it.
        del before
        try:
            while True:
                started = time.monotonic()
                pause = await self.poll()
                if self._pending:
                    self._is_applied.clear()
                    self._wake()
                    await self._is_applied.wait()
                await asyncio.sleep(max(started + pause - time.monotonic(), 0.0))
        finally:
            await self._disconnect()


class EnginePoller(Poller):
    """Polls one server of ``--engine``.

    Args:
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
        super().__init__(interval, api.close)
        self.name = name
        self._api = api
        self._feed = feed
        self._metrics = metrics
        self._lines = RateLimitedLog(log)
        self.state = ServerState(
            feed, name, interval, self._lines, advice={**ADVICE, **advice}, export=self._count
        )
        for outcome in OUTCOMES:
            metrics.add(f"{PREFIX}s_total", 0, name, outcome)

    def tick(self, now: float) -> None:
        """Detect a slow server."""
        self.state.expire(now)

    async def poll(self) -> float:
        """Poll the server once, and queue the updates."""
        started = time.monotonic()
        self.state.started(started)
        try:
            found = await self._api.poll()
        except PollError as error:
            found = Poll((), error.without_frames())
        now = time.monotonic()
        if found.updates or found.failure is None:
            self.queue(partial(self.state.statistics_received, now))
        for update in found.updates:
            self.queue(partial(self._apply, update, now))
        if found.failure is not None:
            self.queue(partial(self.state.poll_failed, now, found.failure))
        else:
            self._metrics.set(f"{PREFIX}_duration_seconds", now - started, self.name)
            models = [update.info.labels.get("model_name", "") for update in found.updates]
            text = f"models: {', '.join(models) or 'none'}"
            self.queue(partial(self.state.succeeded, now, text))
        return self._interval

    def _apply(self, update: Update, now: float) -> None:
        info = update.info
        if self._feed.engines.get(info.id, info) != info:
            # A bound engine keeps its description.
            self._feed.unbind(info.id)
        try:
            for item in update.items:
                self._feed.apply(info, item)
        except WireError as error:
            self._feed.intake.reject(error.reason)
            self._lines.warning("export", "%s: %s is not exposed: %s", self.name, info.id, error)
        if update.detach:
            self._feed.unbind(info.id)
        elif update.progress is not None:
            self._feed.report(info.id, update.progress, now)

    def _count(self, _: float, outcome: str) -> None:
        if outcome:
            self._metrics.add(f"{PREFIX}s_total", 1, self.name, outcome)


def sources(config: Config, intake: Intake, _: object) -> Sequence[EnginePoller]:
    """Return one poller for each ``--engine``."""
    pollers = [_source(server, intake) for server in config.engine]
    intake.metrics.read(
        "sidestep_engine_poll_state",
        lambda: [
            ((each.name, state), float(each.state.state == state))
            for each in pollers
            for state in STATES
        ],
    )
    return pollers


def _source(server: EngineTarget, intake: Intake) -> EnginePoller:
    name = f"{server.kind}={server.target.name}"
    kinds = {point.name: point for point in entry_points(group=GROUP)}
    if server.kind not in kinds:
        known = " and ".join(sorted(kinds))
        raise ConfigError(f"--engine: {server.kind!r} is no kind of server; known are {known}")
    kind: Kind = kinds[server.kind].load()
    try:
        api = kind.api(server)
        intake.registry.check(api.check())
    except (ConfigError, ValueError, WireError) as error:
        raise ConfigError(f"--engine {name}: {error}") from None
    feed = ServerFeed(intake, f"engine {name}")
    return EnginePoller(
        name, server.target.interval, api, feed, metrics=intake.metrics, advice=kind.advice
    )
