"""Streams of block lookups, and the exact hit ratio of an LRU cache over its capacity."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from random import Random


def zipf(lookups: int, exponent: float, blocks: int, seed: int, base: int = 0) -> list[int]:
    """Return lookups of blocks of which the n-th most popular has a share of n ** -exponent."""
    random = Random(seed)
    sums = [*accumulate((rank + 1) ** -exponent for rank in range(blocks))]
    return [base + bisect_left(sums, random.random() * sums[-1]) for _ in range(lookups)]


def phases(seed: int) -> list[int]:
    """Return a load that changes: two sets of popular blocks, then a loop."""
    loop = [*range(2 << 20, (2 << 20) + 27_000)]
    return zipf(80_000, 0.9, 40_000, seed) + zipf(80_000, 0.6, 40_000, seed + 1, 1 << 20) + loop * 3


def scanned(seed: int) -> list[int]:
    """Return popular blocks between blocks that are never used again."""
    popular = zipf(100_000, 1.0, 30_000, seed)
    return [block for pair in zip(popular, range(1 << 20, 2 << 20)) for block in pair]  # noqa: B905


def exact(stream: Sequence[int], capacities: Sequence[int]) -> list[float]:
    """Return the hit ratios of LRU caches: a Fenwick tree over the places of last uses."""
    size = len(stream)
    tree = [0] * (size + 1)
    last: dict[int, int] = {}
    distances = []
    for place, block in enumerate(stream, start=1):
        before = last.get(block)
        if before is not None:
            at, below = before, 0
            while at:
                below += tree[at]
                at &= at - 1
            distances.append(len(last) - below + 1)
            _add(tree, before, -1)
        _add(tree, place, 1)
        last[block] = place
    distances.sort()
    return [bisect_right(distances, capacity) / size for capacity in capacities]


def _add(tree: list[int], at: int, value: int) -> None:
    while at < len(tree):
        tree[at] += value
        at += at & -at
