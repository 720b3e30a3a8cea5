"""Histograms that also count, exactly, which observations meet an operator's objectives.

The buckets are the engine's: a threshold need not be a bound, and no page exposes it as one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.slo import BAD, GOOD, Limit
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeHistogram
from sidestep.protocol.limits import VALUE_LIMIT

Children = dict[tuple[str, ...], int | float]


class SloCounter:
    """Counts good and bad observations of one family of one engine.

    Args:
        requests: Children of ``sidestep_slo_requests_total``, by result and objective.
        undecided: Children of ``sidestep_slo_unjudged_requests_total``, by objective.
        limits: The objectives' thresholds for the family.
    """

    __slots__ = ("_limits", "_requests", "_undecided")

    def __init__(self, requests: Children, undecided: Children, limits: Sequence[Limit]) -> None:
        self._requests = requests
        self._undecided = undecided
        self._limits = [(t, (GOOD, name), (BAD, name)) for name, t in limits]
        self.start()

    def start(self) -> None:
        """Expose every result, at 0 where nothing was counted yet."""
        for _, good, bad in self._limits:
            self._requests.setdefault(good, 0)
            self._requests.setdefault(bad, 0)

    def count(self, value: float, count: int = 1) -> None:
        """Count ``count`` observations of ``value``."""
        for threshold, good, bad in self._limits:
            self._requests[good if value <= threshold else bad] += count

    def count_sorted(self, values: list[float]) -> None:
        """Count ``values``, which are sorted."""
        for threshold, good, bad in self._limits:
            within = bisect_right(values, threshold)
            self._requests[good] += within
            self._requests[bad] += len(values) - within

    def count_buckets(
        self, bounds: Bounds, counts: Sequence[int], counted: Collection[str] = ()
    ) -> None:
        """Count observations of which only the buckets are known.

        The bucket that a threshold divides counts as undecided, neither good nor bad.

        Args:
            bounds: Upper bounds.
            counts: One count per bucket, not cumulative, the last for +Inf.
            counted: Objectives that have counted these observations already.
        """
        for threshold, good, bad in self._limits:
            if good[1] in counted:
                continue
            at = bisect_left(bounds, threshold)
            is_bound = at < len(bounds) and bounds[at] == threshold
            self._requests[good] += sum(counts[: at + is_bound])
            self._requests[bad] += sum(counts[at + 1 :])
            if not is_bound and counts[at]:
                key = (good[1],)
                self._undecided[key] = self._undecided.get(key, 0) + counts[at]


class _SloCounting(Histogram):
    """The counting that both kinds of histograms share.

    Merged counts are not counted again: that was done where they were observed.
    """

    __slots__ = ()
    slo_counter: SloCounter

    def observe(self, value: float) -> int:
        """Count one value; return 1 if it was refused, else 0."""
        refused = super().observe(value)
        if not refused:
            self.slo_counter.count(value)
        return refused

    def observe_run(self, value: float, count: int) -> int:
        """Count the same value ``count`` times; return how many observations were refused."""
        refused = super().observe_run(value, count)
        if not refused:
            self.slo_counter.count(value, count)
        return refused

    def _observe_weights(self, observations: list[tuple[float, int]]) -> int:
        refused = super()._observe_weights(observations)
        for value, count in observations:
            if 0.0 <= value <= VALUE_LIMIT:
                self.slo_counter.count(value, count)
        return refused

    def _count_sorted(self, values: list[float]) -> None:
        super()._count_sorted(values)
        self.slo_counter.count_sorted(values)

    def empty_with(self, bounds: Bounds) -> Histogram:
        """Return a histogram of this kind with other bounds and no observations."""
        return with_slo_counter(super().empty_with(bounds), self.slo_counter)


class SloHistogram(_SloCounting):
    """A classic histogram with an SLO counter."""

    __slots__ = ("slo_counter",)


class SloNativeHistogram(_SloCounting, NativeHistogram):  # type: ignore[misc]
    """A native histogram with an SLO counter."""

    # mypy cannot know that ``empty_with`` returns a native histogram here.
    __slots__ = ("slo_counter",)


def with_slo_counter(
    empty: Histogram, slo_counter: SloCounter
) -> SloHistogram | SloNativeHistogram:
    """Return a histogram like ``empty`` whose observations ``slo_counter`` counts, too."""
    made: SloHistogram | SloNativeHistogram
    if isinstance(empty, NativeHistogram):
        made = SloNativeHistogram(empty.bounds, empty.schema, empty.created)
    else:
        made = SloHistogram(empty.bounds)
    made.slo_counter = slo_counter
    return made
