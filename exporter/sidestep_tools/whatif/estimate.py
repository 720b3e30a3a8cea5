"""Hit-ratio curves: of a trace, from a sample of its blocks, and of the lookups in a recording."""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from sidestep.engines.dialects import DIALECTS
from sidestep.errors import ConfigError, WireError
from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.protocol.limits import printable
from sidestep.tracking.kv_blocks.hit_ratio_curve import Point
from sidestep.tracking.kv_blocks.hot_blocks import HotBlocks
from sidestep.tracking.kv_blocks.lookups import HORIZON, LookupSettings, LookupTracker
from sidestep.tracking.kv_blocks.reuse import ReuseTracker
from sidestep_adapters.recording.format import MAGIC, Items, read

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


def is_recording(path: Path) -> bool:
    """Return whether a file is a recording of ``sidestep record``; False if it is no regular file."""
    if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises where a directory cannot be read
        return False
    for opener in (gzip.open, open):
        try:
            with opener(path, "rb") as file:
                return bool(file.read(len(MAGIC)) == MAGIC)
        except (OSError, EOFError):
            continue
    return False


class RecordedCurve:
    """Reuse distances of all engines of a recording, each of which has a cache of its own.

    Raises:
        ConfigError: The recording is damaged, or has no lookups.

    Attributes:
        sizes: Sizes that fit the present cache, in blocks; empty where that is unknown.
    """

    def __init__(self, path: Path) -> None:
        trackers: dict[tuple[str, int], LookupTracker] = {}
        for record in read(path):
            if not isinstance(record, Items):
                continue
            for raw in record.items:
                try:
                    item = DIALECTS.decode(raw)
                    if isinstance(item, CacheLookups):
                        engine = record.stream, item.engine
                        if engine not in trackers:
                            trackers[engine] = LookupTracker(LookupSettings(math.inf))
                        trackers[engine].apply(item)
                except WireError as error:
                    raise ConfigError(f"{path}: damaged: {printable(error)}") from None
        if not trackers:
            raise ConfigError(
                f"{path}: the recording has no lookups of blocks: engines with the tap send them if"
                " sidestep record has an exporter to --connect to"
            )
        self._reuses = [tracker.reuse for tracker in trackers.values()]
        self.block_size = max(tracker.block_size for tracker in trackers.values())
        capacity = max(tracker.capacity for tracker in trackers.values())
        largest = HORIZON * capacity
        self.sizes = [largest >> shift for shift in range(7, -1, -1) if largest >> shift]

    @property
    def accesses(self) -> int:
        """Number of lookups."""
        return round(sum(reuse.curve.lookups for reuse in self._reuses))

    @property
    def distinct(self) -> int:
        """Estimated number of distinct blocks within eight sizes of the cache."""
        return round(sum(reuse.tracked / reuse.rate for reuse in self._reuses))

    def points(self, capacities: Sequence[int]) -> list[Point]:
        """Return the mean of the engines' curves, weighted by lookups."""
        curves = [(reuse.curve.lookups, reuse.points(capacities)) for reuse in self._reuses]
        known = [(lookups, points) for lookups, points in curves if points]
        total = sum(lookups for lookups, _ in known)
        return [
            Point(
                capacity,
                *(
                    sum(lookups * points[index][field] for lookups, points in known) / total
                    for field in (1, 2, 3)
                ),
            )
            for index, capacity in enumerate(capacities)
        ]
