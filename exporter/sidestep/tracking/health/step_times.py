"""Times that an engine's steps have taken, by the tokens scheduled in them."""

from __future__ import annotations

import dataclasses

FACTOR = 10.0
"""A step is overdue after so many times what steps of as many tokens took."""
FIRST_SECONDS, FIRST_SECONDS_PER_TOKEN = 12.0, 0.01
"""Seconds after which a step is overdue while no step has ended: a constant, and per token."""
GENERATION = 600.0
"""Seconds for which times are remembered at least; at most, twice as many."""


@dataclasses.dataclass(frozen=True, slots=True)
class Thresholds:
    """Least and most seconds without progress after which an engine counts as stalled."""

    least: float = 5.0
    most: float = 120.0

    @property
    def waiting(self) -> float:
        """Seconds after which requests have waited too long for a step, an output or a heartbeat."""
        return 1.5 * self.least


class StepTimes:
    """The longest recent steps, by powers of two of their tokens."""

    def __init__(self) -> None:
        self._recent: dict[int, float] = {}
        self._earlier: dict[int, float] = {}
        self._began = 0.0

    def add(self, seconds: float, tokens: int, limits: Thresholds, now: float) -> None:
        """Record a step that ended at ``now``.

        A single step that was stalled counts for little: an expectation at most doubles at a time.
        """
        if now - self._began >= GENERATION:
            is_old = now - self._began >= 2 * GENERATION
            self._recent, self._earlier = {}, {} if is_old else self._recent
            self._began = now
        expected = self.expected(tokens)
        if expected is not None:
            seconds = min(seconds, 2 * max(expected, limits.least / FACTOR))
        else:
            seconds = min(seconds, limits.most / FACTOR)
        size = tokens.bit_length()
        self._recent[size] = max(seconds, self._recent.get(size, 0.0))

    def expected(self, tokens: int) -> float | None:
        """Return the seconds that a step of ``tokens`` may take, by recent ones; None without any."""
        known = {**self._earlier}
        for size, seconds in self._recent.items():
            known[size] = max(seconds, known.get(size, 0.0))
        if not known:
            return None
        size = tokens.bit_length()
        smaller = [known[each] for each in known if each <= size]
        if not smaller:
            return known[min(known)]
        largest = max(known)
        # Longer than any step seen: time grows at most with the tokens.
        factor = 2.0 ** (size - largest) if size > largest else 1.0
        return max(smaller) * factor

    def overdue_after(self, tokens: int, limits: Thresholds) -> float:
        """Return the seconds after which a step of ``tokens`` is overdue."""
        expected = self.expected(tokens)
        if expected is None:
            seconds = FIRST_SECONDS + FIRST_SECONDS_PER_TOKEN * tokens
        else:
            seconds = FACTOR * expected
        return min(max(seconds, limits.least), limits.most)
