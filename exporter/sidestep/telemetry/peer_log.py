"""Log lines on a connection: that it is there, that it is missing and why, that it is back."""

from __future__ import annotations

import logging
import math

from sidestep.protocol.limits import printable

PATIENCE = 10.0
"""Seconds without a connection after which a line says so."""
INTERVAL = 60.0
"""Least seconds between two lines of a kind."""


class PeerLog:
    """Logs the state of one connection, each kind of line at most once a minute.

    A line that comes too early is written later, if it still holds. An outage has one line, and
    another if its cause changes. One that is over within ``PATIENCE`` has none.

    Args:
        name: Beginning of each line, such as ``--subscribe``.
        peer: The other end and its endpoint, as a line names them.
    """

    def __init__(self, logger: logging.Logger, name: str, peer: str) -> None:
        self._logger = logger
        self._name = name
        self._peer = peer
        self._absent_since: float | None = None
        self._outage = 0.0
        """Seconds that the last outage took."""
        self._was_connected = False
        self._cause = ""
        """Cause that was logged, until the line that the connection is back."""
        self._logged_at: dict[str, float] = {}

    def connected(self, now: float) -> None:
        """Record at the monotonic time ``now`` that the connection is there."""
        if self._absent_since is not None:
            self._outage, self._absent_since = now - self._absent_since, None
        if self._cause:
            text = "%s: connected to %s, after %.0f s without a connection"
            if self._log(logging.INFO, now, text, self._name, self._peer, self._outage):
                self._cause, self._was_connected = "", True
        elif not self._was_connected:
            self._was_connected = True
            self._log(logging.INFO, now, "%s: connected to %s", self._name, self._peer)

    def absent(self, now: float, cause: str) -> None:
        """Record that there is no connection, and why; an empty ``cause``: no reason is known."""
        if self._absent_since is None:
            self._absent_since = now
        seconds, cause = now - self._absent_since, cause or "no answer"
        if seconds < PATIENCE or cause == self._cause:
            return
        text = "%s: no connection to %s for %.0f s: %s"
        if self._log(logging.WARNING, now, text, self._name, self._peer, seconds, printable(cause)):
            self._cause = cause

    def _log(self, level: int, now: float, text: str, *arguments: object) -> bool:
        """Log a line, unless one of its kind was logged within the interval; return whether it was."""
        if now - self._logged_at.get(text, -math.inf) < INTERVAL:
            return False
        self._logged_at[text] = now
        self._logger.log(level, text, *arguments)
        return True
