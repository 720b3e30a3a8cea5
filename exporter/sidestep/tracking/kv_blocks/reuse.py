"""Reuse distances of the lookups of a prefix cache, and the reasons of misses.

The model is the cache of vLLM: a request holds the blocks of its prompt until it ends, and blocks that
no request holds are evicted in the order of their release. So the blocks above a released block are
those that are held now and those that were released after it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from heapq import heappop, heappush

import msgspec

from sidestep.protocol.cache_lookups import Lookup
from sidestep.tracking.kv_blocks.hit_ratio_curve import NEVER, HitRatioCurve, Point, bucket
from sidestep.tracking.kv_blocks.lru_stack import LruStack

SIFT = 8
"""Keys that the addition of one key sifts, so that no call has to sift all of them."""


class LeastKeys:
    """Heap of distinct keys, which yields the least one."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._heap: list[int] = []
        self._unsifted: list[int] = []
        """Another heap, from which tracked keys are moved into the first one."""

    def __len__(self) -> int:
        return len(self._known)

    def add(self, key: int, tracked: Container[int], most: int) -> None:
        """Add a key; with more than twice ``most`` of them, forget those that are not ``tracked``."""
        if key in self._known:
            return
        self._known.add(key)
        heappush(self._heap, key)
        if self._unsifted:
            self._sift(tracked)
        elif len(self._known) > 2 * most:
            self._unsifted, self._heap = self._heap, []

    def pop(self) -> int:
        """Remove the least key."""
        key = heappop(self._lower_heap())
        self._known.discard(key)
        return key

    def _lower_heap(self) -> list[int]:
        heap, unsifted = self._heap, self._unsifted
        return unsifted if unsifted and (not heap or unsifted[0] < heap[0]) else heap

    def _sift(self, tracked: Container[int]) -> None:
        unsifted = self._unsifted
        for _ in range(min(SIFT, len(unsifted))):
            # A heap without its last item is still a heap.
            key = unsifted.pop()
            if key in tracked:
                heappush(self._heap, key)
            else:
                self._known.discard(key)


ALL = 1 << 64
_UNIT = 1.0 / ALL
MAX_BLOCKS = 1 << 16
"""Blocks of the sample that are tracked at once."""
MAX_EXTRA = 1 << 14
"""Hot blocks outside of the sample that are tracked at once."""
TRIM = 256
"""Blocks that leave the sample in one call after the limit was lowered."""


class Misses(msgspec.Struct, gc=False):
    """Numbers of blocks that missed, estimated from the sample.

    Attributes:
        cold: Blocks that were never used before.
        cleared: Blocks that were last used before the cache was cleared.
        in_progress: Blocks that another request holds but has not computed yet.
        evicted: Seconds since the last use of blocks that were evicted, and the number of blocks.
    """

    cold: float = 0.0
    cleared: float = 0.0
    in_progress: float = 0.0
    evicted: list[tuple[float, float]] = []


