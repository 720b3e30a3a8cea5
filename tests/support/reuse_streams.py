"""Streams of block lookups, and the exact hit ratio of an LRU cache over its capacity."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, count, cycle, islice
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


def conversations(seed: int) -> list[int]:
    """Return prompts of conversations that grow by turns, behind a few system prompts."""
    random, fresh = Random(seed), count(1 << 30)
    systems = [[*islice(fresh, random.randint(4, 40))] for _ in range(5)]
    running: list[list[int]] = []
    stream: list[int] = []
    while len(stream) < 200_000:
        if not running or random.random() < 0.2:
            running.append(random.choices(systems, [8, 4, 2, 1, 1])[0].copy())
            del running[: len(running) - 400]
        prompt = random.choice(running)
        prompt += islice(fresh, random.randint(1, 12))
        stream += prompt
    return stream


def tools(seed: int) -> list[int]:
    """Return prompts that begin with one of few long prefixes, and end with blocks of their own."""
    random, fresh = Random(seed), count(1 << 30)
    prefixes = [[*islice(fresh, random.randint(5, 60))] for _ in range(40)]
    shares = [(rank + 1) ** -1.2 for rank in range(40)]
    stream: list[int] = []
    while len(stream) < 200_000:
        prefix = random.choices(prefixes, shares)[0]
        stream += prefix[: random.randint(1, len(prefix))]
        stream += islice(fresh, random.randint(1, 8))
    return stream


def drift(seed: int) -> list[int]:
    """Return a load whose popular blocks change ten times."""
    parts = [zipf(20_000, 1.0, 20_000, seed + part, part * 5_000) for part in range(10)]
    return [*chain.from_iterable(parts)]


def loops(seed: int) -> list[int]:
    """Return four loops of different lengths, which take turns."""
    random = Random(seed)
    circles = [cycle(range(at << 30, (at << 30) + (2_000 << at))) for at in range(4)]
    turns = (islice(random.choice(circles), 30) for _ in range(6_000))
    return [*chain.from_iterable(turns)]


LOADS: Mapping[str, Callable[[], list[int]]] = {
    "zipf 0.5": lambda: zipf(200_000, 0.5, 80_000, 1),
    "zipf 0.8": lambda: zipf(200_000, 0.8, 80_000, 1),
    "zipf 1.1": lambda: zipf(200_000, 1.1, 200_000, 2),
    "zipf 1.5": lambda: zipf(200_000, 1.5, 1_000_000, 3),
    "scan": lambda: [*range(100_000)],
    "loop": lambda: [*range(50_000)] * 3,
    "loops": lambda: loops(4),
    "phases": lambda: phases(3),
    "popular blocks in a scan": lambda: scanned(4),
    "conversations": lambda: conversations(1),
    "tools": lambda: tools(2),
    "drift": lambda: drift(3),
}


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
