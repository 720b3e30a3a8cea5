"""The curve of a trace, from a sample of its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sidestep.tracking.kv_blocks.hit_curve import Point
from sidestep.tracking.kv_blocks.hot_blocks import HotBlocks
from sidestep.tracking.kv_blocks.reuse import ReuseTracker

EXACT = 1 << 20
"""Distinct blocks up to which they are counted exactly, and blocks of the sample at most."""
BITS = 1 << 27
"""Bits of the bitmap that counts more of them, with an error of about 0.01 %."""
HOT = 8192
"""About the most blocks that are counted one by one."""
_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
"""Odd numbers without a pattern."""


def mix(block: int, salt: int) -> int:
    """Return a number of 64 bits that depends on all bits of both."""
    mixed = (block + salt) * _FIRST & _MASK
    mixed = (mixed ^ mixed >> 32) * _SECOND & _MASK
    return (mixed ^ mixed >> 32) * _FIRST & _MASK


class DistinctBlocks:
    """Number of distinct keys, in bounded memory: a set, then linear counting in a bitmap."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._bits = bytearray()
        self._set_bits = 0

    def add(self, key: int) -> None:
        """Count a key, which is uniformly distributed."""
        if not self._bits:
            self._known.add(key)
            if len(self._known) <= EXACT:
                return
            self._bits = bytearray(BITS >> 3)
            for known in self._known:
                self._set(known)
            self._known.clear()
        self._set(key)

    def _set(self, key: int) -> None:
        place, bit = key % BITS >> 3, 1 << (key & 7)
        if not self._bits[place] & bit:
            self._bits[place] |= bit
            self._set_bits += 1

    def __float__(self) -> float:
        if not self._bits:
            return float(len(self._known))
        return -BITS * math.log(max(BITS - self._set_bits, 1) / BITS)


class TraceCurve:
    """Reuse distances of a trace: each lookup is a use of its block in an LRU cache.

    Args:
        rate: Share of the blocks that is sampled, above 0.
        salt: Selects the sample.

    Attributes:
        accesses: Number of lookups.
    """

    def __init__(self, rate: float, salt: int) -> None:
        self.accesses = 0
        self._salt = salt
        self._distinct = self._since_clear = DistinctBlocks()
        self._cold = 0.0
        """First uses before the cache was cleared."""
        self._hot = HotBlocks(HOT)
        self._tracker = ReuseTracker(most=EXACT)
        self._tracker.counts_uses = True
        self._tracker.sample(rate)

    @property
    def distinct(self) -> int:
        """Number of distinct blocks."""
        return round(float(self._distinct))

    @property
    def sampled(self) -> int:
        """Number of sampled blocks."""
        return self._tracker.tracked

    def clear(self) -> None:
        """Empty the cache, which finds none of the blocks that were used before."""
        self._cold += float(self._since_clear)
        self._since_clear = DistinctBlocks()
        self._tracker.restart()

    def add(self, blocks: Iterable[int]) -> None:
        """Use ``blocks``, in order."""
        tracker, salt = self._tracker, self._salt
        keys = [mix(block, salt) for block in blocks]
        self._hot.note(keys)
        is_cleared = self._since_clear is not self._distinct
        for key in keys:
            self.accesses += 1
            self._distinct.add(key)
            if is_cleared:
                self._since_clear.add(key)
            is_hot = key in self._hot.hot
            if is_hot or key >= tracker.floor:
                tracker.distinct = float(self._since_clear)
                tracker.use(key, self.accesses, is_hot=is_hot, is_hit=is_hot or key in tracker)

    def points(self, capacities: Sequence[int]) -> list[Point]:
        """Return the curve at ``capacities``, in blocks; call once, at the end."""
        cold = min(self._cold + float(self._since_clear), self.accesses)
        self._tracker.curve.count(cold, self.accesses - cold)
        return self._tracker.points(capacities)
