"""Measurements of one input, in blocks, and their estimates with intervals.

A block is a run of consecutive requests, or of time. An interval comes from a bootstrap that draws
whole blocks, because requests that are served together are slow together.
"""

from __future__ import annotations

import functools
import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")
MAX_BLOCKS = 100
MIN_BLOCKS = 10
"""Fewer blocks give no interval."""
MIN_TAIL = 5
"""A quantile has an interval only if so many observations lie on either side of it."""
DRAWS = 1000
SEED = 39
Z = 1.96
"""Half the width of a 95 % interval, in standard deviations."""


class Estimate(NamedTuple):
    """A number and the bounds of its 95 % interval, which are None where no interval is known."""

    value: float
    low: float | None = None
    high: float | None = None


class Ratio(NamedTuple):
    """A quotient of two sums over blocks.

    Attributes:
        is_share: Whether it counts some of the wholes, such as requests that failed.
    """

    parts: Sequence[float]
    wholes: Sequence[float]
    is_share: bool = False

    def estimate(self) -> Estimate | None:
        """Return the quotient; None if there is nothing to divide by."""
        whole = sum(self.wholes)
        if not whole > 0:
            return None
        value, blocks = sum(self.parts) / whole, len(self.wholes)
        if blocks < MIN_BLOCKS:
            return Estimate(value)
        found = sorted(
            sum(draw(self.parts)) / drawn
            for draw in _draws(blocks)
            if (drawn := sum(draw(self.wholes))) > 0
        )
        low, high = (found[int(len(found) * share)] for share in (0.025, 0.975))
        if low == high:
            # What never happened in n requests is unlikely in more than 3 of n.
            rare = min(3 / whole, 1.0)
            return (
                Estimate(value, max(value - rare, 0.0), min(value + rare, 1.0))
                if (self.is_share)
                else Estimate(value)
            )
        # Student's t and the degree of freedom that the mean takes: few blocks vary too little.
        wider = (1 + (Z**2 + 1) / (4 * (blocks - 1))) * math.sqrt(blocks / (blocks - 1))
        return Estimate(value, value - (value - low) * wider, value + (high - value) * wider)


@functools.cache
def _draws(blocks: int) -> list[itemgetter[Sequence[float]]]:
    """Return the draws of a bootstrap, which are the same each time."""
    numbers = random.Random(SEED)  # noqa: S311 - no secret
    return [itemgetter(*numbers.choices(range(blocks), k=blocks)) for _ in range(DRAWS)]


class Distribution(Protocol):
    """Observations in blocks."""

    @property
    def count(self) -> float:
        """Number of observations."""

    def at(self, share: float) -> tuple[float, float, float]:
        """Return the quantile, between the least and the greatest value that it can have."""

    def below(self, value: float) -> Ratio:
        """Return the share of the observations that are at most ``value``."""


class Values:
    """Observations that are known one by one."""

    def __init__(self, blocks: Sequence[Sequence[float]]) -> None:
        self._blocks = [sorted(block) for block in blocks]
        self._all = sorted(value for block in blocks for value in block)
        self.count = len(self._all)

    def at(self, share: float) -> tuple[float, float, float]:
        """Return the quantile, three times."""
        index = math.ceil(share * len(self._all)) - 1
        return (self._all[min(max(index, 0), len(self._all) - 1)],) * 3

    def below(self, value: float) -> Ratio:
        """Return the share of the observations that are at most ``value``."""
        return Ratio(
            [bisect_right(block, value) for block in self._blocks], [*map(len, self._blocks)]
        )


class Buckets:
    """Observations that are known by their buckets.

    Args:
        bounds: Upper bounds in ascending order, without +Inf.
        blocks: Observations per bucket, not cumulative, the last of +Inf.
    """

    def __init__(self, bounds: Sequence[float], blocks: Sequence[Sequence[float]]) -> None:
        self._edges = [0.0, *bounds, math.inf]
        self._blocks = [[0.0, *accumulate(block)] for block in blocks]
        self._total = [*map(sum, zip(*self._blocks, strict=True))]
        self.count = self._total[-1]

    def at(self, share: float) -> tuple[float, float, float]:
        """Return the quantile as PromQL interpolates it, between the bounds of its bucket."""
        rank = min(max(share, 0.0), 1.0) * self.count
        bucket = min(max(bisect_left(self._total, rank), 1), len(self._edges) - 1)
        low, high = self._edges[bucket - 1 : bucket + 1]
        if high == math.inf:
            return low, low, high
        before, after = self._total[bucket - 1 : bucket + 1]
        part = (rank - before) / (after - before) if after > before else 1.0
        return low, low + (high - low) * part, high

    def below(self, value: float) -> Ratio:
        """Return the share of the observations that are at most ``value``, by interpolation."""
        bucket = bisect_left(self._edges, value, 1, len(self._edges) - 1)
        low, high = self._edges[bucket - 1 : bucket + 1]
        part = 0.0 if high == math.inf else (value - low) / (high - low)
        counts = (block[bucket - 1 : bucket + 1] for block in self._blocks)
        return Ratio(
            [before + (after - before) * part for before, after in counts],
            [block[-1] for block in self._blocks],
        )


def quantile(found: Distribution, share: float) -> Estimate | None:
    """Return a quantile; None without observations.

    Its interval reaches from the quantile at the lower bound of the share that lies below it to that
    at the upper bound (Woodruff, 1952). Of buckets it has whole ones, since nothing is known of the
    places within them.
    """
    if not found.count > 0:
        return None
    value = found.at(share)[1]
    lies_below = found.below(value).estimate()
    is_few = found.count * min(share, 1 - share) < MIN_TAIL
    if is_few or lies_below is None or lies_below.low is None or lies_below.high is None:
        return Estimate(value)
    low = found.at(share - (lies_below.value - lies_below.low))[0]
    high = found.at(share + (lies_below.high - lies_below.value))[2]
    return Estimate(value, low, high) if high < math.inf else Estimate(value)


class Measurement(NamedTuple):
    """Measurements of one input.

    Attributes:
        dialect: The kind of its engines, such as ``vllm``.
        extent: What was measured, in words.
        ratios: Quotients by the names in ``quantities``; those of parts and limits have their names.
        distributions: Observations by the same names.
    """

    dialect: str
    extent: str
    ratios: Mapping[str, Ratio]
    distributions: Mapping[str, Distribution]


def chunks(several: Sequence[T], most: int = MAX_BLOCKS) -> Iterator[Sequence[T]]:
    """Yield consecutive items in at most so many lists, whose lengths differ by one at most."""
    count = min(len(several), most)
    for index in range(count):
        yield several[index * len(several) // count : (index + 1) * len(several) // count]
