"""Lives of physical blocks: numbers that are handed out again and again.

The definitions are those of vLLM's ``KVCacheMetricsCollector``
(vllm/v1/core/kv_cache_metrics.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

import msgspec

from sidestep.errors import WireError
from sidestep.protocol.block_events import ALLOCATED, EVICTED, RESET, TOUCHED, BlockEvents
from sidestep.protocol.iteration_stats import KVCacheEvictionEvent
from sidestep.protocol.limits import COUNT_LIMIT
from sidestep.tracking.kv_blocks.capacity import Room, Turns
from sidestep.tracking.kv_blocks.observations import Lives
from sidestep.tracking.kv_blocks.sampling import ALL, SECOND, Diffusion, Sample, Share, mix

_NEVER = -1.0
"""No stamp and no gap: neither is ever negative."""
_HITS = Struct("<Q4d")
"""Number of hits; stamp of the last whose time is known; the last three gaps, oldest first."""
_NO_HITS = _HITS.pack(0, _NEVER, _NEVER, _NEVER, _NEVER)


class _Life(msgspec.Struct, gc=False):
    """A physical block from one allocation to the next.

    Attributes:
        hits: As ``_HITS``. As objects they would take 164 bytes, packed it is 73.
    """

    birth: float
    share: Share
    hits: bytes = _NO_HITS


def check(item: BlockEvents) -> None:
    """Whether ``item`` can be followed.

    Raises:
        WireError: It contradicts itself.
    """
    kinds = item.kinds
    if not len(kinds) == len(item.blocks) == len(item.stamps):
        raise WireError("bad_item", "columns of block events differ in length")
    if kinds and max(kinds) > RESET:
        raise WireError("bad_item", "an unknown kind of block event")
    if ALLOCATED in kinds and item.rate * COUNT_LIMIT < 1.0:
        raise WireError("bad_item", "a block was sampled at a rate of nothing")


class PhysicalBlocks:
    """Those of one engine that its sender samples, or the part of them that fits.

    Attributes:
        out: Where the call that is under way puts what there is to tell.
        rate: Share that the sender samples, by its last item.
        unknown: As ``Residency.unknown``.
        abandoned: As ``Residency.abandoned``.
    """

    def __init__(self, sample: Sample, room: Room, out: Lives) -> None:
        self.out = out
        self.unknown = 0
        self.abandoned = 0
        self._sample = sample
        self._room = room
        self._lives: dict[int, _Life] = {}
        self._source: int | None = None
        self.rate: float | None = None
        self._complete_at = 0
        """How often the sample may have been halved for all its lives to be known."""
        self._lifetimes, self._idles, self._last_gaps = Diffusion(), Diffusion(), Diffusion()
        self._gaps, self._reuses = Diffusion(), Diffusion()
        self._reset_ages, self._reset_idles = Diffusion(), Diffusion()
        room.sweepers.append(self._sweep)

    def take(self, events: list[KVCacheEvictionEvent], rate: float) -> None:
        """Tell of lives that another has followed, each standing for 1/``rate``."""
        out = self.out
        weight = self._sample.weight(rate)
        for event in events:
            intervals = [
                (self._lifetimes, out.lifetimes, event.lifetime_seconds),
                (self._idles, out.idles, event.idle_seconds),
                *((self._last_gaps, out.last_gaps, gap) for gap in event.reuse_gaps_seconds),
            ]
            for diffusion, observed, seconds in intervals:
                diffusion.observe(observed, seconds, weight)

    def apply(self, item: BlockEvents) -> None:
        """Follow an item's events.

        Raises:
            WireError: The item contradicts itself; nothing of it was applied.
        """
        check(item)
        self.rate = item.rate
        if item.source != self._source:
            self._source = item.source
            self._forget(self._abandon(self._lives))
        out = self.out
        for kind, block, now in zip(item.kinds, item.blocks, item.stamps, strict=True):
            if kind == ALLOCATED:
                self._allocate(block, now, item.rate)
            elif kind == TOUCHED:
                self._touch(block, now, out)
            elif kind == EVICTED:
                self._evict(block, now, out)
            else:
                out.resets += 1
                self._forget(self._reset(self._lives, now))

    def _allocate(self, block: int, now: float, rate: float) -> None:
        room, sample = self._room, self._sample
        life = self._lives.pop(block, None)
        if life is not None:
            room.tracked -= 1
            self.abandoned += not (room.sweeping and _is_outside(block, life))
        # Mixing is left out where the answer is known.
        if sample.bound < ALL or room.tracked >= room.capacity:
            mixed = _mix_birth(block, now)
            while mixed < sample.bound and room.tracked >= room.capacity:
                room.make()
            if mixed >= sample.bound:
                return
        self._lives[block] = _Life(now, sample.share(rate))
        room.tracked += 1

    def _touch(self, block: int, now: float, out: Lives) -> None:
        life = self._lives.get(block)
        if life is None or (self._room.sweeping and _is_outside(block, life)):
            self._miss()
            return
        count, before, first, second, third = _HITS.unpack(life.hits)
        if now < max(life.birth, before):
            # A hit whose time is not known: intervals are taken between the others.
            self.unknown += 1
            now = before
        elif before != _NEVER:
            first, second, third = second, third, now - before
            self._gaps.observe(out.gaps, third, life.share.weight)
        life.hits = _HITS.pack(count + 1, now, first, second, third)

    def _evict(self, block: int, now: float, out: Lives) -> None:
        life = self._lives.pop(block, None)
        if life is None:
            self._miss()
            return
        self._room.tracked -= 1
        if self._room.sweeping and _is_outside(block, life):
            return
        weight = life.share.weight
        count, hit, *gaps = _HITS.unpack(life.hits)
        last = max(life.birth, hit)
        if now < last:
            self.unknown += 1
        else:
            self._lifetimes.observe(out.lifetimes, now - life.birth, weight)
            self._idles.observe(out.idles, now - last, weight)
        for gap in gaps:
            if gap != _NEVER:
                self._last_gaps.observe(out.last_gaps, gap, weight)
        self._reuses.observe(out.reuses, count, weight)

    def _miss(self) -> None:
        """Hear of a life that is not followed."""
        self.unknown += self._room.halvings == self._complete_at

    def _forget(self, turns: Turns) -> None:
        """Know of no lives; those of before have their ``turns``."""
        if self._lives:
            self._lives = {}
            self._room.leave(turns)
        # No block is left that was let go: from here on all that are sampled are known.
        self._complete_at = self._room.halvings if self._sample.bound == ALL else -1

    def _reset(self, lives: dict[int, _Life], now: float) -> Turns:
        """Tell the ages of ``lives``, in whichever calls their turns come."""
        for life in self._leave(lives):
            if life is not None:
                weight = life.share.weight
                last = max(life.birth, _HITS.unpack(life.hits)[1])
                if now < last:
                    self.unknown += 1
                else:
                    self._reset_ages.observe(self.out.reset_ages, now - life.birth, weight)
                    self._reset_idles.observe(self.out.reset_idles, now - last, weight)
            yield

    def _abandon(self, lives: dict[int, _Life]) -> Turns:
        for life in self._leave(lives):
            self.abandoned += life is not None
            yield

    def _leave(self, lives: dict[int, _Life]) -> Iterator[_Life | None]:
        """Empty ``lives``, the eldest first; ``None`` is one that was outside of the sample."""
        blocks = list(reversed(lives))
        while blocks:
            block = blocks.pop()
            life = lives.pop(block)
            self._room.tracked -= 1
            yield None if _is_outside(block, life) else life

    def _sweep(self) -> Turns:
        lives = self._lives
        for block in list(reversed(lives)):
            life = lives.get(block)
            if life is not None and _is_outside(block, life):
                del lives[block]
                self._room.tracked -= 1
            yield


def _is_outside(block: int, life: _Life) -> bool:
    """Whether thinning has let ``life`` go since it began."""
    bound = life.share.bound
    return bound < ALL and _mix_birth(block, life.birth) >= bound


def _mix_birth(block: int, birth: float) -> int:
    """A mix of one life of a block; sampling at the sender knows none of it."""
    return mix(block * SECOND + int(birth * 1e9))
