"""The filter on exposed series: families, labels and buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase

from sidestep.catalog.buckets import Bounds
from sidestep.metrics.engine import ORIGIN

RANK_LABELS = ("pp_rank", "tp_rank", "moe_ep_rank", "attn_cp_rank")
"""Labels that distinguish the ranks of one data-parallel replica."""
POD_DROPPED_LABELS = frozenset({"engine", ORIGIN, "dp_rank", "engine_type", *RANK_LABELS})
"""Labels that distinguish only the engines of a pod; the pod view drops them."""


@dataclasses.dataclass(frozen=True)
class SeriesFilter:
    """Families, labels and buckets that the configuration selects.

    Attributes:
        dropped_labels: Labels to remove; series that become equal are aggregated.
        deny: Patterns of families to hide, even if ``allow`` has them.
        bucket_thinning: Expose every n-th bound of a histogram.
        shown_buckets: Bounds to expose instead, by pattern of a family.
    """

    dropped_labels: frozenset[str] = frozenset()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    bucket_thinning: int = 1
    shown_buckets: Mapping[str, Bounds] = dataclasses.field(default_factory=dict)

    @property
    def keeps_labels_and_buckets(self) -> bool:
        """Return whether every exposed series has all its labels and buckets."""
        return not self.dropped_labels and not self.shown_buckets and self.bucket_thinning == 1

    @property
    def for_pod(self) -> SeriesFilter:
        """Return this filter for the pod view."""
        return dataclasses.replace(self, dropped_labels=self.dropped_labels | POD_DROPPED_LABELS)

    def shows(self, family: str) -> bool:
        """Return whether ``family`` is exposed."""
        if self.allow and not any(fnmatchcase(family, pattern) for pattern in self.allow):
            return False
        return not any(fnmatchcase(family, pattern) for pattern in self.deny)

    def shown_bounds(self, family: str, bounds: Bounds) -> tuple[int, ...] | None:
        """Return the indexes of the exposed ``bounds``; None for all.

        Buckets are cumulative, so the remaining ones are exact. The highest bound stays: quantiles
        above it cannot be estimated.
        """
        for pattern, shown_buckets in self.shown_buckets.items():
            if fnmatchcase(family, pattern):
                return tuple(place for place, bound in enumerate(bounds) if bound in shown_buckets)
        if self.bucket_thinning == 1:
            return None
        first = (len(bounds) - 1) % self.bucket_thinning
        return tuple(range(first, len(bounds), self.bucket_thinning))
