"""Streams of block lookups, and the exact hit ratio of an LRU cache over its capacity."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, cycle, islice
from random import Random


def zipf(lookups: int, exponent: float, blocks: int, seed: int, base: int = 0) -> list[int]:
    """Return lookups of blocks of which the n-th most popular has a share of n ** -exponent."""
    random = Random(seed)
    sums = [*accumulate((rank + 1) ** -exponent for rank in range(blocks))]
    return [base + bisect_left(sums, random.random() * sums[-1]) for _ in range(lookups)]


def loops(seed: int) -> list[int]:
    """Return four loops of different lengths, which take turns."""
    random = Random(seed)
    circles = [cycle(range(at << 30, (at << 30) + (500 << at))) for at in range(4)]
    turns = (islice(random.choice(circles), 30) for _ in range(800))
    return [*chain.from_iterable(turns)]


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
