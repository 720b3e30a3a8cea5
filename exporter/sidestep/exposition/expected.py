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
USUAL = (1.0, 5.0, 10.0, 15.0, 30.0, 60.0)
"""Seconds between two scrapes, as Prometheus is told mostly."""
FEW = 3
"""Requests of nobody known after which all of these are guessed: each is a page, maybe in vain."""
MANY = 3
"""Who are expected at most, each at intervals of its own: Prometheus often runs twice."""


class Due(NamedTuple):
    """Somebody will ask, so many seconds after when they asked last."""

    since: float
    interval: float

    @property
    def at(self) -> float:
        """When that is."""
        return self.since + self.interval


class Expected:
    """The next requests, from the last ones: two intervals of the same length promise a third.

    Of the very first interval nobody can say that it is chance: it is believed. Before that
    the usual ones are guessed.
    """

    def __init__(self) -> None:
        self._due: list[Due] = []
        self._guessed: list[Due] = []
        self._guesses = 0
        self._others: deque[float] = deque(maxlen=4 * MANY)
        """When somebody asked who was not known."""
        self._is_new = True

    def asked(self, now: float) -> list[Due]:
        """Somebody asks, at ``now`` in seconds; when the same will ask again, or is guessed to."""
        self._due = _coming(self._due, now)
        self._guessed = _coming(self._guessed, now)
        guesses: list[Due] = []
        # One that lost some requests may be expected at twice its interval, too.
        came = _present(self._due, now) or _present(self._guessed, now)
        if came is None:
            if self._guesses < FEW:
                self._guesses += 1
                guesses = [Due(now, usual) for usual in USUAL]
                self._guessed += guesses
            interval = self._learnt(now)
        else:
            # Both are a little off, in one way or the other.
            interval = (came.interval + now - came.since) / 2
            self._is_new = False
            self._guessed = [due for due in self._guessed if due.since != came.since]
        if came in self._due:
            self._due.remove(came)
        else:
            self._others.append(now)
        known = self._known(Due(now, interval))
        return [known, *guesses] if known else guesses

    def expects(self, due: Due) -> bool:
        """Whether that is still likely, after all who have asked since it was."""
        return due in self._due or due in self._guessed

    def _known(self, due: Due) -> Due | None:
        """``due``, where somebody can be expected then."""
        if not SHORTEST <= due.interval <= LONGEST + JITTER:
            return None
        if len(self._due) >= MANY:
            longest = max(self._due, key=_interval)
            if longest.interval <= due.interval + JITTER:
                return None
            self._due.remove(longest)
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


def _coming(dues: list[Due], now: float) -> list[Due]:
    return [due for due in dues if due.at >= now - JITTER]


def _present(dues: list[Due], now: float) -> Due | None:
    return min((due for due in dues if due.at <= now + JITTER), key=_interval, default=None)


def _interval(due: Due) -> float:
    return due.interval
