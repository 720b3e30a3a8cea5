"""State of a polled server (up, slow or down), reported to its feed, its metrics and the log."""

from __future__ import annotations

import math
from collections.abc import Callable

from sidestep.errors import PollError
from sidestep.ingest.local_stream import ServerFeed
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.polling.poll_state import PollState, State

UNREACHABLE = "unreachable"
OUTCOMES = ("ok", "slow", UNREACHABLE)
"""Poll outcomes that are exposed from the start."""
CONNECT_LIMIT = 6.0
"""Seconds after which a running poll has at least connected to the server."""
MIN_TIMEOUT = 1.0
"""Minimum seconds without an answer after which the server is stale."""
STALE_AFTER = 30.0
"""Seconds without statistics after which gauges are stale."""


class ServerState:
    """State of one server.

    A slow server is not down: a model that is loaded over HTTP blocks Triton's HTTP port meanwhile.
    So every server that can be reached stays up, and only its gauges become stale.

    Args:
        feed: The ingest side of the server.
        name: The server's name in the log.
        interval: Seconds between polls.
        lines: Rate-limited log.
        advice: Returns what to do about a failed poll, by its cause.
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
        advice: Callable[[str], str],
        export: Callable[[float, str], None],
    ) -> None:
        self._timeout = max(interval, MIN_TIMEOUT)
        self._state = PollState(self._timeout, math.inf)
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

    @property
    def state(self) -> State:
        """Up, stale or down."""
        return self._state.state

    def poll_started(self, now: float) -> None:
        """Note that a poll begins."""
        self._poll_started_at = now
        self._state.started(now)

    def statistics_received(self, now: float) -> None:
        """Note that statistics were received."""
        self._statistics_at = now
        self._is_up, self._is_stale = True, False
        self._feed.mark_answered(now)

    def succeeded(self, now: float, found: str) -> None:
        """Note a complete poll, and what it found, for the log."""
        self._poll_started_at = math.inf
        self._state.answered()
        if not self._has_answered:
            self._has_answered = True
            self._lines.info("answers", "%s: polls succeed; %s", self._name, found)
        elif self._cause:
            self._lines.info("recovered", "%s: polls succeed again", self._name)
        self._cause = ""
        self._export(now, "ok")

    def failed(self, now: float, error: PollError) -> None:
        """Note a poll without statistics, or with a part of them."""
        self._poll_started_at = math.inf
        is_gone = error.cause == UNREACHABLE
        self._state.failed(UNREACHABLE if is_gone else "slow", now)
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
        before = self._state.state
        if self._state.tick(now) != before:
            self._export(now, "")
        if self._is_up is None:
            self._export(now, "")
            self._report_down(now)
        is_slow = waited >= (self._timeout if self._is_up else CONNECT_LIMIT)
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
        self._lines.warning(cause, "%s: %s; %s", self._name, detail, self._advice(cause))
