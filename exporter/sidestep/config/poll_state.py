"""Whether a polled target is there: what was asked and answered, and when, makes its state.

A server that is slow is not dead. One of them loads a model and answers nobody meanwhile; what it
said before stays true for a while.
"""

from __future__ import annotations

from typing import Literal

State = Literal["up", "stale", "down"]
STATES: tuple[State, ...] = ("up", "stale", "down")
GRACE = 30.0
PATIENT = frozenset({"slow", "unreadable"})
"""Causes that say nothing about the server."""


class PollState:
    """Of one target, asked one question at a time.

    Args:
        interval: Seconds after which an answer is awaited for too long.
        grace: Seconds without an answer after which what was said before is shown no more; by
            default ``GRACE``.

    Attributes:
        state: ``up``: it answers. ``stale``: an answer is awaited for too long; the last one is
            shown. ``down``: nothing is shown; so it is before the first answer.
    """

    def __init__(self, interval: float, grace: float | None = None) -> None:
        self._interval = interval
        self._grace = GRACE if grace is None else grace
        self._since: float | None = None
        """When the first question was asked that has no answer."""
        self.state: State = "down"

    @property
    def is_shown(self) -> bool:
        """Whether what was answered last is to be shown."""
        return self.state != "down"

    def started(self, now: float) -> State:
        """A question was asked."""
        if self._since is None:
            self._since = now
        return self.tick(now)

    def answered(self) -> State:
        """There is an answer, and it is one."""
        self._since = None
        self.state = "up"
        return self.state

    def failed(self, cause: str, now: float) -> State:
        """There is none, for one of ``PollError``'s causes."""
        if cause in PATIENT:
            return self.tick(now)
        self._since = None
        self.state = "down"
        return self.state

    def tick(self, now: float) -> State:
        """Time has passed."""
        if self.state != "down" and self._since is not None:
            awaited = now - self._since
            if awaited >= self._grace:
                self.state = "down"
            elif awaited > self._interval:
                self.state = "stale"
        return self.state
