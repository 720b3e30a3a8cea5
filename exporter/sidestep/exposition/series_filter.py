"""Which part of the engines' series pages show: families, labels, buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase

from sidestep.catalog.buckets import Bounds
from sidestep.metrics.engine import ORIGIN

RANK_LABELS = ("pp_rank", "tp_rank", "moe_ep_rank", "attn_cp_rank")
"""Labels of SGLang that tell the ranks of one data-parallel replica apart."""
POD_DROPPED_LABELS = frozenset({"engine", ORIGIN, "dp_rank", "engine_type", *RANK_LABELS})
"""Labels that tell the engines of a pod apart, and nothing of what they serve."""


@dataclasses.dataclass(frozen=True)
class SeriesFilter:
    """What an administrator has chosen.

    Attributes:
        dropped: Labels that no series has: those that only they told apart are one.
        allow: Patterns of families that are shown; empty is all.
        deny: Patterns of those that are not, whatever ``allow`` says.
        thinning: Of the bounds of a histogram every such one is shown.
        kept: By pattern of a family, the bounds that are shown instead.
    """

    dropped_labels: frozenset[str] = frozenset()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    bucket_thinning: int = 1
    shown_buckets: Mapping[str, Bounds] = dataclasses.field(default_factory=dict)

    @property
    def keeps_labels_and_buckets(self) -> bool:
        """Whether every series of a family that is shown is as its engine has it."""
        return not self.dropped_labels and not self.shown_buckets and self.bucket_thinning == 1

    @property
    def for_pod(self) -> SeriesFilter:
        """The same for the pod's page."""
        return dataclasses.replace(self, dropped_labels=self.dropped_labels | POD_DROPPED_LABELS)

    def shows(self, family: str) -> bool:
        """Whether ``family`` is shown."""
        if self.allow and not any(fnmatchcase(family, pattern) for pattern in self.allow):
            return False
        return not any(fnmatchcase(family, pattern) for pattern in self.deny)

    def shown_bounds(self, family: str, bounds: Bounds) -> tuple[int, ...] | None:
        """Which of ``bounds`` are shown; None is all.

        Buckets are cumulative, so that what is left is as exact as it was. The highest
        bound stays: above it no quantile can be told.
        """
        for pattern, shown_buckets in self.shown_buckets.items():
            if fnmatchcase(family, pattern):
                return tuple(place for place, bound in enumerate(bounds) if bound in shown_buckets)
        if self.bucket_thinning == 1:
            return None
        first = (len(bounds) - 1) % self.bucket_thinning
        return tuple(range(first, len(bounds), self.bucket_thinning))
