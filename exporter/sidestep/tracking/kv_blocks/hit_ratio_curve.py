"""Hit-ratio curve: the hit ratio over the capacity of an LRU cache, estimated from sampled lookups.

The reuse distance of a lookup is the number of blocks used since the last use of its block, that block
included. A lookup with the distance D hits in every LRU cache of at least D blocks (Mattson et al.,
1970). Distances are those of a spatial sample (SHARDS; Waldspurger et al., FAST 2015).

Two things keep the error small. Hot blocks are counted one by one. And the numbers of all lookups that
hit and that missed are known, so that the sample only needs to tell how the distances of each are
distributed. The sample is divided into groups by hash, whose spread gives the bounds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

FINE = 128
"""Buckets to a doubling of the distance; distances up to this are exact."""
NEVER = 1 << 20
"""Bucket of lookups without a distance: the first use of a block."""
GROUPS = 16
SPREAD = 2.13
"""Student's t of the two-sided interval of 95 %, with as many groups."""
_COARSE = 4
"""A group's buckets are 16 times as wide."""
_LINEAR = FINE - FINE * math.log2(FINE)
_FADE_AT = 256
"""Half-lives after which all weights are divided, before they become too large for a float."""
_LEAST_WEIGHT = 1e-9
Histogram = dict[int, float]


class Point(NamedTuple):
    """Hit ratio at a capacity, and the bounds of its sampling error.

    In about nine of ten cases the ratio of a curve of all blocks is within the bounds. A real cache of
    another size may differ by more, since it also changes which requests run at the same time.
    """

    blocks: int
    hit_ratio: float
    low: float
    high: float


def bucket(distance: float) -> int:
    """Return the bucket of a distance of at least 1."""
    return int(distance if distance <= FINE else _LINEAR + FINE * math.log2(distance))


