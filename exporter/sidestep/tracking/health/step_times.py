"""Times that an engine's steps have taken, by their tokens, and when a step is overdue."""

from __future__ import annotations

import dataclasses
from collections import deque

FACTOR = 4.0
"""A step is overdue after the least threshold and so many times what steps of its size take."""
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

    The usual time of a size is the second longest of its last 32 steps, so that a single
    compilation, or a step that was stalled, does not count.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._usual: dict[int, float] = {}
        self._beats = 0

    def add(self, seconds: float, tokens: int, limits: Thresholds) -> None:
        """Record the longest of the steps that a heartbeat tells of, up to the threshold that it had."""
        size = tokens.bit_length()
        recent = self._recent.setdefault(size, deque(maxlen=HISTORY))
        recent.append(min(seconds, self.overdue_after(tokens, limits)))
        self._beats += 1
        if len(recent) > 1:
            self._usual[size] = sorted(recent)[-2]

    @property
    def longest(self) -> float:
        """Usual seconds of the size that takes longest."""
        return max(self._usual.values(), default=0.0)

    def overdue_after(self, tokens: int, limits: Thresholds) -> float:
        """Return the seconds after which a step of ``tokens`` is overdue."""
        usual = self._usual.get(tokens.bit_length())
        is_new = self._beats < NEW_BEATS
        seconds = max(limits.least, FIRST_SECONDS) if is_new else limits.least
        seconds += self._bound(tokens) if usual is None else FACTOR * usual
        return min(max(seconds, limits.waiting), limits.most)

    def _bound(self, tokens: int) -> float:
        """Return the additional seconds for a step of a size without usual time, by other sizes."""
        size = tokens.bit_length()
        smaller = max((each for each in self._usual if each < size), default=None)
        larger = min((each for each in self._usual if each > size), default=None)
        seconds = SECONDS_PER_TOKEN * tokens
        if smaller:
            # Batching makes a token of a large step several times cheaper than one of a small step.
            seconds = max(seconds, self._usual[smaller] / 2**smaller / 2 * tokens)
        if smaller is not None:
            seconds += FACTOR * self._usual[smaller]
        if larger is not None:
            usual = FACTOR * self._usual[larger]
            seconds = min(max(seconds, usual * tokens / 2 ** (larger - 1)), usual)
        return seconds
