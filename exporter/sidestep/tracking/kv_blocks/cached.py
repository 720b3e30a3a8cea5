"""Tracking of cached KV blocks by hash, separately for each medium.

An LRU cache removes blocks in the order of their last use. A cache that is larger by N blocks also has
the N blocks that were removed last (Mattson et al., 1970). So the number of blocks removed after a block
that is stored again is the number of blocks by which the cache was too small to have it.
"""

from __future__ import annotations

import math
from collections.abc import Container

import msgspec

from sidestep.errors import WireError
from sidestep.protocol.block_events import FIRST_MEDIUM, MAX_HASHES, CacheChange, CacheEvents
from sidestep.protocol.limits import MAX_LABELS, is_printable
from sidestep.tracking.kv_blocks.lru_stack import LruStack
from sidestep.tracking.kv_blocks.tracker import (
    BlockObservations,
    BlockTracker,
    CachedObservations,
    Diffusion,
    Sampling,
)

ALL = 1 << 64
MASK = ALL - 1
FIRST, SHIFT, SECOND = 0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D, 0xD6E8FEB86659FD93
"""Odd numbers without a pattern. Exporters of the same engines need the same numbers to sample the
same hashes."""
_NEVER = -1.0
"""Placeholder for no stamp; stamps are never negative."""


class _Block(msgspec.Struct, gc=False):
    """A hash in a medium.

    Attributes:
        hit: Stamp of the last hit with a known time.
    """

    birth: float
    weight: float
    hit: float = _NEVER


class _Medium:
    """One medium's tracked blocks by hash."""

    __slots__ = ("blocks", "gaps", "idles", "lifetimes")

    def __init__(self) -> None:
        self.blocks: dict[int, _Block] = {}
        self.lifetimes, self.idles, self.gaps = Diffusion(), Diffusion(), Diffusion()


def check(changes: list[CacheChange]) -> None:
    """Reject changes that are invalid in any state of the cache."""
    if sum(len(change.hashes) for change in changes) > MAX_HASHES:
        raise WireError("too_big", "more hashes than an item may have")
    if not all(is_printable(change.medium) for change in changes):
        raise WireError("bad_label", "a medium's name is not printable")
    if len({change.medium for change in changes if change.kind == "stored"}) > MAX_LABELS:
        raise WireError("bad_item", "too many media")


