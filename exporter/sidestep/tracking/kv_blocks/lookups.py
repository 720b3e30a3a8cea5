"""Lookups in the prefix caches of engines: hit ratios of caches of other sizes, and reasons of misses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from sidestep.errors import WireError
from sidestep.protocol.cache_lookups import (
    COUNTED,
    MAX_KEYS,
    NOT_LOOKED_UP,
    CacheLookups,
    Lookup,
    Released,
)
from sidestep.tracking.kv_blocks.reuse import MAX_BLOCKS, ReuseTracker
from sidestep.tracking.kv_blocks.tracker import Diffusion, Observation

COLD, EVICTED, CLEARED, IN_PROGRESS, UNKNOWN, TOO_SHORT, NOT_CACHEABLE = REASONS = (
    "cold",
    "evicted",
    "cleared",
    "in_progress",
    "unknown",
    "too_short",
    "not_cacheable",
)
"""Reasons why tokens were not found."""
MIN_RATE = 1e-6
MAX_HELD_KEYS = 4 * MAX_BLOCKS
"""Keys of running requests that are kept at once."""
HORIZON = 8
"""Sizes of the cache up to which reuse is tracked."""


class LookupSettings(msgspec.Struct, frozen=True, gc=False):
    """Settings of lookup tracking, which all engines share.

    Attributes:
        half_life: Seconds after which a lookup counts half in the curve; 0: lookups are not tracked.
    """

    half_life: float = 3600.0
    blocks: int = MAX_BLOCKS


class CurveSummary(NamedTuple):
    """The hit-ratio curve of one engine in a few numbers; ratios are shares of the looked-up tokens.

    Attributes:
        hit_ratios: By the size of the cache, in sizes of the present one.
        working_set: Blocks that were used within the last half-life.
        sufficient: The smallest cache, in blocks, with a hit ratio within one point of the best.
        per_gib: Increase of the hit ratio by one more GiB; None where the size of a block is unknown.
        shared_hit_ratio: Hit ratio of one cache as large as those of all engines of the model together;
            None where the engine is alone.
    """

    hit_ratios: dict[float, float]
    working_set: float
    sufficient: float
    per_gib: float | None
    shared_hit_ratio: float | None


class LookupObservations(msgspec.Struct, gc=False):
    """Results of one item.

    Attributes:
        missed: Tokens that were not found, by reason.
        evicted: Seconds since the last use of blocks that missed after an eviction, and their number.
    """

    missed: dict[str, int]
    evicted: list[Observation]


class SharedCache:
    """The cache that several engines would have together, if each request could use all of it.

    A reset of one engine's cache resets it. Engines have different clocks of equal speed, so an event's
    time is the time since the engine's first event here.

    Attributes:
        reuse: Reuse distances of the lookups of all these engines.
        now: Seconds of the latest event.
    """

    def __init__(self, settings: LookupSettings, rate: float) -> None:
        self.reuse = ReuseTracker(settings.half_life, max_blocks=settings.blocks)
        self.reuse.sample(rate)
        self.now = 0.0
        self._abandoned: list[int] = []
        """Keys that are still held by requests which engines have abandoned."""

    def abandon(self, keys: Iterable[int]) -> None:
        """Release, a slice at a time, the keys of requests whose ends will not be seen."""
        self._abandoned += keys
        if len(self._abandoned) > MAX_HELD_KEYS:
            # A hostile sender abandons more than the slices release.
            self._abandoned.clear()
            self.reuse.restart()

    def release_abandoned(self) -> None:
        """Release a slice of the keys that were abandoned."""
        released = self._abandoned[-MAX_KEYS:]
        if released:
            del self._abandoned[-MAX_KEYS:]
            self.reuse.release(released, self.now)

    def advance(self, now: float) -> float:
        """Return the time of an event, which is never before that of the previous one."""
        self.now = max(self.now, now)
        return self.now


class LookupTracker:
    """Lookups of one engine's requests.

    Attributes:
        shared: The cache that the engine would share with others of its model; None: it is alone.
        summary: The curve in a few numbers, as of the last reading; None before the first.
        now: Seconds of the latest event. It stands still between two sources, whose clocks may differ.
    """

    def __init__(self, settings: LookupSettings) -> None:
        self.reuse = ReuseTracker(settings.half_life, max_blocks=settings.blocks)
        self.block_size = self.capacity = self.block_bytes = 0
        self.rate = 0.0
        self.summary: CurveSummary | None = None
        self.half_life = settings.half_life
        self._source: int | None = None
        self._keys: dict[int, list[int]] = {}
        self._held = 0
        self.now = 0.0
        self._known_since = 0.0
        """Time from which on an unknown block counts as cold."""
        self._rounded = {reason: Diffusion() for reason in REASONS}
        self._blocks = Diffusion()
        self.shared: SharedCache | None = None
        self._shift = 0.0
        """Difference between ``now`` and the clock of the source."""
        self._offset: float | None = None
        """Difference between the time of the shared cache and ``now``; None before its first event."""

    def share(self, cache: SharedCache | None) -> None:
        """Join a shared cache, or leave it."""
        if cache is self.shared:
            return
        self._abandon_shared()
        self.shared, self._offset = cache, None

    def apply(self, item: CacheLookups) -> LookupObservations:
        """Track the lookups of an item that ``check`` accepts."""
        if item.source != self._source or item.block_size != self.block_size:
            self._begin(item)
        self.capacity, self.block_bytes = item.capacity, item.block_bytes
        self.reuse.horizon = HORIZON * item.capacity or None
        tokens = dict.fromkeys(REASONS, 0.0)
        idles: list[tuple[float, float]] = []
        for event in item.events:
            self.now = max(self.now, event.stamp + self._shift)
            if isinstance(event, Lookup):
                self._look_up(event, tokens, idles)
            elif isinstance(event, Released):
                self._release(event)
            else:
                for reuse, now in self._caches():
                    reuse.reset(now)
        return self._observations(tokens, idles)

    def restart(self) -> None:
        """Forget the blocks, since uses of them were not seen."""
        self._abandon_shared()
        self.reuse.restart()
        self._keys.clear()
        self._held = 0
        self._known_since = self.now + self.half_life

    def _abandon_shared(self) -> None:
        """Release the blocks of the shared cache that this engine's requests hold."""
        if self.shared is not None:
            for keys in self._keys.values():
                self.shared.abandon(keys)

    def _caches(self) -> list[tuple[ReuseTracker, float]]:
        """Return the trackers of the engine's own cache and of the shared one, each with its time."""
        own, shared = (self.reuse, self.now), self.shared
        if shared is None:
            return [own]
        if self._offset is None:
            self._offset = shared.now - self.now
        return [own, (shared.reuse, shared.advance(self.now + self._offset))]

    def _begin(self, item: CacheLookups) -> None:
        if item.block_size != self.block_size:
            self.block_size = item.block_size
            self.reuse.clear()
        self.restart()
        self._shift = 0.0 if self._source is None else self.now - item.stamp
        self.now = item.stamp + self._shift
        self._source = item.source
        self._known_since = self.now + self.half_life if item.before else 0.0
        self.rate = item.rate
        self.reuse.sample(item.rate)

    def _look_up(
        self, event: Lookup, tokens: dict[str, float], idles: list[tuple[float, float]]
    ) -> None:
        counts, caches = event.kind == COUNTED, self._caches()
        missed, *_ = [reuse.admit(event, now, counts=counts) for reuse, now in caches]
        if keys := [*event.hot, *event.sampled]:
            self._keys.setdefault(event.request, []).extend(keys)
            self._held += len(keys)
        if event.kind == NOT_LOOKED_UP:
            tokens[NOT_CACHEABLE] += event.tokens
        if counts:
            size = self.block_size
            short = max(event.tokens - event.blocks * size, 0)
            for reuse, _ in caches:
                reuse.curve.count(0, 0, short / size)
            tokens[TOO_SHORT] += short
            tokens[COLD if self.now >= self._known_since else UNKNOWN] += missed.cold * size
            tokens[CLEARED] += missed.cleared * size
            tokens[IN_PROGRESS] += missed.in_progress * size
            for idle, blocks in missed.evicted:
                tokens[EVICTED] += blocks * size
                idles.append((idle, blocks))
        if self._held > MAX_HELD_KEYS:
            # Ends of requests are missing, or the sender is hostile.
            self.restart()

    def _release(self, event: Released) -> None:
        # A request without keys may still have blocks of its output in the sample.
        keys = self._keys.get(event.request, [])
        start = max(len(keys) - event.key_count, 0)
        released = keys[start:]
        del keys[start:]
        self._held -= len(released)
        if not keys:
            self._keys.pop(event.request, None)
        released += event.sampled
        for reuse, now in self._caches():
            reuse.release(released, now)

    def _observations(
        self, tokens: dict[str, float], idles: list[tuple[float, float]]
    ) -> LookupObservations:
        missed: list[Observation] = []
        for reason, amount in tokens.items():
            self._rounded[reason].observe(missed, 0.0, amount)
        evicted: list[Observation] = []
        for idle, blocks in idles:
            self._blocks.observe(evicted, idle, blocks)
        counts = {reason: count for reason, (_, count) in zip(tokens, missed, strict=True)}
        return LookupObservations(counts, evicted)


def check(item: CacheLookups) -> None:
    """Reject an item that is invalid in any state.

    Raises:
        WireError: The rate is 0, the item has too many keys, or a lookup finds more than it looks up.
    """
    if item.rate < MIN_RATE:
        raise WireError("bad_item", "lookups that are not sampled")
    keys = 0
    for event in item.events:
        if isinstance(event, Lookup):
            keys += len(event.hot) + len(event.sampled)
            if event.blocks * item.block_size > event.tokens:
                raise WireError("bad_item", "more blocks than tokens")
            if max(event.found, event.hot_blocks) > event.blocks:
                raise WireError("bad_item", "more blocks were found than looked up")
            if max(event.sampled_found, event.sampled_hot) > len(event.sampled):
                raise WireError("bad_item", "more sampled blocks were found than looked up")
        elif isinstance(event, Released):
            keys += event.key_count + len(event.sampled)
    if keys > MAX_KEYS:
        raise WireError("too_big", "more keys than an item may have")
