"""Lives of KV blocks: from raw events to lifetimes, idle times and reuse gaps of one engine.

Two kinds of block are followed side by side. A *physical* block has a number and is
handed out again and again; its definitions are those of vLLM's ``KVCacheMetricsCollector``
(vllm/v1/core/kv_cache_metrics.py). A *cached* block has a hash and is stored in media,
in each on its own. Time is data: all stamps of a source are of one clock.

Weights. An observation stands for 1/p blocks, where p is the probability that its
block was followed: that of its birth, or a later one that was lower. To be followed at the
end, a cached hash ``h`` must have had u(h) < ``ratio`` at all times since its birth,
that is u(h) < the least of them, and u is uniform: so 1/p makes every sum over lives
that began under observation unbiased, however the rate moved. It is the same for physical blocks,
with the sender's rate at the birth, which this side cannot lower, times the least
share that thinning left since.

One bias is accepted. Whatever was cached before it was followed (the exporter started later, or
the rate was raised) has no known birth: where it is stored once more before it is
removed, that begins a life which is too short. Knowing better would take memory of
blocks that are not sampled.
"""

from __future__ import annotations

from struct import Struct

import msgspec

from sidestep.errors import WireError
from sidestep.wire.blocks import (
    ALLOCATED,
    EVICTED,
    RESET,
    TOUCHED,
    BlockEvents,
    CacheChange,
    CacheEvents,
)
from sidestep.wire.limits import COUNT_LIMIT, MAX_LABELS

Observation = tuple[float, int]
"""Seconds, or a number of hits, and how many blocks it stands for."""

_ALL = 1 << 64
_MASK = _ALL - 1
_FIRST, _SHIFT, _SECOND = 0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D, 0xD6E8FEB86659FD93
"""Odd and without pattern. No other process has to agree on them but exporters of the
same engines, which then sample the same hashes."""

_NEVER = -1.0
"""No stamp and no gap: neither is ever negative."""
_HITS = Struct("<Q4d")
"""Number of hits; stamp of the last whose time is known; the last three gaps, oldest first."""
_NO_HITS = _HITS.pack(0, _NEVER, _NEVER, _NEVER, _NEVER)


class CachedLives(msgspec.Struct, gc=False):
    """What one call has to tell of one medium."""

    lifetimes: list[Observation] = []
    idles: list[Observation] = []
    gaps: list[Observation] = []


class Lives(msgspec.Struct, gc=False):
    """What one call has to tell.

    Attributes:
        lifetimes: Birth to eviction.
        idles: Last hit, or birth, to eviction.
        last_gaps: Between the last four hits, at eviction, as the engine has them.
        gaps: Between any two hits in succession, at the later one.
        reuses: Hits of a whole life, at eviction.
        reset_ages: As lifetimes, of blocks that a reset took.
        reset_idles: As idles, of blocks that a reset took.
        resets: How often the whole cache was emptied.
        cached: The same by medium, of hashes; a reuse is being stored again.
    """

    lifetimes: list[Observation] = []
    idles: list[Observation] = []
    last_gaps: list[Observation] = []
    gaps: list[Observation] = []
    reuses: list[Observation] = []
    reset_ages: list[Observation] = []
    reset_idles: list[Observation] = []
    resets: int = 0
    cached: dict[str, CachedLives] = {}


class _Share(msgspec.Struct, gc=False):
    """How likely a life was to be followed; one object for all lives with the same chance.

    Attributes:
        rate: What the sender let through.
        bound: Of that, what is kept here, of 2**64.
        weight: Blocks that an observation stands for.
    """

    rate: float
    bound: int
    weight: float


class _CachedLife(msgspec.Struct, gc=False):
    """A hash in a medium.

    Attributes:
        hit: Stamp of the last hit whose time is known.
    """

    birth: float
    share: _Share
    hit: float = _NEVER


class _Life(msgspec.Struct, gc=False):
    """A physical block from one allocation to the next.

    Attributes:
        hits: As ``_HITS``. As objects they would take 164 bytes, packed it is 73.
    """

    birth: float
    share: _Share
    hits: bytes = _NO_HITS


class _Diffusion:
    """Makes integers of weights: what is cut off is carried on, so that sums stay right."""

    __slots__ = ("_carry",)

    def __init__(self) -> None:
        # A half makes it rounding: the error is as often above as below.
        self._carry = 0.5

    def observe(self, observed: list[Observation], value: float, weight: float) -> None:
        """Append ``value`` with the whole number that is due."""
        due = self._carry + weight
        count = int(due)
        self._carry = due - count
        observed.append((value, count))


class _Medium:
    """One medium's lives by hash."""

    __slots__ = ("gaps", "idles", "lifetimes", "lives")

    def __init__(self) -> None:
        self.lives: dict[int, _CachedLife] = {}
        self.lifetimes, self.idles, self.gaps = _Diffusion(), _Diffusion(), _Diffusion()


