"""Counts of the steps that have ended."""

from __future__ import annotations


class EndedSteps:
    """Counts of the steps that have ended; used in the publisher thread only.

    Attributes:
        count: Steps with tokens.
        output_at: When requests last got output, by the monotonic clock; 0: never.
        computed: Tokens computed since then.
        ended_at: When the last step ended; 0: none has.
    """

    def __init__(self) -> None:
        self.count = self.computed = 0
        self.output_at = self.ended_at = 0.0
        self._longest, self._longest_tokens = 0.0, 0

    def add(self, started: float | None, ended: float, tokens: int, *, has_output: bool) -> None:
        """Count a step of ``tokens``; without ``started`` its duration is unknown."""
        self.count += 1
        if started is not None:
            # The next batch is scheduled while this one is computed: it begins when this one ends.
            seconds = ended - max(started, self.ended_at)
            if seconds > self._longest:
                self._longest, self._longest_tokens = seconds, tokens
        self.ended_at = ended
        if has_output:
            self.output_at, self.computed = ended, 0
        else:
            self.computed += tokens

    def take_longest(self) -> tuple[float, int]:
        """Return seconds and tokens of the longest step since the last call."""
        longest = self._longest, self._longest_tokens
        self._longest, self._longest_tokens = 0.0, 0
        return longest
