"""When somebody who asks at regular intervals will ask again, as Prometheus does."""

from __future__ import annotations

from collections import deque

SHORTEST = 0.2
"""Seconds; who asks more often is a router, and content with a page that is kept."""
LONGEST = 300.0
"""Seconds between two scrapes: Prometheus gives up a series after that."""
EVEN = 0.1
"""Two intervals may differ by so much of the longer one."""
MANY = 3
"""Who ask by turns at most, each at the same intervals: Prometheus often runs twice."""


class Expected:
    """The next request, from the last ones: two intervals of about the same length promise a third.

    Of the first interval nobody can say that it is chance: it is believed.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=2 * MANY + 1)

    def asked(self, now: float) -> None:
        """Somebody asks, at ``now`` in seconds."""
        self._times.append(now)

    @property
    def at(self) -> float | None:
        """When the next one is due; None where nobody can know."""
        times = self._times
        match [*times]:
            case [first, second]:
                return _due(second, second - first)
        for many in range(1, (len(times) - 1) // 2 + 1):
            before, interval = times[-1 - many] - times[-1 - 2 * many], times[-1] - times[-1 - many]
            if abs(before - interval) <= EVEN * max(before, interval):
                return _due(times[-many], interval)
        return None


def _due(last: float, interval: float) -> float | None:
    return last + interval if SHORTEST <= interval <= LONGEST else None