class CachedBlocks(BlockTracker):
    """Cached blocks of one engine, sampled by a mix of their hash alone.

    A hash is tracked through all its events on all ranks, or not at all. A sample is a subset of any
    sample at a higher rate. The drawback is that all lifetimes of a hash are in the sample together.
    """

    def __init__(self, sampling: Sampling) -> None:
        super().__init__(sampling)
        self._media: dict[str, _Medium] = {}
        self._is_whole = False
        """True if all cached hashes of the sample are tracked."""
        self._source: int | None = None
        self._removed = LruStack()
        """Hashes that the GPU's cache has removed; at most ``capacity``, tracked hashes included."""
        self._removed_rate = sampling.rate
        self._stores, self._absences = Diffusion(), Diffusion()

    @property
    def rate(self) -> float:
        """Share of hashes that is sampled."""
        return self._sampling.rate

    def apply(self, item: CacheEvents) -> BlockObservations:
        """Track an item's changes."""
        self._check(item.changes)
        if item.source != self._source:
            self._source = item.source
            self._out.abandoned += self.tracked
            self._clear("")
            self._is_whole = False
        if self._sampling.rate != self._removed_rate:
            # Depths count hashes of one sample.
            self._removed_rate = self._sampling.rate
            self._removed = LruStack()
            self._is_whole = False
        for change in item.changes:
            match change.kind:
                case "stored":
                    self._store(change.medium, change.hashes, change.stamp)
                case "removed":
                    self._remove(change.medium, change.hashes, change.stamp)
                case "cleared":
                    self._clear(change.medium)
                    self._is_whole = self._is_whole or not change.medium
                case "begun":
                    self._is_whole = True
                case "lost":
                    self._is_whole = False
        return self.drain()

    def resize(self, capacity: int) -> None:
        """Track at most ``capacity`` blocks; abandon the newest excess ones."""
        self.capacity = capacity
        for medium in self._media.values():
            while medium.blocks and self.tracked > capacity:
                medium.blocks.popitem()
                self.tracked -= 1
                self._out.abandoned += 1
                self._is_whole = False
        self._shrink()

    def _check(self, changes: list[CacheChange]) -> None:
        check(changes)
        stored = {change.medium for change in changes if change.kind == "stored"}
        if not stored <= self._media.keys() and len(stored | self._media.keys()) > MAX_LABELS:
            raise WireError("bad_item", "too many media")

    def _clear(self, name: str) -> None:
        """Drop the blocks of one medium, or of all media if ``name`` is empty."""
        for each in [name] if name else {*self._media, *self._out.surplus}:
            self._out.surplus.pop(each, None)
            if each in self._media:
                self.tracked -= len(self._media[each].blocks)
                self._media[each].blocks = {}
        if name in {"", FIRST_MEDIUM}:
            # A larger cache would have been cleared, too.
            self._removed = LruStack()

    def _store(self, name: str, hashes: list[int], now: float) -> None:
        medium = self._media.get(name)
        if medium is None:
            medium = self._media[name] = _Medium()
        blocks, rate = medium.blocks, self._sampling.rate
        hashes = _sample(hashes, rate, blocks)
        weight = self._sampling.weight(rate)
        for value in hashes:
            block = blocks.get(value)
            if block is None:
                if name == FIRST_MEDIUM:
                    self._observe_store(value, now, weight)
                if self.tracked < self.capacity:
                    blocks[value] = _Block(now, weight)
                    self.tracked += 1
                    self._shrink()
                else:
                    self._out.refused += 1
                    self._is_whole = False
                continue
            self._count_surplus(name, 1)
            before = block.hit
            if now < max(block.birth, before):
                self._out.unknown += 1
                continue
            block.hit = now
            if before != _NEVER:
                medium.gaps.observe(self._of(name).gaps, now - before, block.weight)

    def _remove(self, name: str, hashes: list[int], now: float) -> None:
        medium = self._media.get(name) or _Medium()
        blocks = medium.blocks
        gone, absent = [], []
        for value in hashes:
            if value not in blocks:
                absent.append(value)
                continue
            block = blocks.pop(value)
            gone.append(value)
            self.tracked -= 1
            last = max(block.birth, block.hit)
            if now < last:
                self._out.unknown += 1
                continue
            observed = self._of(name)
            medium.lifetimes.observe(observed.lifetimes, now - block.birth, block.weight)
            medium.idles.observe(observed.idles, now - last, block.weight)
        if self._is_whole and (again := _sample(absent, self._sampling.rate)):
            self._count_surplus(name, -len(again))
        if name == FIRST_MEDIUM:
            # Hashes tracked at a higher rate may not be in the present sample.
            for value in _sample(gone, self._removed_rate):
                self._removed.remove(value)
                self._removed.push(value, now)

    def _count_surplus(self, name: str, count: int) -> None:
        """Count sampled hashes that were stored again, or removed again if ``count`` is negative."""
        if self._is_whole and self._sampling.rate:
            surplus = self._out.surplus.get(name, 0) + count * round(1 / self._sampling.rate)
            self._out.surplus[name] = surplus

    def _observe_store(self, value: int, now: float, weight: float) -> None:
        """Observe by how many blocks the GPU's cache was too small to have a hash that is stored."""
        removal = self._removed.remove(value)
        if removal is None:
            self._stores.observe(self._out.stores, math.inf, weight)
            return
        later, stamp = removal
        self._stores.observe(self._out.stores, later / self._removed_rate, weight)
        if now < stamp:
            self._out.unknown += 1
        else:
            self._absences.observe(self._out.absences, now - stamp, weight)

    def _shrink(self) -> None:
        """Forget the hashes that were removed first, where there are too many."""
        while self._removed.counted and self.tracked + self._removed.counted > self.capacity:
            self._removed.drop_oldest()

    def _of(self, name: str) -> CachedObservations:
        observed = self._out.cached.get(name)
        if observed is None:
            observed = self._out.cached[name] = CachedObservations()
        return observed


def _sample(hashes: list[int], rate: float, tracked: Container[int] = ()) -> list[int]:
    """Return the hashes that are in the sample, or tracked."""
    if rate >= 1.0:
        return hashes
    bound = int(rate * ALL)
    # Engines' hashes can be counters, aligned, or shorter than 64 bits. The mix makes the top bits
    # depend on all bits. Nearly all hashes end at this line.
    return [
        value
        for value in hashes
        if ((first := value * FIRST + SHIFT & MASK) ^ first >> 32) * SECOND & MASK < bound
        or value in tracked
    ]
