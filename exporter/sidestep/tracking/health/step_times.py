"""Usual times of an engine's steps by their tokens, and the time after which a step is overdue."""

from __future__ import annotations

import dataclasses
from collections import deque

FACTOR = 4.0
"""A step is overdue after the least threshold plus this multiple of the usual time of its size."""
FIRST_SECONDS = 12.0
"""Least threshold while the steps of a process are new: they may compile kernels."""
NEW_BEATS = 10
"""Heartbeats with ended steps until the steps of a process are no longer new."""
SECONDS_PER_TOKEN = 0.02
"""Additional seconds per token for a step of a size without usual time."""
HISTORY = 32
"""Steps remembered per size."""


@dataclasses.dataclass(frozen=True, slots=True)
class Thresholds:
    """Least and most seconds without progress after which an engine counts as stalled."""

    least: float = 5.0
    most: float = 120.0

    @property
    def waiting(self) -> float:
        """Seconds after which requests have waited too long for a step, an output or a heartbeat."""
        return min(1.5 * self.least, self.most)


class StepTimes:
    """The usual times of one process's steps, by powers of two of their tokens.

    The usual time of a size is the second longest of its last 32 steps, so that a single compilation
    does not count. Overdue steps do not count either, unless they are more than three quarters.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[tuple[float, bool]]] = {}
        """Seconds of the steps of a size, and whether each was overdue."""
        self._usual: dict[int, float] = {}
        self._beats = 0

    def add(self, seconds: float, tokens: int, limits: Thresholds) -> None:
        """Record the longest step of a heartbeat, at most with the threshold that it had."""
        size = tokens.bit_length()
        recent = self._recent.setdefault(size, deque(maxlen=HISTORY))
        limit = self.overdue_after(tokens, limits)
        recent.append((min(seconds, limit), seconds > limit))
        self._beats += 1
        in_time = [each for each, was_overdue in recent if not was_overdue]
        if 4 * len(in_time) < len(recent):
            in_time = [each for each, _ in recent]
        if len(in_time) > 1:
            self._usual[size] = sorted(in_time)[-2]

    @property
    def longest(self) -> float:
        """Usual seconds of the slowest size."""
        return max(self._usual.values(), default=0.0)

    def overdue_after(self, tokens: int, limits: Thresholds) -> float:
        """Return the seconds after which a step is overdue, before ``limits.most`` is applied."""
        is_new = self._beats < NEW_BEATS
        seconds = max(limits.least, FIRST_SECONDS) if is_new else limits.least
        seconds += max(FACTOR * self._expected(tokens), self._bound(tokens))
        return max(seconds, limits.waiting)

    def _expected(self, tokens: int) -> float:
        """Return the usual seconds of a step: the most by any size, of larger sizes in proportion."""
        return max(
            (
                usual * min(1.0, tokens / 2 ** (size - 1)) if size else usual
                for size, usual in self._usual.items()
            ),
            default=0.0,
        )

    def _bound(self, tokens: int) -> float:
        """Return the seconds that the first step of a size may take beyond the least; later 0."""
        size = tokens.bit_length()
        if size in self._usual:
            return 0.0
        smaller = max((each for each in self._usual if each < size), default=0)
        per_token = SECONDS_PER_TOKEN
        if smaller:
            # Batching makes a token of a large step several times cheaper than one of a small step.
            per_token = max(per_token, self._usual[smaller] / 2**smaller / 2)
        seconds = FACTOR * self._usual.get(smaller, 0.0) + per_token * tokens
        larger = min((each for each in self._usual if each > size), default=None)
        return seconds if larger is None else min(seconds, FACTOR * self._usual[larger])
