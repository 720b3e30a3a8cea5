"""State of a polled server (up, stale or down), by when it was polled and what it answered.

A slow server is not down: some answer no request while they load a model, and their last response
stays valid for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from sidestep.errors import PollError
from sidestep.ingest.local_stream import ServerFeed
from sidestep.telemetry.logs import RateLimitedLog

State = Literal["up", "stale", "down"]
STATES: tuple[State, ...] = ("up", "stale", "down")
GRACE = 30.0
PATIENT = frozenset({"slow", "unreadable"})
"""Causes of ``PollError`` that do not show that the server is down."""
UNREACHABLE = "unreachable"
OUTCOMES = ("ok", "slow", UNREACHABLE)
"""Poll outcomes that are exposed from the start."""
CONNECT_LIMIT = 6.0
"""Seconds after which a running poll has at least connected to the server."""
MIN_TIMEOUT = 1.0
"""Minimum seconds without an answer after which the server is stale."""
STALE_AFTER = 30.0
"""Seconds without statistics after which gauges are stale."""


class PollState:
    """State of one target, which is polled one request at a time.

    Args:
        interval: Seconds without a response after which the target is stale.
        grace: Seconds without a response after which it is down, ``GRACE`` by default; may be infinite.

    Attributes:
        state: ``up``: the target answers. ``stale``: its response is overdue; the last one is
            exposed. ``down``: nothing is exposed; also before the first response.
    """

    def __init__(self, interval: float, grace: float | None = None) -> None:
        self._interval = interval
        self._grace = GRACE if grace is None else grace
        self._since: float | None = None
        """Time of the first request that has no response."""
        self.state: State = "down"

    @property
    def is_shown(self) -> bool:
        """True if the last response is exposed."""
        return self.state != "down"

    def started(self, now: float) -> State:
        """Record that a request was sent."""
        if self._since is None:
            self._since = now
        return self.tick(now)

    def answered(self) -> State:
        """Record a valid response."""
        self._since = None
        self.state = "up"
        return self.state

    def failed(self, cause: str, now: float) -> State:
        """Record a failed request, with the cause of its ``PollError``."""
        if cause in PATIENT:
            return self.tick(now)
        self._since = None
        self.state = "down"
        return self.state

    def tick(self, now: float) -> State:
        """Return the state at ``now``."""
        if self.state != "down" and self._since is not None:
            awaited = now - self._since
            if awaited >= self._grace:
                self.state = "down"
            elif awaited > self._interval:
                self.state = "stale"
        return self.state


class ServerState(PollState):
    """State of a server that feeds engines, reported to its feed, its metrics and the log.

    A server that can be reached stays up however long it takes to answer, and only its gauges become
    stale.

    Args:
        advice: What to do about a failed poll, by its cause; empty: any other.
        export: Exports the state at a time, and the outcome of a poll that has ended; empty: none
            has.
    """

    def __init__(
        self,
        feed: ServerFeed,
        name: str,
        interval: float,
        lines: RateLimitedLog,
        *,
        advice: Mapping[str, str],
        export: Callable[[float, str], None],
    ) -> None:
        super().__init__(max(interval, MIN_TIMEOUT), math.inf)
        self._feed = feed
        self._name = name
        self._lines = lines
        self._advice = advice
        self._export = export
        self._cause = ""
        """Why the last poll failed; empty after a success."""
        self._has_answered = False
        self._is_up: bool | None = None
        """State last reported to the feed; initially none."""
        self._is_stale = False
        self._statistics_at = -math.inf
        """When statistics were last received."""
        self._poll_started_at = math.inf
        """When the running poll began."""

    def started(self, now: float) -> State:
        """Record that a poll began."""
        self._poll_started_at = now
        return super().started(now)

    def statistics_received(self, now: float) -> None:
        """Record that statistics were received."""
        self._statistics_at = now
        self._is_up, self._is_stale = True, False
        self._feed.mark_answered(now)

    def succeeded(self, now: float, found: str) -> None:
        """Record a complete poll, and what it found, for the log."""
        self._poll_started_at = math.inf
        self.answered()
        if not self._has_answered:
            self._has_answered = True
            self._lines.info("answers", "%s: polls succeed; %s", self._name, found)
        elif self._cause:
            self._lines.info("recovered", "%s: polls succeed again", self._name)
        self._cause = ""
        self._export(now, "ok")

    def poll_failed(self, now: float, error: PollError) -> None:
        """Record a poll without statistics, or with a part of them."""
        self._poll_started_at = math.inf
        is_gone = error.cause == UNREACHABLE
        self.failed(UNREACHABLE if is_gone else "slow", now)
        self._log_failure(error.cause, str(error))
        self._export(now, error.cause)
        if is_gone or not self._is_up:
            self._report_down(now)
        else:
            self._report_up(now)

    def expire(self, now: float) -> None:
        """Detect a poll that takes long."""
        waited = now - self._poll_started_at
        if self._is_up and waited >= CONNECT_LIMIT:
            self._report_up(now)
        before = self.state
        if self.tick(now) != before:
            self._export(now, "")
        if self._is_up is None:
            self._export(now, "")
            self._report_down(now)
        is_slow = waited >= (self._interval if self._is_up else CONNECT_LIMIT)
        if is_slow and self._cause != "slow":
            self._log_failure("slow", f"slow: no answer for {waited:.1f} s so far")

    def _report_down(self, now: float) -> None:
        if self._is_up is not False:
            self._is_up = False
            self._feed.detach(now)

    def _report_up(self, now: float) -> None:
        """Report the server as up, and its gauges as stale after ``STALE_AFTER``."""
        self._feed.mark_seen(now)
        if now - self._statistics_at >= STALE_AFTER and not self._is_stale:
            self._is_stale = True
            self._feed.mark_stale()
            # The server's own gauges stay valid.
            self._export(now, "")

    def _log_failure(self, cause: str, detail: str) -> None:
        self._cause = cause
        advice = self._advice.get(cause, self._advice[""])
        self._lines.warning(cause, "%s: %s; %s", self._name, detail, advice)
