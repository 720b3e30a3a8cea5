"""The classic histogram of one series."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

from sidestep.catalog.buckets import Bounds
from sidestep.metrics.exemplars import NO_EXEMPLARS, Exemplar, Exemplars
from sidestep.metrics.slo_counter import SloCounter
from sidestep.protocol.engine_totals import Buckets, NativeBuckets
from sidestep.protocol.limits import VALUE_LIMIT

SORT_FROM = 5
"""Values from which on sorting is cheaper than one bisection per value (measured)."""


class Histogram:
    """Counts per bucket and the sum of one series.

    Attributes:
        bounds: Upper bounds, without +Inf.
        counts: One count per bucket, not cumulative, the last for +Inf.
        exemplars: Observations whose trace is known.
        slo_counter: Counts for objectives of what is observed, not of what is added; None: there are none.
    """

    __slots__ = ("bounds", "counts", "exemplars", "slo_counter", "sum")

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: Exemplars = NO_EXEMPLARS
        self.slo_counter: SloCounter | None = None

    def exemplify(self, one: Exemplar) -> None:
        """Keep the exemplar of an observation, unless its bucket has a newer one."""
        if not 0.0 <= one.value <= VALUE_LIMIT:
            return
        bucket = bisect_left(self.bounds, one.value)
        known = self.exemplars.get(bucket)
        if known is None or known.time <= one.time:
            # Pages that are being written go on with the former ones.
            self.exemplars = {**self.exemplars, bucket: one}

    def observe(self, value: float) -> int:
        """Count one value; return 1 if it was refused, else 0."""
        if not 0.0 <= value <= VALUE_LIMIT:
            return 1
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        if self.slo_counter is not None:
            self.slo_counter.count(value)
        return 0

    def observe_run(self, value: float, count: int) -> int:
        """Count the same value ``count`` times; return how many observations were refused."""
        if not 0.0 <= value <= VALUE_LIMIT:
            return count
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count
        if self.slo_counter is not None:
            self.slo_counter.count(value, count)
        return 0

    def observe_many(self, values: list[float]) -> int:
        """Count ``values``, which may be reordered; return how many were refused.

        NaN, infinities and negative values are refused. TTFT and end-to-end latency are differences
        of wall clocks, which can step back; an unknown interval is omitted.
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

    def _count_sorted(self, values: list[float]) -> None:
        """Add ``values``, sorted and valid and at least one, to the counts but not to the sum."""
        bounds, counts = self.bounds, self.counts
        bucket = bisect_left(bounds, values[0])
        last = bisect_left(bounds, values[-1], bucket)
        start = 0
        while bucket < last:
            end = bisect_right(values, bounds[bucket], start)
            counts[bucket] += end - start
            start = end
            # Skip to the next value's bucket: the latencies of one step lie close together.
            bucket = bisect_left(bounds, values[start], bucket + 1, last)
        counts[last] += len(values) - start
        if self.slo_counter is not None:
            self.slo_counter.count_sorted(values)

    def observe_weighted(self, observations: list[tuple[float, int]]) -> int:
        """Count pairs of a value and a number of times; return how many observations were refused."""
        if {count for _, count in observations} == {1}:
            return self.observe_many([value for value, _ in observations])
        return self._observe_weights(observations)

    def _observe_weights(self, observations: list[tuple[float, int]]) -> int:
        """Count pairs like ``observe_weighted``, without its shortcut for weights of 1."""
        bounds, counts = self.bounds, self.counts
        total, refused = 0.0, 0
        for value, count in observations:
            if 0.0 <= value <= VALUE_LIMIT:
                counts[bisect_left(bounds, value)] += count
                total += value * count
                if self.slo_counter is not None:
                    self.slo_counter.count(value, count)
            else:
                refused += count
        self.sum += total
        return refused

    def add(self, counts: list[int], total: float, native: NativeBuckets | None = None) -> None:  # noqa: ARG002
        """Add counts per bucket, not cumulative, and the sum of the observations.

        ``native`` has the same observations in native buckets, which a classic histogram ignores.
        """
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
        self.sum += total

    def merge(self, other: Histogram) -> None:
        """Add the observations of ``other``, which has equal bounds."""
        self.add(other.counts, other.sum)

    def with_bounds(self, bounds: Bounds) -> Histogram:
        """Return the histogram under other bounds: it restarts at 0, since its counts cannot be moved."""
        found = Histogram(bounds)
        found.slo_counter = self.slo_counter
        return found

    def to_wire(self) -> Buckets:
        """Return the state as a wire struct."""
        return Buckets(self.sum, [*self.counts])

    def copy(self) -> Histogram:
        """Return a copy of the current state, which counts for no objective."""
        # Without the constructor's cost: a page copies thousands of histograms.
        found = Histogram.__new__(Histogram)
        found.bounds, found.counts, found.sum = self.bounds, self.counts.copy(), self.sum
        found.exemplars, found.slo_counter = self.exemplars, None
        return found

    @property
    def cumulative(self) -> list[int]:
        """The counts up to each bound; the last is the number of all observations."""
        return list(accumulate(self.counts))


def rebucket(bounds: Bounds, counts: list[int], wanted: Bounds) -> list[int]:
    """Return ``counts`` in buckets of other bounds.

    Each count moves to the bucket that holds its old upper bound, so none moves to a lower value.
    """
    found = [0] * (len(wanted) + 1)
    for bound, count in zip((*bounds, math.inf), counts, strict=True):
        found[bisect_left(wanted, bound)] += count
    return found
