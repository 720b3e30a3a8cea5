"""A sender's link to its exporter: it reconnects after a pause whenever a connection ends."""

from __future__ import annotations

import contextlib
from random import Random
from typing import TYPE_CHECKING

from sidestep.errors import ConfigError
from sidestep.transport.keys import keys_for
from sidestep.transport.plain_connection import PlainConnection

if TYPE_CHECKING:
    from sidestep.transport.curve_connection import CurveConnection

PAUSE = (0.05, 1.0)
"""Seconds until the next attempt to connect, at first and at most."""
PENALTY = (1.0, 60.0)
"""The same after the exporter broke the protocol or sent too much."""
LASTING = 5.0
"""Seconds that a connection must last until the backoff is reset."""
FORGIVEN = 60.0
"""Seconds that a connection must last until earlier penalties are forgotten."""


class Link:
    """Link to ``endpoint``. A sender sends a new Hello on each connection.

    Args:
        endpoint: ``ipc://`` or ``tcp://``; with keys in the environment, over CURVE.
        random: Varies the pauses, so that many senders do not connect at once.
    """

    def __init__(self, endpoint: str, random: Random) -> None:
        self.opened_at = 0.0
        self._problem = ""
        self._endpoint = endpoint
        self._random = random
        self._connection: PlainConnection | CurveConnection | None = None
        self._attempts = 0
        self._pause = PAUSE[0]
        self._penalty = PENALTY[0]
        self._next_at = float("-inf")
        # In the caller's thread: a child that is forked while another one imports a module has half of it,
        # for ever. Unusable keys are read again with each connection.
        with contextlib.suppress(ConfigError):
            if keys_for(endpoint) is not None:
                _curve_connection()

    @property
    def problem(self) -> str:
        """Reason why there is no connection; empty if none is known."""
        ongoing = "" if self._connection is None else self._connection.problem
        return ongoing or self._problem

    @property
    def ready(self) -> bool:
        """True if messages can be sent."""
        return self._connection is not None and self._connection.ready

    def advance(self, now: float) -> bool:
        """Connect when it is time; return whether a connection has ended since the last call.

        Raises:
            ConfigError: The endpoint or the keys cannot be used.
            RunError: This process has no descriptors left.
        """
        connection = self._connection
        if connection is None:
            if now >= self._next_at:
                self._open(now)
            return False
        connection.advance(now)
        if connection.ended:
            self.drop(now)
            return True
        if connection.ready:
            self._problem = ""
        return False

    def send(self, frame: bytes) -> bool:
        """Send ``frame`` if the connection takes it now; return whether it did."""
        return self._connection is not None and self._connection.send(frame)

    def receive(self, now: float) -> bytes | None:
        """Return the next message, if there is one."""
        return None if self._connection is None else self._connection.receive(now)

    def wait(self, seconds: float) -> None:
        """Wait until the connection can go on, for at most ``seconds``; not at all if negative."""
        if self._connection is not None:
            self._connection.wait(seconds)

    def drop(self, now: float) -> None:
        """End the connection. The pause before the next one grows until a connection lasts."""
        connection = self._connection
        if connection is None:
            return
        self._problem = connection.problem
        misbehaved = connection.misbehaved
        self.close()
        if now - self.opened_at > LASTING:
            self._pause = PAUSE[0]
        if now - self.opened_at > FORGIVEN:
            self._penalty = PENALTY[0]
        if misbehaved:
            pause, self._penalty = self._penalty, min(2 * self._penalty, PENALTY[1])
        else:
            pause, self._pause = self._pause, min(2 * self._pause, PAUSE[1])
        self._next_at = now + pause * self._random.uniform(0.75, 1.25)

    def close(self, seconds: float = 0.0) -> None:
        """End the connection; unsent frames may take ``seconds`` to leave."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(seconds)

    def _open(self, now: float) -> None:
        # Set first: the next lines raise if keys cannot be used or no descriptor is left.
        self._next_at = now + PAUSE[1]
        self.opened_at = now
        keys = keys_for(self._endpoint)
        if keys is None:
            self._connection = PlainConnection(self._endpoint, now, self._attempts)
        else:
            self._connection = _curve_connection()(self._endpoint, keys, now)
        self._attempts += 1


def _curve_connection() -> type[CurveConnection]:
    # pyzmq's monitor imports asyncio, which an engine's process must not load without keys.
    from sidestep.transport.curve_connection import CurveConnection  # noqa: PLC0415

    return CurveConnection
