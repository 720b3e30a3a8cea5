"""Running sums of what an engine's time went to, from its steps: a request takes the differences.

Time is divided at the ends of the steps. The scheduling of a step may begin before the step before it
ends, so a step lasts from its own start, or from the end before it if that is later, to its end.
"""

from __future__ import annotations

import math

import msgspec

from sidestep.protocol.request_events import LIMITS

MIN_STALL = 0.05
"""Seconds between two steps that are never a stall."""
MIN_LONG_STEP = 1.0
"""Seconds of a step that are never a stall."""
STALL_FACTOR = 10.0
"""A stall is longer than this multiple of the usual time between two steps, or of such a step."""
WEIGHT = 1 / 16
"""Weight of the newest value in a mean."""
PREFILL_WEIGHT = 1 / 512
"""The same of a prompt's token that takes less time than is known."""


class EngineTimes(msgspec.Struct, array_like=True, gc=False):
    """Running sums of one engine, in seconds; a wire struct, which a snapshot holds.

    Attributes:
        ended: End of the latest step; None: there was none.
        gap: Usual time between the end of a step and the start of the next one.
        stalled: Time between steps, and of steps, that was longer than usual.
        interference: Time of steps with prefill that they would not have taken without.
        decode_times: Usual size of a batch and usual time of its steps without prefill, by the number of
            bits of the size.
        limit: Index into ``LIMITS`` of what has limited the engine since ``limited_at``; None: unknown.
        limited_at: Start of the latest step's scheduling; None: unknown.
        limits: Time of each limit until ``limited_at``.
        prefill_time: Time of a token of the prompts that take longest by token; 0: unknown.
        hung: Sum of what steps that took much too long took longer than usual.
        hang: What the latest such step took longer.
        hung_until: End of that step.
    """

    ended: float | None = None
    gap: float = 0.0
    stalled: float = 0.0
    interference: float = 0.0
    decode_times: dict[int, tuple[float, float]] = {}
    limit: int | None = None
    limited_at: float | None = None
    limits: tuple[float, ...] = ()
    prefill_time: float = 0.0
    hung: float = 0.0
    hang: float = 0.0
    hung_until: float = 0.0

    def interrupt(self) -> None:
        """Forget the latest step, since events are missing or another process sends the next one."""
        self.ended = self.limit = self.limited_at = None
        self.hang = 0.0

    def step(self, started: float, ended: float, decoding: int, prefilled: int) -> float:
        """Add a step, and return when it began.

        Args:
            started: Start of its scheduling; its end if that is unknown.
            ended: Its end.
            decoding: Requests of its batch that are not in prefill.
            prefilled: Tokens of the others.
        """
        before, self.ended = self.ended, ended
        if started >= ended:
            return ended if before is None else min(before, ended)
        begin = started
        if before is not None and before <= ended:
            begin = max(started, before)
            self._wait(begin - before, decoding)
        seconds = ended - begin
        plain = self.decode_time(decoding) if prefilled else None
        usual = self._usual(decoding, prefilled) if seconds > MIN_LONG_STEP else None
        if not prefilled:
            self._learn(decoding, seconds)
        elif plain is not None:
            each = max(seconds - plain, 0.0) / prefilled
            known = self.prefill_time or each
            # Tokens of images, and those far into a long prompt, take many times as long as others.
            more = _bounded(each, known) - known
            self.prefill_time = known + (more if more > 0.0 else more * PREFILL_WEIGHT)
        if usual is not None and seconds > STALL_FACTOR * usual:
            self.hang, self.hung_until = seconds - usual, ended
            self.hung += self.hang
            self.stalled += self.hang
            seconds = usual
        if plain is not None and seconds > plain:
            self.interference += seconds - plain
        return begin

    def _usual(self, decoding: int, prefilled: int) -> float | None:
        """Return the usual time of a step of such a batch; None: too little is known of it."""
        plain = self.decode_time(max(decoding, 1))
        if plain is None or (prefilled and not self.prefill_time):
            return None
        return plain + prefilled * self.prefill_time

    def hung_since(self, stamp: float) -> float:
        """Return how much of the latest step that was much too long is after ``stamp``."""
        return min(self.hang, max(self.hung_until - stamp, 0.0))

    def _wait(self, seconds: float, decoding: int) -> None:
        """Add the time between two steps; without requests that decode, the engine may have been idle."""
        longest = max(MIN_STALL, STALL_FACTOR * self.gap)
        if seconds > longest:
            self.stalled += seconds
        if decoding:
            # An engine whose steps are always this far apart soon has a higher bound.
            self.gap += (min(seconds, longest) - self.gap) * WEIGHT

    def _learn(self, size: int, seconds: float) -> None:
        """Learn from a step without prefill; a single long or short one counts at most twofold."""
        if seconds <= 0.0:
            return
        group = size.bit_length()
        if group not in self.decode_times:
            self.decode_times[group] = float(size), seconds
            return
        mean, usual = self.decode_times[group]
        self.decode_times[group] = (
            mean + (size - mean) * WEIGHT,
            usual + (_bounded(seconds, usual) - usual) * WEIGHT,
        )

    def decode_time(self, size: int) -> float | None:
        """Return the usual time of a step without prefill; None: no batch of about this size is known."""
        if not size:
            return 0.0
        below, above = (0.0, 0.0), (math.inf, 0.0)
        for known in self.decode_times.values():
            if known[0] <= size:
                below = max(below, known)
            else:
                above = min(above, known)
        if below[0] and above[1]:
            share = (size - below[0]) / (above[0] - below[0])
            return below[1] + (above[1] - below[1]) * share
        if size <= 2 * below[0]:
            return below[1]
        return above[1] if above[0] <= 2 * size else None

    def schedule(self, started: float, limit: int | None) -> None:
        """Add the time of the limit until now; ``limit`` holds from the start of this step's scheduling."""
        if limit is None and self.limit is None:
            return
        self.limits = self.limits_at(started)
        self.limited_at = started if self.limited_at is None else max(started, self.limited_at)
        self.limit = limit if limit is not None and limit < len(LIMITS) else None

    def limits_at(self, stamp: float) -> tuple[float, ...]:
        """Return the time of each limit until ``stamp``, as if the present one held until then."""
        limit, since, found = self.limit, self.limited_at, self.limits
        if limit is None or since is None or stamp <= since:
            return found
        found += (0.0,) * (limit + 1 - len(found))
        return (*found[:limit], found[limit] + stamp - since, *found[limit + 1 :])


def _bounded(seconds: float, usual: float) -> float:
    return min(max(seconds, usual / 2), usual * 2)
