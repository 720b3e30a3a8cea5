"""Lives of cached blocks: hashes that media hold, each medium on its own."""

from __future__ import annotations

import msgspec

from sidestep.errors import WireError
from sidestep.protocol.block_events import MAX_HASHES, CacheChange, CacheEvents
from sidestep.protocol.limits import MAX_LABELS, is_printable
from sidestep.tracking.kv_blocks.capacity import Room, Turns
from sidestep.tracking.kv_blocks.observations import CachedLives, Lives
from sidestep.tracking.kv_blocks.sampling import (
    ALL,
    FIRST,
    MASK,
    SECOND,
    SHIFT,
    Diffusion,
    Sample,
    Share,
    mix,
)

KINDS = {"stored", "removed", "cleared", "begun", "lost"}
_NEVER = -1.0
"""No stamp: none is negative."""


class _Life(msgspec.Struct, gc=False):
    """A hash in a medium.

    Attributes:
        hit: Stamp of the last hit whose time is known.
    """

    birth: float
    share: Share
    hit: float = _NEVER


class _Medium:
    """One medium's lives by hash."""

    __slots__ = ("gaps", "idles", "lifetimes", "lives")

    def __init__(self) -> None:
        self.lives: dict[int, _Life] = {}
        self.lifetimes, self.idles, self.gaps = Diffusion(), Diffusion(), Diffusion()


def check(changes: list[CacheChange]) -> None:
    """Whether ``changes`` can be followed, by themselves.

    Raises:
        WireError: Not an engine's.
    """
    if {change.kind for change in changes} - KINDS:
        raise WireError("bad_item", "an unknown kind of cache event")
    if sum(len(change.hashes) for change in changes) > MAX_HASHES:
        raise WireError("too_big", "more hashes than an item may have")
    if not all(is_printable(change.medium) for change in changes):
        raise WireError("bad_label", "a medium's name is not printable")
    if len({change.medium for change in changes if change.kind == "stored"}) > MAX_LABELS:
        raise WireError("bad_item", "too many media")


class CachedBlocks:
    """Those of one engine that are sampled, by a mix of their hash alone.

    Attributes:
        out: Where the call that is under way puts what there is to tell.
        unknown: As ``Residency.unknown``.
        abandoned: As ``Residency.abandoned``.
    """

    def __init__(self, sample: Sample, room: Room, out: Lives) -> None:
        self.out = out
        self.unknown = 0
        self.abandoned = 0
        self._sample = sample
        self._room = room
        self._media: dict[str, _Medium] = {}
        self._source: int | None = None
        room.sweepers.append(self._sweep)

    @property
    def known(self) -> bool:
        """Whether any cache has told of itself."""
        return self._source is not None

    def apply(self, item: CacheEvents) -> None:
        """Follow an item's changes.

        Raises:
            WireError: The item is not one of an engine; nothing of it was applied.
        """
        self._check(item.changes)
        if item.source != self._source:
            self._source = item.source
            for medium in self._media.values():
                if medium.lives:
                    self._forget(medium, abandoned=True)
            self._sample.forget()
        for change in item.changes:
            if change.kind == "cleared":
                self._clear(change.medium)
                continue
            hashes, bound = change.hashes, self._sample.bound
            if bound < ALL:
                # As mix, written out: nearly all hashes end here, so this line is the cost.
                hashes = [
                    value
                    for value in hashes
                    if ((first := value * FIRST + SHIFT & MASK) ^ first >> 32) * SECOND & MASK
                    < bound
                ]
            if not hashes:
                continue
            if change.kind == "stored":
                self._store(change.medium, hashes, change.stamp)
            elif change.kind == "removed":
                self._remove(change.medium, hashes, change.stamp)

    def _check(self, changes: list[CacheChange]) -> None:
        check(changes)
        stored = {change.medium for change in changes if change.kind == "stored"}
        if not stored <= self._media.keys() and len(stored | self._media.keys()) > MAX_LABELS:
            raise WireError("bad_item", "too many media")

    def _clear(self, name: str) -> None:
        """Forget one medium, or where none is named all."""
        named = [self._media[name]] if name in self._media else []
        for medium in named if name else self._media.values():
            if medium.lives:
                self._forget(medium, abandoned=False)

    def _store(self, name: str, hashes: list[int], now: float) -> None:
        room, sample = self._room, self._sample
        medium = self._media.get(name)
        if medium is None:
            medium = self._media[name] = _Medium()
        lives, bound = medium.lives, sample.bound
        for value in hashes:
            life = lives.get(value)
            if life is not None and room.sweeping and _is_outside(value, life):
                del lives[value]
                room.tracked -= 1
                life = None
            if life is None:
                # Since these hashes were sampled, perhaps.
                if room.tracked >= room.capacity or sample.bound < bound:
                    mixed = mix(value)
                    while mixed < sample.bound and room.tracked >= room.capacity:
                        room.make()
                    if mixed >= sample.bound:
                        continue
                lives[value] = _Life(now, sample.share())
                room.tracked += 1
                continue
            before = life.hit
            if now < max(life.birth, before):
                self.unknown += 1
                continue
            life.hit = now
            if before != _NEVER:
                medium.gaps.observe(self._of(name).gaps, now - before, life.share.weight)

    def _remove(self, name: str, hashes: list[int], now: float) -> None:
        medium = self._media.get(name)
        if medium is None:
            return
        room = self._room
        for value in hashes:
            life = medium.lives.pop(value, None)
            if life is None:
                continue
            room.tracked -= 1
            if room.sweeping and _is_outside(value, life):
                continue
            last = max(life.birth, life.hit)
            if now < last:
                self.unknown += 1
                continue
            observed, weight = self._of(name), life.share.weight
            medium.lifetimes.observe(observed.lifetimes, now - life.birth, weight)
            medium.idles.observe(observed.idles, now - last, weight)

    def _of(self, name: str) -> CachedLives:
        """One medium's part of what this call has to tell."""
        observed = self.out.cached.get(name)
        if observed is None:
            observed = self.out.cached[name] = CachedLives()
        return observed

    def _forget(self, medium: _Medium, *, abandoned: bool) -> None:
        """Know of no lives in ``medium``."""
        self._room.leave(self._leave(medium.lives, abandoned=abandoned))
        medium.lives = {}

    def _leave(self, lives: dict[int, _Life], *, abandoned: bool) -> Turns:
        for value in list(lives):
            life = lives.pop(value)
            self._room.tracked -= 1
            self.abandoned += abandoned and not _is_outside(value, life)
            yield

    def _sweep(self) -> Turns:
        for lives in [medium.lives for medium in self._media.values()]:
            for value in list(reversed(lives)):
                life = lives.get(value)
                if life is not None and _is_outside(value, life):
                    del lives[value]
                    self._room.tracked -= 1
                yield


def _is_outside(value: int, life: _Life) -> bool:
    """Whether a lower rate or thinning has let ``life`` go since it began."""
    bound = life.share.bound
    return bound < ALL and mix(value) >= bound
