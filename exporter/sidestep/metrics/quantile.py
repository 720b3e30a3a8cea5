"""Quantiles of classic histograms, as PromQL's ``histogram_quantile`` computes them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def histogram_quantile(
    quantile: float, bounds: Sequence[float], counts: Sequence[float]
) -> float | None:
    """Return the quantile, interpolated within its bucket; None without observations.

    Args:
        quantile: More than 0, and 1 at most.
        bounds: Upper bounds of the buckets in ascending order, without +Inf.
        counts: Observations per bucket, not cumulative; the last is that of +Inf.
    """
    cumulative = [*accumulate(counts)]
    total = cumulative[-1]
    if not bounds or total <= 0:
        return None
    rank = quantile * total
    bucket = bisect_left(cumulative, rank, 0, len(bounds))
    if bucket == len(bounds):
        return bounds[-1]
    end = bounds[bucket]
    if bucket == 0:
        if end <= 0:
            return end
        start, before = 0.0, 0.0
    else:
        start, before = bounds[bucket - 1], cumulative[bucket - 1]
    return start + (end - start) * ((rank - before) / counts[bucket])
