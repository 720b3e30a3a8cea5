"""What polls say of a server: there, slow, or gone; to its feed, its metrics and the log."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from sidestep.config.poll_state import STATES, PollState
from sidestep.engines.items import Item
from sidestep.errors import PollError
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.triton.server import advice

UNREACHABLE = "unreachable"
OUTCOMES = ("ok", "slow", UNREACHABLE)
"""Those that are shown from the begin."""
CONNECTING = 6.0
"""Seconds after which a poll that has not ended has at least reached the server."""
PATIENCE = 1.0
"""Seconds that an answer may take at least before the server is stale."""
DOUBT = 30.0
"""Seconds without statistics after which gauges may be wrong."""


class State:
    """Of one server.

    A slow server is not a dead one: a model that is loaded over HTTP blocks Triton's HTTP port
    for as long as that takes. So all but what cannot be reached stays up, and is only doubted.

    Args:
        interval: Seconds between polls.
        tell: Takes items of the server itself.
    """

    def __init__(
        self,
        feed: ServerFeed,
        name: str,
        interval: float,
        tell: Callable[[Item], None],
        log: logging.Logger,
    ) -> None:
        self._patience = max(interval, PATIENCE)
        self._state = PollState(self._patience, math.inf)
        self._feed = feed
        self._name = name
        self._tell = tell
        self._lines = RateLimitedLog(log)
        self._cause = ""
        """Why the last poll failed."""
        self._is_heard = self._is_lost = False
        """What the feed was told last; nothing yet."""
        self._is_doubted = False
        self._good = -math.inf
        """When statistics were last there."""
        self._asking = math.inf
        """When the poll under way began."""

    def asking(self, now: float) -> None:
        """A poll begins."""
        self._asking = now
        self._state.started(now)

    def heard(self, now: float) -> None:
        """Statistics are there."""
        self._good = now
        self._is_heard, self._is_lost, self._is_doubted = True, False, False
        self._feed.heard(now)

    def succeeded(self, now: float, seconds: float, versions: int) -> None:
        """All statistics are there, of so many versions, after so many seconds."""
        self._asking = math.inf
        self._state.answered()
        if self._cause:
            self._lines.info("again", "%s: polled again", self._name)
        self._cause = ""
        duration = Family(
            "sidestep_triton_poll_duration_seconds",
            "histogram",
            samples=[Sample(observations=[seconds])],
        )
        number = Family(
            "sidestep_triton_model_versions", "gauge", samples=[Sample(value=float(versions))]
        )
        self._say(now, "ok", duration, number)

    def failed(self, now: float, error: PollError) -> None:
        """The poll came to nothing, or not to all."""
        self._asking = math.inf
        is_gone = error.cause == UNREACHABLE
        self._state.failed(UNREACHABLE if is_gone else "slow", now)
        self._note(error.cause, str(error))
        self._say(now, error.cause)
        if (is_gone or not self._is_heard) and not self._is_lost:
            self._lose(now)
        self._stay(now)

    def pass_time(self, now: float) -> None:
        """Notice a poll that takes long."""
        waited = now - self._asking
        if waited >= CONNECTING:
            self._stay(now)
        before = self._state.state
        if self._state.tick(now) != before:
            self._say(now, "")
        if not self._is_heard and not self._is_lost:
            self._say(now, "")
            self._lose(now)
        is_slow = waited >= (self._patience if self._is_heard else CONNECTING)
        if is_slow and self._cause != "slow":
            self._note("slow", f"slow: no answer for {waited:.1f} s so far")

    def _lose(self, now: float) -> None:
        self._is_heard, self._is_lost = False, True
        self._feed.lost(now)

    def _stay(self, now: float) -> None:
        """The server is there, but what it had may not be true any more."""
        if self._is_heard:
            self._feed.heard(now)
            if now - self._good >= DOUBT and not self._is_doubted:
                self._is_doubted = True
                self._feed.doubt()
                # Which does not mean what is known of the server itself.
                self._say(now, "")

    def _note(self, cause: str, detail: str) -> None:
        self._cause = cause
        self._lines.warning(cause, "%s: %s; %s", self._name, detail, advice(cause))

    def _say(self, now: float, outcome: str, *families: Family) -> None:
        """The state, and what came of a poll, if one has ended."""
        states = [Sample([state], float(state == self._state.state)) for state in STATES]
        counted = dict.fromkeys(OUTCOMES, 0.0)
        if outcome:
            counted[outcome] = 1.0
        polls = [Sample([name], count) for name, count in counted.items()]
        self._tell(
            Samples(
                0,
                now,
                [
                    Family("sidestep_triton_state", "gauge", ["state"], states),
                    Family("sidestep_triton_polls_total", "counter", ["outcome"], polls),
                    *families,
                ],
            )
        )