class ReuseTracker:
    """Reuse distances of one cache's lookups.

    A block is in the sample if its key is at least ``floor``. With too many blocks, ``floor`` rises: the
    block with the least key leaves the sample, and each of the others stands for more blocks.

    Attributes:
        max_blocks: Blocks of the sample that are tracked at once; may change at any time.
        distinct: Number of all blocks that were ever used; None: unknown. It removes the common error
            of all distances.
        counts_uses: Whether ``now`` is the number of uses so far, which no distance can exceed.
        horizon: Distance beyond which blocks are forgotten; None: no block is forgotten.
        floor: The least key of the sample.
    """

    def __init__(self, half_life: float | None = None, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._half_life = half_life
        self.max_blocks = max_blocks
        self.distinct: float | None = None
        self.counts_uses = False
        self.horizon: float | None = None
        self._source_floor = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.curve = HitRatioCurve(self._half_life)
        self.restart()

    def restart(self) -> None:
        """Forget the blocks: the cache is another one, or uses of its blocks were not seen."""
        self.floor = self._source_floor
        self._stack = LruStack()
        self._held: dict[int, int] = {}
        """Blocks that requests hold, and how many requests do."""
        self._held_counted = 0
        self._keys = LeastKeys()
        """Keys that came into the sample."""
        self._extra: dict[int, None] = {}
        """Hot blocks outside of the sample, the latest one last."""
        self._cleared_at = -1.0

    def reset(self, now: float) -> None:
        """Note that the cache was emptied, so that blocks used before hit in no cache."""
        self._cleared_at = now

    def __contains__(self, key: object) -> bool:
        return key in self._stack or key in self._held

    @property
    def rate(self) -> float:
        """Share of the blocks that is sampled now."""
        return (ALL - self.floor) * _UNIT

    @property
    def tracked(self) -> int:
        """Number of blocks of the sample that are tracked."""
        return self._stack.counted + self._held_counted

    @property
    def scale(self) -> float:
        """Number of blocks that one of the sample stands for."""
        tracked = self._stack.counted + self._held_counted
        if self.distinct is not None and tracked:
            return max(self.distinct / tracked, 1.0)
        return 1.0 / self.rate

    def sample(self, rate: float) -> None:
        """Follow the rate of the source, above 0; the blocks of another rate are forgotten."""
        floor = ALL - max(int(rate * ALL), 1)
        if floor != self._source_floor:
            self._source_floor = floor
            self.restart()

    def admit(self, lookup: Lookup, now: float, *, counts: bool = True) -> Misses:
        """Observe the lookup of a request, which holds its blocks until ``release``.

        ``now`` never decreases. ``counts`` is False for a lookup that the engine does not count.
        """
        misses = Misses()
        if counts:
            self.curve.advance(now)
            self.curve.count(lookup.blocks - lookup.found, lookup.found)
        scale, found, step = self.scale, lookup.found, lookup.hot_step
        for depth, key in zip(range(0, lookup.hot_blocks, step), lookup.hot, strict=False):
            is_held, used = key in self._held, self._hold(key, now)
            size = min(step, lookup.hot_blocks - depth)
            hits = min(max(found - depth, 0), size)
            if counts and hits:
                self._observe(key, used, now, scale, hits, is_hot=True, is_hit=True)
            if counts and hits < size:
                missed = size - hits
                reachable = None if is_held else used
                self._observe(key, reachable, now, scale, missed, is_hot=True, is_hit=False)
                self._note_miss(misses, used, now, missed, is_held=is_held)
        weight = 1.0 / self.rate
        for index, key in enumerate(lookup.sampled):
            if key < self.floor:
                continue
            is_held, used = key in self._held, self._hold(key, now)
            if not counts or index < lookup.sampled_hot:
                continue
            is_hit = index < lookup.sampled_found
            # A block that another request is still computing hits in no cache.
            reachable = used if is_hit or not is_held else None
            self._observe(key, reachable, now, scale, weight, is_hot=False, is_hit=is_hit)
            if not is_hit:
                self._note_miss(misses, used, now, weight, is_held=is_held)
        self._shrink()
        return misses

    def release(self, keys: Sequence[int], now: float) -> None:
        """End a request that used ``keys``, its output included; the first keys stay longest."""
        held, stack, floor = self._held, self._stack, self.floor
        for key in reversed(keys):
            holders = held.pop(key, 0)
            if holders > 1:
                held[key] = holders - 1
                continue
            is_counted = key >= floor
            if holders:
                self._held_counted -= is_counted
                if not is_counted and key not in self._extra:
                    continue
            elif stack.remove(key) is None:
                if not is_counted:
                    continue
                self._keys.add(key, self, self.max_blocks)
            stack.push(key, now, counted=is_counted)
        self._shrink()

    def use(self, key: int, now: float, *, is_hot: bool, is_hit: bool | None) -> None:
        """Observe the lookup of one block that no request holds afterwards; it is not counted.

        ``now`` (seconds or uses) never decreases. A hot block is counted one by one. Without ``is_hit``,
        the block hits if it is known.
        """
        weight = 1.0 if is_hot else 1.0 / self.rate
        if key < self.floor or self._held:
            used = self._hold(key, now)
            is_hit = used is not None if is_hit is None else is_hit
            self._observe(key, used, now, self.scale, weight, is_hot=is_hot, is_hit=is_hit)
            self.release((key,), now)
            return
        # The same with fewer calls, for a block that no request holds.
        scale, used = self.scale, self._stack.remove(key)
        is_hit = used is not None if is_hit is None else is_hit
        self._observe(key, used, now, scale, weight, is_hot=is_hot, is_hit=is_hit)
        self._stack.push(key, now)
        if used is None:
            self._keys.add(key, self, self.max_blocks)
            self._shrink()

    def points(self, capacities: Sequence[int]) -> list[Point]:
        """Return the curve at ``capacities``, with bounds."""
        return self.curve.points(capacities, self.rate, self.tracked)

    def used_since(self, stamp: float) -> float:
        """Return the number of blocks that are held, or were last used at ``stamp`` or later."""
        return (self._held_counted + self._stack.used_since(stamp)) / self.rate

    def _hold(self, key: int, now: float) -> tuple[int, float] | None:
        """Hold a block; return the number of counted blocks above it and its stamp, or None."""
        holders = self._held.get(key, 0)
        self._held[key] = holders + 1
        if holders:
            return 0, now
        used = self._stack.remove(key)
        above = self._held_counted
        if key < self.floor:
            self._extra.pop(key, None)
            self._extra[key] = None
        else:
            self._held_counted += 1
            if used is None:
                self._keys.add(key, self, self.max_blocks)
        return None if used is None else (used[0] + above, used[1])

    def _observe(
        self,
        key: int,
        used: tuple[int, float] | None,
        now: float,
        scale: float,
        weight: float,
        *,
        is_hot: bool,
        is_hit: bool,
    ) -> None:
        """Observe ``weight`` lookups of a block; ``used`` is the result of ``_hold``."""
        number = NEVER
        if used is not None and used[1] > self._cleared_at:
            distance = used[0] * scale + 1.0
            if self.counts_uses:
                distance = max(min(distance, now - used[1]), 1.0)
            number = bucket(distance)
        elif is_hit:
            # It was last used when it was not in the sample, so its distance is unknown.
            return
        if is_hot:
            self.curve.observe_hot(number, weight, hit=is_hit)
        else:
            self.curve.observe(key, number, weight, hit=is_hit)

    def _note_miss(
        self,
        misses: Misses,
        used: tuple[int, float] | None,
        now: float,
        weight: float,
        *,
        is_held: bool,
    ) -> None:
        if is_held:
            misses.in_progress += weight
        elif used is None:
            misses.cold += weight
        elif used[1] > self._cleared_at:
            misses.evicted.append((max(now - used[1], 0.0), weight))
        else:
            misses.cleared += weight

    def _shrink(self) -> None:
        """Keep the limits on tracked blocks."""
        horizon = self.horizon
        while horizon is not None and self._stack.above_oldest() / self.rate > horizon:
            self._stack.drop_oldest()
        for _ in range(TRIM):
            if self.tracked <= self.max_blocks:
                break
            self.floor = max(self.floor, self._leave_least() + 1)
        while len(self._extra) > MAX_EXTRA:
            key = next(iter(self._extra))
            del self._extra[key]
            self._stack.remove(key)

    def _leave_least(self) -> int:
        """Take the block with the least key out of the sample."""
        key = self._keys.pop()
        if self._stack.remove(key) is None and self._held.pop(key, 0):
            self._held_counted -= 1
        return key
