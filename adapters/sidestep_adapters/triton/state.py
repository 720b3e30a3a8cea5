"""State of a polled server (up, slow or down), reported to its feed, its metrics and the log."""

from __future__ import annotations

import math

from sidestep.errors import PollError, WireError
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.scrape.poll_state import STATES, PollState
from sidestep_adapters.triton.api import advice

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
        self._timeout = max(interval, MIN_TIMEOUT)
        self._state = PollState(self._timeout, math.inf)
        self._feed = feed
        self._server = server
        self._name = name
        self._lines = lines
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

    def poll_started(self, now: float) -> None:
        """Note that a poll begins."""
        self._poll_started_at = now
        self._state.started(now)

    def statistics_received(self, now: float) -> None:
        """Note that statistics were received."""
        self._statistics_at = now
        self._is_up, self._is_stale = True, False
        self._feed.mark_answered(now)

    def succeeded(self, now: float, seconds: float, versions: int) -> None:
        """Note a complete poll, with its number of versions and its duration in seconds."""
        self._poll_started_at = math.inf
        self._state.answered()
        if not self._has_answered:
            self._has_answered = True
            self._lines.info(
                "answers", "%s: polls succeed; model versions: %d", self._name, versions
            )
        elif self._cause:
            self._lines.info("recovered", "%s: polls succeed again", self._name)
        self._cause = ""
        duration = Family(
            "sidestep_triton_poll_duration_seconds",
            "histogram",
            samples=[Sample(observations=[seconds])],
        )
        number = Family(
            "sidestep_triton_model_versions", "gauge", samples=[Sample(value=float(versions))]
        )
        self._export_state(now, "ok", duration, number)

    def failed(self, now: float, error: PollError) -> None:
        """Note a poll without statistics, or with a part of them."""
        self._poll_started_at = math.inf
        is_gone = error.cause == UNREACHABLE
        self._state.failed(UNREACHABLE if is_gone else "slow", now)
        self._log_failure(error.cause, str(error))
        self._export_state(now, error.cause)
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
            self._export_state(now, "")
        if self._is_up is None:
            self._export_state(now, "")
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
            self._export_state(now, "")

    def _log_failure(self, cause: str, detail: str) -> None:
        self._cause = cause
        self._lines.warning(cause, "%s: %s; %s", self._name, detail, advice(cause))

    def _export_state(self, now: float, outcome: str, *families: Family) -> None:
        """Export the state, and the outcome of a poll that has ended."""
        states = [Sample([state], float(state == self._state.state)) for state in STATES]
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
                *families,
            ],
        )
        try:
            self._feed.apply(self._server, item)
        except WireError as error:
            self._feed.intake.reject(error.reason)
            self._lines.warning(
                "export", "%s: the server's state is not exposed: %s", self._name, error
            )
