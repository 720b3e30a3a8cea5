"""The blocks that are looked up most, found among all lookups in bounded memory.

A sample contains all lookups of a block or none. It would miss a block that every prompt begins with, or
count it many times over. So such blocks are counted one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable

LEAST = 8
"""Lookups from which on a block is hot."""
WINDOW = 1 << 20
"""Lookups after which counts are halved, so that blocks of former times do not stay hot."""


class HotBlocks:
    """Finder of the blocks that are looked up most (Misra and Gries, 1982).

    Args:
        most: About the most blocks that are hot: each has at least 1/``most`` of the lookups.
    """

    def __init__(self, most: int) -> None:
        self.hot: set[Hashable] = set()
        self._most = most
        self._counts: Counter[Hashable] = Counter()
        self._lookups = 0

    def note(self, keys: Collection[Hashable]) -> None:
        """Count lookups."""
        counts, hot = self._counts, self.hot
        threshold = max(LEAST, self._lookups // self._most)
        counts.update(keys)
        hot.update([key for key in keys if counts[key] >= threshold])
        self._lookups += len(keys)
        if self._lookups > WINDOW:
            self._lookups //= 2
            self._counts = Counter({key: n // 2 for key, n in counts.items() if n > 1})
            self._cool()
        elif len(counts) > 2 * self._most:
            self._counts = Counter({key: n - 1 for key, n in counts.items() if n > 1})
            self._cool()

    def _cool(self) -> None:
        """Forget blocks that have less than half of the lookups that make a block hot."""
        keep, counts = self._lookups // (2 * self._most), self._counts
        self.hot = {key for key in self.hot if counts.get(key, 0) >= keep}
