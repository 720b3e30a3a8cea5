"""Tracking of physical KV blocks, whose numbers are reused.

The definitions are those of vLLM's ``KVCacheMetricsCollector``
(vllm/v1/core/kv_cache_metrics.py).
"""

from __future__ import annotations

from collections import deque
from struct import Struct

import msgspec

from sidestep.errors import WireError
from sidestep.protocol.block_events import ALLOCATED, EVICTED, RESET, TOUCHED, BlockEvents
from sidestep.protocol.iteration_stats import KVCacheEvictionEvent
from sidestep.protocol.limits import COUNT_LIMIT
from sidestep.tracking.kv_blocks.tracker import BlockObservations, BlockTracker, Diffusion, Sampling

SLICE = 512
"""Blocks of a reset that one call observes, in about a millisecond."""
_NEVER = -1.0
"""Placeholder for no stamp or gap; neither is ever negative."""
_HITS = Struct("<Q4d")
"""Number of hits; stamp of the last hit with a known time; the last three gaps, oldest first."""
_NO_HITS = _HITS.pack(0, _NEVER, _NEVER, _NEVER, _NEVER)


class _Block(msgspec.Struct, gc=False):
    """A physical block from one allocation to the next.

    Attributes:
        weight: Blocks that it stands for.
        hits: Packed as ``_HITS``, which takes 73 bytes; objects would take 164.
    """

    birth: float
    weight: float
    hits: bytes = _NO_HITS


def check(item: BlockEvents) -> None:
    """Reject an invalid ``item``."""
    kinds = item.kinds
    if not len(kinds) == len(item.blocks) == len(item.stamps):
        raise WireError("bad_item", "columns of block events differ in length")
    if kinds and max(kinds) > RESET:
        raise WireError("bad_item", "an unknown kind of block event")
    if ALLOCATED in kinds and item.rate * COUNT_LIMIT < 1.0:
        raise WireError("bad_item", "a block was sampled at a rate of zero")


class PhysicalBlocks(BlockTracker):
    """Physical blocks of one engine, which its sender samples.

    Blocks evicted by a reset stay tracked until they are observed: a slice by each call, and one block by
    each allocation that needs capacity.
    """

    def __init__(self, sampling: Sampling) -> None:
        super().__init__(sampling)
        self._blocks: dict[int, _Block] = {}
        self._resets: deque[tuple[float, dict[int, _Block]]] = deque()
        """Stamp of each reset, and its evicted blocks that are not observed yet."""
        self._source: int | None = None
        self._rate: float | None = None
        self._complete = True
        """True if all blocks sampled by the sender are tracked."""
        self._lifetimes, self._idles, self._last_gaps = Diffusion(), Diffusion(), Diffusion()
        self._gaps, self._reuses = Diffusion(), Diffusion()
        self._reset_ages, self._reset_idles = Diffusion(), Diffusion()

    @property
    def rate(self) -> float | None:
        """Share of blocks that the sender samples, from its last item."""
        return self._rate

    @property
    def waiting(self) -> bool:
        """True if ``drain`` has more to return, without another event."""
        return bool(self._resets)

    def apply(self, item: BlockEvents) -> BlockObservations:
        """Track an item's events."""
        check(item)
        self._rate = item.rate
        if item.source != self._source:
            self._source = item.source
            self._out.abandoned += len(self._blocks)
            self._forget()
        weight = self._sampling.weight(item.rate)
        for kind, block, now in zip(item.kinds, item.blocks, item.stamps, strict=True):
            if kind == ALLOCATED:
                self._allocate(block, now, weight)
            elif kind == TOUCHED:
                self._touch(block, now)
            elif kind == EVICTED:
                self._evict(block, now)
            else:
                self._out.resets += 1
                if self._blocks:
                    self._resets.append((now, self._blocks))
                    self.tracked += len(self._blocks)
                self._forget()
        return self.drain()

    def evictions(self, events: list[KVCacheEvictionEvent], rate: float) -> BlockObservations:
        """Observe evictions of blocks that the engine sampled itself, at ``rate``."""
        out = self._out
        weight = self._sampling.weight(rate)
        for event in events:
            intervals = [
                (self._lifetimes, out.lifetimes, event.lifetime_seconds),
                (self._idles, out.idles, event.idle_seconds),
                *((self._last_gaps, out.last_gaps, gap) for gap in event.reuse_gaps_seconds),
            ]
            for diffusion, observed, seconds in intervals:
                diffusion.observe(observed, seconds, weight)
        return self.drain()

    def drain(self) -> BlockObservations:
        """Return the observations since the last call, and a slice of the pending ones."""
        self._observe_resets(SLICE)
        return super().drain()

    def resize(self, capacity: int) -> None:
        """Track at most ``capacity`` blocks; abandon the newest excess ones."""
        self.capacity = capacity
        while self._blocks and self.tracked > capacity:
            self._blocks.popitem()
            self.tracked -= 1
            self._out.abandoned += 1
            self._complete = False

    def _allocate(self, block: int, now: float, weight: float) -> None:
        if self._blocks.pop(block, None) is not None:
            self.tracked -= 1
            self._out.abandoned += 1
        if self.tracked >= self.capacity:
            self._observe_resets(1)
            if self.tracked >= self.capacity:
                self._out.refused += 1
                self._complete = False
                return
        self._blocks[block] = _Block(now, weight)
        self.tracked += 1

    def _touch(self, number: int, now: float) -> None:
        block = self._blocks.get(number)
        if block is None:
            self._out.unknown += self._complete
            return
        count, before, first, second, third = _HITS.unpack(block.hits)
        if now < max(block.birth, before):
            # The time of this hit is unknown, so gaps are those between the other hits.
            self._out.unknown += 1
            now = before
        elif before != _NEVER:
            first, second, third = second, third, now - before
            self._gaps.observe(self._out.gaps, third, block.weight)
        block.hits = _HITS.pack(count + 1, now, first, second, third)

    def _evict(self, number: int, now: float) -> None:
        out = self._out
        block = self._blocks.pop(number, None)
        if block is None:
            out.unknown += self._complete
            return
        self.tracked -= 1
        weight = block.weight
        count, hit, *gaps = _HITS.unpack(block.hits)
        last = max(block.birth, hit)
        if now < last:
            out.unknown += 1
        else:
            self._lifetimes.observe(out.lifetimes, now - block.birth, weight)
            self._idles.observe(out.idles, now - last, weight)
        for gap in gaps:
            if gap != _NEVER:
                self._last_gaps.observe(out.last_gaps, gap, weight)
        self._reuses.observe(out.reuses, count, weight)

    def _forget(self) -> None:
        self.tracked -= len(self._blocks)
        self._blocks = {}
        self._complete = True

    def _observe_resets(self, most: int) -> None:
        """Observe up to ``most`` of the blocks that resets evicted."""
        out = self._out
        while most and self._resets:
            now, blocks = self._resets[0]
            _, block = blocks.popitem()
            if not blocks:
                self._resets.popleft()
            most -= 1
            self.tracked -= 1
            last = max(block.birth, _HITS.unpack(block.hits)[1])
            if now < last:
                out.unknown += 1
            else:
                self._reset_ages.observe(out.reset_ages, now - block.birth, block.weight)
                self._reset_idles.observe(out.reset_idles, now - last, block.weight)
