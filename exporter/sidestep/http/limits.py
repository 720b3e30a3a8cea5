"""What a client may cost, and a bucket of tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from sidestep.http.web_config import RateLimit


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the HTTP side.

    Attributes:
        connections: Open at once.
        asking: Seconds for a handshake and a whole request head, from the first of it.
        answering: Seconds from a request's head to the last byte of its answer.
        idle: Seconds a connection is kept between requests; more than the 5 minutes of
            Prometheus, which so is the one that closes.
        body: Bytes a client may send from one request to the next; nobody reads more.
        making: Pages made at once.
        waiting: Requests that may wait for that.
        unsent: Bytes of pages that clients have not taken yet, all together.
        passwords: Passwords that may wait to be verified.
        tick: Seconds between two looks at who is late, and at the files.
    """

    connections: int = 512
    request_seconds: float = 10.0
    response_seconds: float = 60.0
    idle_seconds: float = 330.0
    body_bytes: int = 256 * 1024
    concurrent_renders: int = 4
    waiting_requests: int = 64
    unsent_bytes: int = 256 * 1024 * 1024
    waiting_passwords: int = 16
    check_interval: float = 1.0


class TokenBucket:
    """Lets through ``burst`` requests at once, and one more every ``interval`` seconds."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._tokens = float(limit.burst)
        self._at = clock()

    def take(self) -> bool:
        """Whether there was a token left."""
        now = self._clock()
        grown = (now - self._at) / self._limit.interval
        self._tokens = min(self._tokens + grown, self._limit.burst)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
