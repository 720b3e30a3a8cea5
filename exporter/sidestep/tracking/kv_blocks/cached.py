"""Tracking of cached KV blocks by hash, separately for each medium."""

from __future__ import annotations

import msgspec

from sidestep.errors import WireError
from sidestep.protocol.block_events import MAX_HASHES, CacheChange, CacheEvents
from sidestep.protocol.limits import MAX_LABELS, is_printable
from sidestep.tracking.kv_blocks.sampling import Diffusion, Sampling
from sidestep.tracking.kv_blocks.tracker import BlockObservations, BlockTracker, CachedObservations

KINDS = {"stored", "removed", "cleared", "begun", "lost"}
ALL = 1 << 64
MASK = ALL - 1
FIRST, SHIFT, SECOND = 0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D, 0xD6E8FEB86659FD93
"""Odd numbers without a pattern. Exporters of the same engines need equal ones to sample the same
hashes."""
_NEVER = -1.0
"""Placeholder for no stamp; stamps are never negative."""


class _Block(msgspec.Struct, gc=False):
    """A hash in a medium.

    Attributes:
        birth: Stamp at which it was stored.
        weight: Blocks that it stands for.
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
    """Reject ``changes`` that are invalid in any state.

    Raises:
        WireError: A change is malformed or over a limit.
    """
    if {change.kind for change in changes} - KINDS:
        raise WireError("bad_item", "an unknown kind of cache event")
    if sum(len(change.hashes) for change in changes) > MAX_HASHES:
        raise WireError("too_big", "more hashes than an item may have")
    if not all(is_printable(change.medium) for change in changes):
        raise WireError("bad_label", "a medium's name is not printable")
    if len({change.medium for change in changes if change.kind == "stored"}) > MAX_LABELS:
        raise WireError("bad_item", "too many media")


class CachedBlocks(BlockTracker):
    """Cached blocks of one engine, sampled by a mix of their hash alone.

    A hash is tracked through all its events on all ranks or not at all, and a sample is a subset of
    any sample at a higher rate. The cost: all lifetimes of a hash are in the sample together.
    """

    def __init__(self, sampling: Sampling) -> None:
        super().__init__(sampling)
        self._media: dict[str, _Medium] = {}
        self._source: int | None = None

    @property
    def rate(self) -> float:
        """Share of hashes that is sampled."""
        return self._sampling.rate

    def apply(self, item: CacheEvents) -> BlockObservations:
        """Track an item's changes.

        Raises:
            WireError: The item is invalid; nothing of it was applied.
        """
        self._check(item.changes)
        if item.source != self._source:
            self._source = item.source
            self._out.abandoned += self.tracked
            self._clear("")
        for change in item.changes:
            match change.kind:
                case "stored":
                    self._store(change.medium, change.hashes, change.stamp)
                case "removed":
                    self._remove(change.medium, change.hashes, change.stamp)
                case "cleared":
                    self._clear(change.medium)
        return self.drain()

    def resize(self, capacity: int) -> None:
        """Track at most ``capacity`` blocks; abandon the newest excess ones."""
        self.capacity = capacity
        for medium in self._media.values():
            while medium.blocks and self.tracked > capacity:
                medium.blocks.popitem()
                self.tracked -= 1
                self._out.abandoned += 1

    def _check(self, changes: list[CacheChange]) -> None:
        check(changes)
        stored = {change.medium for change in changes if change.kind == "stored"}
        if not stored <= self._media.keys() and len(stored | self._media.keys()) > MAX_LABELS:
            raise WireError("bad_item", "too many media")

    def _clear(self, name: str) -> None:
        """Drop the blocks of one medium, or of all media if ``name`` is empty."""
        named = [self._media[name]] if name in self._media else []
        for medium in named if name else self._media.values():
            if medium.blocks:
                self.tracked -= len(medium.blocks)
                medium.blocks = {}

    def _store(self, name: str, hashes: list[int], now: float) -> None:
        medium = self._media.get(name)
        if medium is None:
            medium = self._media[name] = _Medium()
        blocks, rate = medium.blocks, self._sampling.rate
        if rate < 1.0:
            bound = int(rate * ALL)
            # Engines' hashes can be counters, or aligned, or have less than 64 bits: they are mixed so
            # that the top bits depend on all of theirs. Nearly all hashes end at this line.
            hashes = [
                value
                for value in hashes
                if ((first := value * FIRST + SHIFT & MASK) ^ first >> 32) * SECOND & MASK < bound
                or value in blocks
            ]
        weight = self._sampling.weight(rate)
        for value in hashes:
            block = blocks.get(value)
            if block is None:
                if self.tracked < self.capacity:
                    blocks[value] = _Block(now, weight)
                    self.tracked += 1
                else:
                    self._out.refused += 1
                continue
            before = block.hit
            if now < max(block.birth, before):
                self._out.unknown += 1
                continue
            block.hit = now
            if before != _NEVER:
                medium.gaps.observe(self._of(name).gaps, now - before, block.weight)

    def _remove(self, name: str, hashes: list[int], now: float) -> None:
        medium = self._media.get(name)
        if medium is None:
            return
        blocks = medium.blocks
        for value in hashes:
            if value not in blocks:
                continue
            block = blocks.pop(value)
            self.tracked -= 1
            last = max(block.birth, block.hit)
            if now < last:
                self._out.unknown += 1
                continue
            observed = self._of(name)
            medium.lifetimes.observe(observed.lifetimes, now - block.birth, block.weight)
            medium.idles.observe(observed.idles, now - last, block.weight)

    def _of(self, name: str) -> CachedObservations:
        """Return the observations of one medium."""
        observed = self._out.cached.get(name)
        if observed is None:
            observed = self._out.cached[name] = CachedObservations()
        return observed
