"""Exact counts of the observations of a histogram that meet an operator's objectives.

The buckets are the engine's: a threshold need not be a bound, and no page exposes it as one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.slo import BAD, GOOD, Limit

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
        # Every result is exposed, at 0 where nothing was counted yet.
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
        """Count observations of which only the buckets are known, except for objectives in ``counted``.

        The bucket that a threshold divides counts as undecided, neither good nor bad.
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
