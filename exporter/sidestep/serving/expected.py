"""When those who ask at regular intervals will ask again, as Prometheus does."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

SHORTEST = 0.2
"""Seconds; who asks more often is a router, and content with a page that is kept."""
LONGEST = 300.0
"""Seconds between two scrapes: Prometheus gives up a series after that."""
JITTER = 0.05
"""Seconds that somebody regular may come early or late."""
MANY = 3
"""Who are expected at most, each at intervals of its own: Prometheus often runs twice."""


class Due(NamedTuple):
    """Somebody will ask: when, in seconds, and how long that is after the last time."""

    at: float
    interval: float


class Expected:
    """The next requests, from the last ones: two intervals of the same length promise a third.

    Of the very first interval nobody can say that it is chance: it is believed.
    """

    def __init__(self) -> None:
        self._due: list[Due] = []
        self._others: deque[float] = deque(maxlen=4 * MANY)
        """When somebody asked who was not expected."""
        self._is_new = True

    def asked(self, now: float) -> Due | None:
        """Somebody asks, at ``now`` in seconds; when the same will ask again, if that is known."""
        self._due = [due for due in self._due if due.at >= now - JITTER]
        # One that lost some requests may be expected at twice its interval, too.
        came = min(
            (due for due in self._due if due.at <= now + JITTER), key=_interval, default=None
        )
        if came is not None:
            self._due.remove(came)
            # Both are a little off, in one way or the other.
            interval = (came.interval + now - (came.at - came.interval)) / 2
        else:
            interval = self._learnt(now)
            self._others.append(now)
        if not SHORTEST <= interval <= LONGEST + JITTER:
            return None
        if len(self._due) >= MANY:
            longest = max(self._due, key=_interval)
            if longest.interval <= interval + JITTER:
                return None
            self._due.remove(longest)
        due = Due(now + interval, interval)
        self._due.append(due)
        return due

    def _learnt(self, now: float) -> float:
        """The shortest interval at which somebody has come twice before; 0 where nobody has."""
        times = [*self._others]
        if self._is_new and times:
            self._is_new = False
            return now - times[0]
        for place in range(len(times) - 1, 0, -1):
            interval = now - times[place]
            if any(abs(times[place] - before - interval) <= JITTER for before in times[:place]):
                return interval
        return 0.0


def _interval(due: Due) -> float:
    return due.interval
