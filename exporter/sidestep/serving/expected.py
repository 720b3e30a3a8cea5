"""When somebody who asks at regular intervals will ask again, as Prometheus does."""

from __future__ import annotations

SHORTEST = 0.2
"""Seconds; who asks more often is a router, and content with a page that is kept."""
LONGEST = 300.0
"""Seconds between two scrapes: Prometheus gives up a series after that."""
EVEN = 0.1
"""Two intervals may differ by so much of the longer one."""


class Expected:
    """The next request, from the last ones: two intervals of about the same length promise a third."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._interval = 0.0
        self._is_regular = False

    def asked(self, now: float) -> None:
        """Somebody asks, at ``now`` in seconds."""
        if self._last is not None:
            before, self._interval = self._interval, now - self._last
            longer = max(before, self._interval)
            self._is_regular = abs(before - self._interval) <= EVEN * longer
        self._last = now

    @property
    def at(self) -> float | None:
        """When the next one is due; None where nobody can know."""
        if self._last is None or not self._is_regular:
            return None
        return self._last + self._interval if SHORTEST <= self._interval <= LONGEST else None