class _Lookups:
    """Lookups that did hit, or lookups that did not.

    Attributes:
        total: Weight of all lookups, sampled or not.
        hot: Distances of lookups of hot blocks.
        sampled: Distances of sampled lookups.
        groups: The same in wide buckets, each with the weight of every group of blocks.
    """

    __slots__ = ("groups", "hot", "sampled", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.hot: Histogram = {}
        self.sampled: Histogram = {}
        self.groups: dict[int, list[float]] = {}

    @property
    def rest(self) -> float:
        """Lookups of blocks that are not hot."""
        return max(self.total - sum(self.hot.values()), 0.0)

    def fade(self, by: float) -> None:
        """Divide all weights."""
        self.total /= by
        faded = {n: [weight / by for weight in row] for n, row in self.groups.items()}
        self.groups = {n: row for n, row in faded.items() if sum(row) > _LEAST_WEIGHT}
        for histogram in (self.hot, self.sampled):
            kept = {n: weight / by for n, weight in histogram.items()}
            histogram.clear()
            histogram.update((n, weight) for n, weight in kept.items() if weight > _LEAST_WEIGHT)


class HitRatioCurve:
    """Reuse distances of lookups, weighted by age.

    Args:
        half_life: Seconds after which a lookup counts half; None: all count the same.
    """

    def __init__(self, half_life: float | None = None) -> None:
        self._half_life = half_life
        self._origin: float | None = None
        self._gain = 1.0
        """Weight of a lookup now. It grows, which is cheaper than to fade all earlier lookups."""
        self._by_result = _Lookups(), _Lookups()
        self._unreachable = 0.0

    def advance(self, now: float) -> None:
        """Let the lookups until now fade."""
        if self._half_life is None:
            return
        if self._origin is None:
            self._origin = now
        half_lives = max(now - self._origin, 0.0) / self._half_life
        if half_lives > _FADE_AT:
            # A larger divisor than a float can hold would leave nothing, either.
            divisor = 2.0 ** min(half_lives, 1000.0)
            for lookups in self._by_result:
                lookups.fade(divisor)
            self._unreachable /= divisor
            self._origin, half_lives = now, 0.0
        self._gain = 2.0**half_lives

    def count(self, missed: float, found: float, unreachable: float = 0.0) -> None:
        """Count lookups, sampled or not; unreachable ones hit in no cache."""
        self._unreachable += unreachable * self._gain
        misses, hits = self._by_result
        misses.total += missed * self._gain
        hits.total += found * self._gain

    def observe(self, key: int, number: int, weight: float, *, hit: bool) -> None:
        """Add a sampled lookup of block ``key`` in a bucket, which stands for ``weight`` lookups."""
        weight *= self._gain
        lookups = self._by_result[hit]
        sampled, groups = lookups.sampled, lookups.groups
        sampled[number] = sampled.get(number, 0.0) + weight
        wide = number >> _COARSE
        row = groups.get(wide)
        if row is None:
            row = groups[wide] = [0.0] * GROUPS
        row[key % GROUPS] += weight

    def observe_hot(self, number: int, weight: float, *, hit: bool) -> None:
        """Add ``weight`` lookups of hot blocks in a bucket."""
        hot = self._by_result[hit].hot
        hot[number] = hot.get(number, 0.0) + weight * self._gain

    @property
    def lookups(self) -> float:
        """All lookups, weighted by age."""
        return self._total / self._gain

    @property
    def hit_ratio(self) -> float | None:
        """Share of the lookups that did hit; None without lookups."""
        return self._by_result[True].total / self._total if self._total else None

    @property
    def _total(self) -> float:
        return sum(lookups.total for lookups in self._by_result) + self._unreachable

    def hit_ratios(self, capacities: Sequence[float]) -> list[float]:
        """Return the hit ratios at numbers of blocks; empty without lookups."""
        total = self._total
        if not total:
            return []
        numbers = [bucket(max(capacity, 1.0)) for capacity in capacities]
        hits = [0.0] * len(numbers)
        for lookups in self._by_result:
            rest, size = lookups.rest, sum(lookups.sampled.values())
            known = zip(_up_to(lookups.hot, numbers), _up_to(lookups.sampled, numbers), strict=True)
            for index, (hot, sampled) in enumerate(known):
                hits[index] += hot + rest * _share(sampled, size)
        return [
            min(hit / total, 1.0) if capacity >= 1 else 0.0
            for hit, capacity in zip(hits, capacities, strict=True)
        ]

    def points(self, capacities: Sequence[int], rate: float, sampled: int) -> list[Point]:
        """Return the curve at ``capacities``, with bounds; empty without lookups."""
        ratios = self.hit_ratios(capacities)
        if not ratios:
            return []
        # A distance has an error of its own, that of the number of sampled blocks in it (a Poisson
        # distribution). The error repeats where the same blocks are used again and again. And buckets
        # are wide.
        half = SPREAD * math.sqrt(1.0 - rate) / 2
        numbers = [max(min(rate * capacity, sampled), 1.0) for capacity in capacities]
        stretches = [
            (math.sqrt(number + half * half) + half) ** 2 / number
            + (1.0 / FINE if capacity > FINE else 0.0)
            for capacity, number in zip(capacities, numbers, strict=True)
        ]
        pairs = [*zip(capacities, stretches, strict=True)]
        bounds = [capacity / stretch for capacity, stretch in pairs]
        bounds += [capacity * stretch for capacity, stretch in pairs]
        bounds = self.hit_ratios(bounds)
        below, above = bounds[: len(pairs)], bounds[len(pairs) :]
        errors = self._errors(capacities, self._gain / rate)
        found = []
        for capacity, ratio, least, most, error in zip(
            capacities, ratios, below, above, errors, strict=True
        ):
            spread = SPREAD * error * math.sqrt(1.0 - rate)
            low = ratio - math.hypot(spread, ratio - least)
            high = ratio + math.hypot(spread, most - ratio)
            found.append(Point(capacity, ratio, max(low, 0.0), min(high, 1.0)))
        return found

    def _errors(self, capacities: Sequence[int], weight: float) -> list[float]:
        """Return the standard errors of the hit ratios, from the differences between groups of blocks.

        Even if all groups agree, there may be lookups too few to be in the sample: up to ``weight``, the
        number that a sampled lookup stands for.
        """
        numbers = [bucket(max(capacity, 1)) >> _COARSE for capacity in capacities]
        total = self._total
        residuals = [[0.0] * GROUPS for _ in numbers]
        unseen = 0.0
        for lookups in self._by_result:
            rest, groups = lookups.rest / total, lookups.groups
            known = sorted(groups)
            sums = [[0.0] * GROUPS]
            for number in known:
                sums.append([*map(add, sums[-1], groups[number])])
            sizes = sums[-1]
            size = sum(sizes)
            if not size:
                continue
            unseen += rest * _share(weight, size)
            for row, number in zip(residuals, numbers, strict=True):
                hits = sums[bisect_right(known, number)]
                share = sum(hits) / size
                for group in range(GROUPS):
                    row[group] += rest / size * (hits[group] - share * sizes[group])
        gain = math.sqrt(GROUPS / (GROUPS - 1))
        return [math.hypot(gain * math.hypot(*row), unseen) for row in residuals]


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0.0 else 0.0


def _up_to(histogram: Histogram, numbers: Sequence[int]) -> list[float]:
    """Return the weight in the buckets up to each of ``numbers``."""
    known = sorted(histogram)
    sums = [0.0, *accumulate(histogram[number] for number in known)]
    return [sums[bisect_right(known, number)] for number in numbers]
