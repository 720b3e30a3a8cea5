"""The classic histogram: batches of observations in, cumulative buckets out."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

from sidestep.catalog.buckets import Bounds
from sidestep.protocol.limits import VALUE_LIMIT
from sidestep.protocol.native_buckets import NativeBuckets
from sidestep.protocol.records import Buckets

SORT_FROM = 5
"""Below this many values a bisection each is cheaper than sorting (measured)."""


State = tuple[Bounds, Sequence[int], float]
"""A copy of what a page shows of a histogram: its bounds, its counts and its sum."""


HistogramType = TypeVar("Made", bound="Histogram")


class Histogram:
    """Counts per bucket and the sum of one series.

    Attributes:
        bounds: Upper bounds, without +Inf.
        counts: One per bucket, not cumulative, the last for +Inf.
        mark: What renderers tell this state by; None after every change.
    """

    __slots__ = ("bounds", "counts", "mark", "sum")

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.state_token: object = None

    def observe(self, value: float) -> int:
        """Count one value; 1 where it was refused, else 0."""
        if not 0.0 <= value <= VALUE_LIMIT:
            return 1
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.state_token = None
        return 0

    def observe_run(self, value: float, count: int) -> int:
        """Count the same value several times; how many were refused."""
        if not 0.0 <= value <= VALUE_LIMIT:
            return count
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count
        self.state_token = None
        return 0

    def observe_many(self, values: list[float]) -> int:
        """Count ``values``, which may be reordered; how many were refused.

        Refused are NaN, infinities and negative values: TTFT and e2e are
        differences of wall clocks, which can step back, and an unknown
        interval is left out rather than guessed.
        """
        refused = 0
        if len(values) < SORT_FROM:
            for value in values:
                refused += self.observe(value)
            return refused
        total = sum(values)
        values.sort()
        # A NaN would leave the list unsorted, but never a finite sum.
        if not math.isfinite(total) or values[0] < 0.0 or values[-1] > VALUE_LIMIT:
            known = sorted(v for v in values if 0.0 <= v <= VALUE_LIMIT)
            refused = len(values) - len(known)
            if not known:
                return refused
            values, total = known, sum(known)
        self.sum += total
        self._count_sorted(values)
        return refused

    def observe_in_order(self, values: list[float]) -> int:
        """Count ``values`` as if one by one, whose sum has other last digits; how many were refused."""
        total = self.sum
        for value in values:
            total += value
        ordered = sorted(values)
        if ordered and math.isfinite(total) and ordered[0] >= 0.0 and ordered[-1] <= VALUE_LIMIT:
            self.sum = total
            self._count_sorted(ordered)
            return 0
        return sum(map(self.observe, values))

    def _count_sorted(self, values: list[float]) -> None:
        """Count ``values``, some that are sorted and may be, but for their sum."""
        self.state_token = None
        bounds, counts = self.bounds, self.counts
        bucket = bisect_left(bounds, values[0])
        last = bisect_left(bounds, values[-1], bucket)
        start = 0
        while bucket < last:
            end = bisect_right(values, bounds[bucket], start)
            counts[bucket] += end - start
            start = end
            # Straight to the next value's bucket: a step's latencies lie close together.
            bucket = bisect_left(bounds, values[start], bucket + 1, last)
        counts[last] += len(values) - start

    def observe_weighted(self, observations: list[tuple[float, int]]) -> int:
        """Count values, each so many times; how many were refused."""
        if {count for _, count in observations} == {1}:
            return self.observe_many([value for value, _ in observations])
        return self._observe_weights(observations)

    def _observe_weights(self, observations: list[tuple[float, int]]) -> int:
        """Likewise, whatever the weights are."""
        bounds, counts = self.bounds, self.counts
        total, refused = 0.0, 0
        for value, count in observations:
            if 0.0 <= value <= VALUE_LIMIT:
                counts[bisect_left(bounds, value)] += count
                total += value * count
            else:
                refused += count
        self.sum += total
        self.state_token = None
        return refused

    def add(self, counts: list[int], total: float, native: NativeBuckets | None = None) -> None:  # noqa: ARG002
        """Merge counts per bucket of equal bounds, and the sum they stand for.

        ``native``: the same in buckets that only a native histogram has.
        """
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
        self.sum += total
        self.state_token = None

    def merge(self, other: Histogram) -> None:
        """Add what ``other``, of equal bounds, has counted."""
        self.add(other.counts, other.sum)

    def empty_copy(self) -> Histogram:
        """Another of its form, without observations."""
        return Histogram(self.bounds)

    def empty_with(self, bounds: Bounds) -> Histogram:
        """Another of its kind, without observations."""
        return Histogram(bounds)

    def with_bounds(self, bounds: Bounds) -> Histogram:
        """What becomes of it under other bounds: it starts anew, its counts cannot be moved."""
        return self.empty_with(bounds)

    def to_wire(self) -> Buckets:
        """Its state, as it travels."""
        return Buckets(self.sum, [*self.counts])

    def token(self, new: object) -> object:
        """What its state is told by: ``mark``, where it has changed since it was asked last.

        Who asks gives each moment a mark of its own: two states never have the same.
        """
        if self.state_token is None:
            self.state_token = new
        return self.state_token

    def copy(self) -> Histogram:
        """Its state of now, to be looked at later."""
        return self._copied_to(Histogram.__new__(Histogram))

    def _copied_to(self, made: HistogramType) -> HistogramType:
        """``made`` with what every histogram has: a page copies thousands, none of which is empty."""
        made.bounds, made.counts, made.sum = self.bounds, self.counts.copy(), self.sum
        made.state_token = None
        return made

    @property
    def cumulative(self) -> list[int]:
        """Counts up to each bound; the last is the number of all observations."""
        return list(accumulate(self.counts))


def rebucket(bounds: Bounds, counts: list[int], wanted: Bounds) -> list[int]:
    """``counts`` in buckets of other bounds, none lower than it was."""
    found = [0] * (len(wanted) + 1)
    for bound, count in zip((*bounds, math.inf), counts, strict=True):
        found[bisect_left(wanted, bound)] += count
    return found
