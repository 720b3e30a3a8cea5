"""Limits on the resources of HTTP clients, and a token bucket."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from sidestep.http.web_config import RateLimit


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the HTTP server.

    Attributes:
        connections: Open connections.
        request_seconds: Time for a handshake and a whole request head, from its first byte.
        response_seconds: Time from a request's head to the last byte of the response.
        idle_seconds: Time a connection stays open between requests; more than Prometheus' 5
            minutes, so that Prometheus is the one that closes.
        body_bytes: Bytes a client may send between two requests; bodies are ignored.
        concurrent_renders: Pages rendered at the same time.
        unsent_bytes: Bytes of pages that clients have not read yet, in total.
        waiting_passwords: Passwords that may wait for verification.
        check_interval: Seconds between two checks of deadlines and configuration files.
    """

    connections: int = 512
    request_seconds: float = 10.0
    response_seconds: float = 60.0
    idle_seconds: float = 330.0
    body_bytes: int = 256 * 1024
    concurrent_renders: int = 4
    unsent_bytes: int = 256 * 1024 * 1024
    waiting_passwords: int = 16
    check_interval: float = 1.0


class TokenBucket:
    """Admits ``burst`` requests at once, and one more every ``interval`` seconds."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._tokens = float(limit.burst)
        self._at = clock()

    def take(self) -> bool:
        """Return whether a token was left, and use it."""
        now = self._clock()
        grown = (now - self._at) / self._limit.interval
        self._tokens = min(self._tokens + grown, self._limit.burst)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
