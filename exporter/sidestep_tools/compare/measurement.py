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
from operator import itemgetter, mul
from typing import NamedTuple, TypeVar

T = TypeVar("T")
MAX_BLOCKS = 20
"""Blocks of an input: they are long, so that a queue begins and ends within one."""
MIN_BLOCKS = 10
"""Fewer blocks that have anything give no interval."""
MIN_TAIL = 5
"""A quantile has an interval only if so many blocks have observations on either side of it."""
MOST_ALIKE = 0.8
"""Highest correlation of consecutive blocks that is taken for real."""
DRAWS = 1000
SEED = 39
FARTHEST = 30.0
"""Highest logarithm of a change: beyond it a float cannot tell a decrease from one to nothing."""
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
        if sum(one > 0 for one in self.wholes) < MIN_BLOCKS:
            return Estimate(value)
        found = sorted(
            sum(draw(self.parts)) / drawn
            for draw in _draws(blocks)
            if (drawn := sum(draw(self.wholes))) > 0
        )
        low, high = (found[int(len(found) * share)] for share in (0.025, 0.975))
        if low == high and self.is_share:
            # What never happened in n requests is unlikely in more than 3 of n.
            return Estimate(value, max(value - 3 / whole, 0.0), min(value + 3 / whole, 1.0))
        # Student's t and the degree of freedom that the mean takes: few blocks vary too little.
        wider = (1 + (Z**2 + 1) / (4 * (blocks - 1))) * math.sqrt(blocks / (blocks - 1))
        # A queue that outlasts a block makes the next one alike.
        rest = [part - value * one for part, one in zip(self.parts, self.wholes, strict=True)]
        alike = sum(map(mul, rest, rest[1:])) / (sum(map(mul, rest, rest)) or 1.0)
        alike = min(max(alike, 0.0), MOST_ALIKE)
        wider *= math.sqrt((1 + alike) / (1 - alike))
        return Estimate(value, value - (value - low) * wider, value + (high - value) * wider)


@functools.cache
def _draws(blocks: int) -> list[itemgetter[Sequence[float]]]:
    """Return the draws of a bootstrap, which are the same each time."""
    numbers = random.Random(SEED)  # noqa: S311 - no secret
    return [itemgetter(*numbers.choices(range(blocks), k=blocks)) for _ in range(DRAWS)]


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
        blocks: Observations per bucket, not cumulative, the last of +Inf; at least one block.
    """

    def __init__(self, bounds: Sequence[float], blocks: Sequence[Sequence[float]]) -> None:
        self._edges = [0.0, *bounds, math.inf]
        if any(len(block) != len(bounds) + 1 for block in blocks):
            raise ValueError("not as many buckets as bounds")
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
        part = (value - low) / (high - low) if low < high < math.inf else 0.0
        counts = (block[bucket - 1 : bucket + 1] for block in self._blocks)
        return Ratio(
            [before + (after - before) * part for before, after in counts],
            [block[-1] for block in self._blocks],
        )


Distribution = Values | Buckets


def quantile(found: Distribution, share: float) -> Estimate | None:
    """Return a quantile; None without observations.

    Its interval reaches from the quantile at the lower bound of the share that lies below it to that
    at the upper bound (Woodruff, 1952). Of buckets it has whole ones, since nothing is known of the
    places within them.
    """
    if not found.count > 0:
        return None
    value = found.at(share)[1]
    below = found.below(value)
    lies = below.estimate()
    sides = (
        sum(part > 0 for part in below.parts),
        sum(part < whole for part, whole in zip(*below[:2], strict=True)),
    )
    is_rare = min(*sides, found.count * (1 - share)) < MIN_TAIL
    if is_rare or lies is None or lies.low is None or lies.high is None:
        return Estimate(value)
    low = found.at(share - (lies.value - lies.low))[0]
    high = found.at(share + (lies.high - lies.value))[2]
    return Estimate(value, low, high) if high < math.inf else Estimate(value)


def difference(a: Estimate, b: Estimate) -> Estimate:
    """Return B - A; its interval combines those of both (MOVER; Zou and Donner, 2008)."""
    value = b.value - a.value
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Estimate(value)
    return Estimate(
        value,
        value - math.hypot(b.value - b.low, a.high - a.value),
        value + math.hypot(b.high - b.value, a.value - a.low),
    )


def relative_change(a: Estimate, b: Estimate) -> Estimate | None:
    """Return B / A - 1, by the difference of logarithms; None if one of them is 0."""
    if not (a.value > 0 and b.value > 0):
        return None
    value, low, high = difference(_logarithm(a), _logarithm(b))
    known = (each for each in (value, low, high) if each is not None)
    return Estimate(*(math.expm1(min(max(each, -FARTHEST), FARTHEST)) for each in known))


def _logarithm(of: Estimate) -> Estimate:
    if of.low is None or of.high is None or of.low <= 0:
        return Estimate(math.log(of.value))
    return Estimate(math.log(of.value), math.log(of.low), math.log(of.high))


class Measurement(NamedTuple):
    """Measurements of one input.

    Attributes:
        dialect: The kind of its engines, such as ``vllm``.
        extent: What was measured, in words.
        ratios: Quotients by the names in ``report.QUANTITIES``, or of parts and limits.
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
