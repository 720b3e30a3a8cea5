"""State of a polled target: up, stale or down, by when it was polled and what it answered.

A slow server is not down: some answer no request while they load a model, and their last response
stays valid for a while.
"""

from __future__ import annotations

from typing import Literal

State = Literal["up", "stale", "down"]
STATES: tuple[State, ...] = ("up", "stale", "down")
GRACE = 30.0
PATIENT = frozenset({"slow", "unreadable"})
"""Causes of ``PollError`` that do not show that the server is down."""


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