class Residency:
    """Follows the blocks of one engine, within ``capacity``.

    Physical blocks are sampled by the sender, cached ones here by a mix of their hash
    alone: a block is followed through all its events, on all ranks, or not at all, and
    what is sampled at one rate is sampled at every higher one. The price: lives
    of one hash are in the sample together or not at all.

    Where one life more would not fit, the ratio of both kinds halves, until it does: lives
    outside are let go by hash, the others stand for twice as many. It stays so,
    since load that was too much once will be again, until ``rate`` is set anew, to whatever value.

    Args:
        rate: Share of cached hashes to follow, 0 to 1.
        scale: Whether an observation counts for all blocks that it stands for, or for one.
        capacity: Lives to follow at most, physical and cached.

    Attributes:
        tracked: Lives followed now.
        halvings: Times that the ratio was halved.
        unknown: Events of blocks whose birth was not seen, though the sender samples them
            and none were let go here; and stamps that were before the block's last one.
        abandoned: Lives whose end was not seen: allocated again, or the sender restarted.
    """

    def __init__(self, *, rate: float, scale: bool, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self.tracked = 0
        self.halvings = 0
        self.unknown = 0
        self.abandoned = 0
        self._scale = scale
        self._capacity = capacity
        self._blocks: dict[int, _Life] = {}
        self._block_source: int | None = None
        self._block_share = _Share(0.0, 0, 0.0)
        self._complete = True
        self._lifetimes, self._idles, self._last_gaps = _Diffusion(), _Diffusion(), _Diffusion()
        self._gaps, self._reuses = _Diffusion(), _Diffusion()
        self._reset_ages, self._reset_idles = _Diffusion(), _Diffusion()
        self._media: dict[str, _Medium] = {}
        self._cache_source: int | None = None
        self.rate = rate

    @property
    def rate(self) -> float:
        """Share of cached hashes that the operator wants; setting it ends thinning."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        if not 0.0 <= rate <= 1.0:
            raise ValueError("rate must be within 0 and 1")
        self._rate = rate
        self._block_bound = _ALL
        self._hash_bound = int(rate * _ALL)
        self._hash_share = self._share(1.0, self._hash_bound)
        self._lower()

    @property
    def ratio(self) -> float:
        """Share of cached hashes that are followed: the rate, halved as often as it took."""
        return self._hash_bound / _ALL

    def blocks(self, item: BlockEvents) -> Lives:
        """Follow physical blocks.

        Raises:
            WireError: The item contradicts itself; nothing of it was applied.
        """
        kinds = item.kinds
        if not len(kinds) == len(item.blocks) == len(item.stamps):
            raise WireError("bad_item", "columns of block events differ in length")
        if kinds and max(kinds) > RESET:
            raise WireError("bad_item", "an unknown kind of block event")
        if ALLOCATED in kinds and item.rate * COUNT_LIMIT < 1.0:
            raise WireError("bad_item", "a block was sampled at a rate of nothing")
        if item.source != self._block_source:
            self._block_source = item.source
            self.abandoned += len(self._blocks)
            self._forget_blocks()
        out = Lives()
        for kind, block, now in zip(kinds, item.blocks, item.stamps, strict=True):
            if kind == ALLOCATED:
                self._allocate(block, now, item.rate)
            elif kind == TOUCHED:
                self._touch(block, now, out)
            elif kind == EVICTED:
                self._evict(block, now, out)
            else:
                self._reset(now, out)
        return out

    def _allocate(self, block: int, now: float, rate: float) -> None:
        if self._blocks.pop(block, None) is not None:
            self.tracked -= 1
            self.abandoned += 1
        # Mixing is left out where the answer is known.
        if self._block_bound < _ALL or self.tracked >= self._capacity:
            mixed = _mix_birth(block, now)
            while mixed < self._block_bound and self.tracked >= self._capacity:
                self._halve()
            if mixed >= self._block_bound:
                return
        share = self._block_share
        if share.rate != rate or share.bound != self._block_bound:
            share = self._block_share = self._share(rate, self._block_bound)
        self._blocks[block] = _Life(now, share)
        self.tracked += 1

    def _touch(self, block: int, now: float, out: Lives) -> None:
        life = self._blocks.get(block)
        if life is None:
            self.unknown += self._complete
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
        life = self._blocks.pop(block, None)
        if life is None:
            self.unknown += self._complete
            return
        self.tracked -= 1
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

    def _reset(self, now: float, out: Lives) -> None:
        out.resets += 1
        for life in self._blocks.values():
            weight = life.share.weight
            last = max(life.birth, _HITS.unpack(life.hits)[1])
            if now < last:
                self.unknown += 1
            else:
                self._reset_ages.observe(out.reset_ages, now - life.birth, weight)
                self._reset_idles.observe(out.reset_idles, now - last, weight)
        self._forget_blocks()

    def _forget_blocks(self) -> None:
        self.tracked -= len(self._blocks)
        self._blocks.clear()
        # No block is left that was let go: from here on all that are sampled are known.
        self._complete = self._block_bound == _ALL

    def cache(self, item: CacheEvents) -> Lives:
        """Follow cached blocks.

        Raises:
            WireError: The item is not one of an engine; nothing of it was applied.
        """
        self._check(item.changes)
        if item.source != self._cache_source:
            self._cache_source = item.source
            self.abandoned += sum(len(medium.lives) for medium in self._media.values())
            self._clear("")
        out = Lives()
        for change in item.changes:
            if change.kind == "cleared":
                self._clear(change.medium)
                continue
            hashes, bound = change.hashes, self._hash_bound
            if bound < _ALL:
                # As _mix, written out: nearly all hashes end here, so this line is the cost.
                hashes = [
                    value
                    for value in hashes
                    if ((first := value * _FIRST + _SHIFT & _MASK) ^ first >> 32) * _SECOND & _MASK
                    < bound
                ]
            if not hashes:
                continue
            if change.kind == "stored":
                self._store(change.medium, hashes, change.stamp, out)
            else:
                self._remove(change.medium, hashes, change.stamp, out)
        return out

    def _check(self, changes: list[CacheChange]) -> None:
        if {change.kind for change in changes} - {"stored", "removed", "cleared"}:
            raise WireError("bad_item", "an unknown kind of cache event")
        stored = {change.medium for change in changes if change.kind == "stored"}
        if not stored <= self._media.keys() and len(stored | self._media.keys()) > MAX_LABELS:
            raise WireError("bad_item", "too many media")

    def _store(self, name: str, hashes: list[int], now: float, out: Lives) -> None:
        medium = self._media.get(name)
        if medium is None:
            medium = self._media[name] = _Medium()
        lives = medium.lives
        for value in hashes:
            life = lives.get(value)
            if life is None:
                if self.tracked >= self._capacity or self._block_bound < _ALL:
                    # Thinned since these hashes were sampled, perhaps.
                    mixed = _mix(value)
                    while mixed < self._hash_bound and self.tracked >= self._capacity:
                        self._halve()
                    if mixed >= self._hash_bound:
                        continue
                lives[value] = _CachedLife(now, self._hash_share)
                self.tracked += 1
                continue
            before = life.hit
            if now < max(life.birth, before):
                self.unknown += 1
                continue
            life.hit = now
            if before != _NEVER:
                medium.gaps.observe(_of(out, name).gaps, now - before, life.share.weight)

    def _remove(self, name: str, hashes: list[int], now: float, out: Lives) -> None:
        medium = self._media.get(name)
        if medium is None:
            return
        for value in hashes:
            life = medium.lives.pop(value, None)
            if life is None:
                continue
            self.tracked -= 1
            last = max(life.birth, life.hit)
            if now < last:
                self.unknown += 1
                continue
            observed, weight = _of(out, name), life.share.weight
            medium.lifetimes.observe(observed.lifetimes, now - life.birth, weight)
            medium.idles.observe(observed.idles, now - last, weight)

    def _clear(self, name: str) -> None:
        for each, medium in self._media.items():
            if name in ("", each):
                self.tracked -= len(medium.lives)
                medium.lives.clear()

    def _share(self, rate: float, bound: int) -> _Share:
        """The share of lives that begin now, or of those that a lower bound leaves."""
        chance = rate * (bound / _ALL)
        return _Share(rate, bound, 1.0 / chance if self._scale and chance else 1.0)

    def _halve(self) -> None:
        self.halvings += 1
        self._block_bound >>= 1
        self._hash_bound >>= 1
        self._hash_share = self._share(1.0, self._hash_bound)
        self._complete = False
        self._lower()

    def _lower(self) -> None:
        """Let go what is outside the bounds; where they were raised, nothing is."""
        bound = self._block_bound
        lowered: dict[float, _Share] = {}
        gone = []
        for block, life in self._blocks.items():
            if life.share.bound > bound:
                if _mix_birth(block, life.birth) >= bound:
                    gone.append(block)
                    continue
                rate = life.share.rate
                if rate not in lowered:
                    lowered[rate] = self._share(rate, bound)
                life.share = lowered[rate]
        for block in gone:
            del self._blocks[block]
        self.tracked -= len(gone)
        for medium in self._media.values():
            self.tracked -= _lower_hashes(medium.lives, self._hash_share)


def _lower_hashes(lives: dict[int, _CachedLife], share: _Share) -> int:
    """Let go the hashes outside of ``share``; how many they were."""
    gone = []
    for value, life in lives.items():
        if life.share.bound > share.bound:
            if _mix(value) >= share.bound:
                gone.append(value)
            else:
                life.share = share
    for value in gone:
        del lives[value]
    return len(gone)


def _of(out: Lives, name: str) -> CachedLives:
    """One medium's part of ``out``."""
    observed = out.cached.get(name)
    if observed is None:
        observed = out.cached[name] = CachedLives()
    return observed


def _mix(value: int) -> int:
    """A number below 2**64 that looks drawn anew for each ``value``.

    Engines' hashes can be counters, or aligned, or have less than 64 bits; the
    top bits of the result depend on all of theirs.
    """
    first = value * _FIRST + _SHIFT & _MASK
    return (first ^ first >> 32) * _SECOND & _MASK


def _mix_birth(block: int, birth: float) -> int:
    """The same for one life of a physical block; sampling at the sender knows none of it."""
    return _mix(block * _SECOND + int(birth * 1e9))
