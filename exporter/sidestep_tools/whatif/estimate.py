"""The hit-ratio curve of a trace, from a sample of its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sidestep.tracking.kv_blocks.hit_ratio_curve import Point
from sidestep.tracking.kv_blocks.hot_blocks import HotBlocks
from sidestep.tracking.kv_blocks.reuse import ReuseTracker

EXACT = 1 << 20
"""Distinct blocks that are counted exactly at most, and most blocks of a sample."""
LEAST = 8192
"""Blocks of a sample with which the curve has an error of a fraction of a per cent."""
BITS = 1 << 27
"""Bits of the bitmap that counts more distinct blocks, with an error of about 0.01 %."""
SLICE = 64
"""Lookups between two counts of the distinct blocks."""
HOT = 8192
"""About the most blocks that are counted one by one."""
_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
"""Odd numbers without a pattern."""


def keys_of(blocks: Iterable[int], salt: int) -> list[int]:
    """Return a number of 64 bits for each block, which depends on all bits of block and salt."""
    keys = []
    for block in blocks:
        mixed = (block + salt) * _FIRST & _MASK
        mixed = (mixed ^ mixed >> 32) * _SECOND & _MASK
        keys.append(mixed ^ mixed >> 32)
    return keys


class DistinctBlocks:
    """Number of distinct keys, in bounded memory: a set, then linear counting in a bitmap."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._bits = bytearray()
        self._set_bits = 0

    def add(self, keys: Iterable[int]) -> None:
        """Count keys, which are uniformly distributed."""
        if not self._bits:
            self._known.update(keys)
            if len(self._known) <= EXACT:
                return
            self._bits = bytearray(BITS >> 3)
            keys = self._known
            self._known = set()
        bits, set_bits = self._bits, 0
        for key in keys:
            place, bit = key % BITS >> 3, 1 << (key & 7)
            if not bits[place] & bit:
                bits[place] |= bit
                set_bits += 1
        self._set_bits += set_bits

    def __float__(self) -> float:
        if not self._bits:
            return float(len(self._known))
        return -BITS * math.log(max(BITS - self._set_bits, 1) / BITS)


class TraceCurve:
    """Reuse distances of a trace: each lookup is a use of its block in an LRU cache.

    Args:
        rate: Share of the blocks that is sampled, above 0; at least ``LEAST`` blocks are.
    """

    def __init__(self, rate: float, salt: int) -> None:
        self.accesses = 0
        self._rate = rate
        self._salt = salt
        self._distinct = self._since_clear = DistinctBlocks()
        self._cold = 0.0
        """First uses before the cache was cleared."""
        self._hot = HotBlocks(HOT)
        self._tracker = ReuseTracker(max_blocks=LEAST)
        self._tracker.counts_uses = True

    @property
    def distinct(self) -> int:
        """Number of distinct blocks."""
        return round(float(self._distinct))

    def clear(self) -> None:
        """Empty the cache, which finds none of the blocks that were used before."""
        self._cold += float(self._since_clear)
        self._since_clear = DistinctBlocks()
        self._tracker.restart()

    def add(self, blocks: Sequence[int]) -> None:
        """Use ``blocks``, in order."""
        for start in range(0, len(blocks), SLICE):
            self._use(keys_of(blocks[start : start + SLICE], self._salt))

    def _use(self, keys: Sequence[int]) -> None:
        tracker, number = self._tracker, self.accesses
        if tracker.rate <= self._rate:
            tracker.max_blocks = EXACT
        self._hot.note(keys)
        hot = self._hot.hot
        tracker.distinct = float(self._since_clear)
        for key in keys:
            number += 1
            if key in hot:
                tracker.use(key, number, is_hot=True, is_hit=True)
            elif key >= tracker.floor:
                tracker.use(key, number, is_hot=False, is_hit=None)
        self.accesses = number
        self._distinct.add(keys)
        if self._since_clear is not self._distinct:
            self._since_clear.add(keys)

    def points(self, capacities: Sequence[int]) -> list[Point]:
        """Return the curve at ``capacities``, in blocks; call once, at the end."""
        cold = min(self._cold + float(self._since_clear), self.accesses)
        self._tracker.curve.count(cold, self.accesses - cold)
        return self._tracker.points(capacities)
