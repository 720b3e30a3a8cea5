"""Limits and results that both kinds of tracked KV blocks share."""

from __future__ import annotations

import msgspec

from sidestep.tracking.kv_blocks.sampling import Observation, Sampling


class CachedObservations(msgspec.Struct, gc=False):
    """Observations of the hashes in one medium; a reuse is being stored again."""

    lifetimes: list[Observation] = []
    idles: list[Observation] = []
    gaps: list[Observation] = []


class BlockObservations(msgspec.Struct, gc=False):
    """Observations and counts since the last call.

    Attributes:
        lifetimes: Birth to eviction.
        idles: Last hit, or birth, to eviction.
        last_gaps: Between the last four hits, at eviction, as the engine has them.
        gaps: Between any two hits in succession, at the later one.
        reuses: Hits from birth to eviction, at eviction.
        reset_ages: As lifetimes, of blocks that a reset evicted.
        reset_idles: As idles, of blocks that a reset evicted.
        resets: Times that the whole cache was emptied.
        refused: Sampled blocks that were not tracked, at the capacity.
        abandoned: Tracked blocks whose eviction was not seen.
        unknown: Events of blocks whose birth was not seen, and stamps before the block's last one.
        cached: Observations of hashes by medium.
    """

    lifetimes: list[Observation] = []
    idles: list[Observation] = []
    last_gaps: list[Observation] = []
    gaps: list[Observation] = []
    reuses: list[Observation] = []
    reset_ages: list[Observation] = []
    reset_idles: list[Observation] = []
    resets: int = 0
    refused: int = 0
    abandoned: int = 0
    unknown: int = 0
    cached: dict[str, CachedObservations] = {}


class BlockTracker:
    """Tracks sampled blocks of one engine, never more than ``capacity``.

    Attributes:
        tracked: Blocks held now.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.tracked = 0
        self.capacity = sampling.capacity
        self._sampling = sampling
        self._out = BlockObservations()

    @property
    def waiting(self) -> bool:
        """Whether ``take`` has more to return, without another event."""
        return False

    @property
    def rate(self) -> float | None:
        """Share of blocks that is sampled; None while that is not known."""
        raise NotImplementedError

    def resize(self, capacity: int) -> None:
        """Track at most ``capacity`` blocks; abandon the newest of those that are too many."""
        raise NotImplementedError

    def take(self) -> BlockObservations:
        """Return what was observed since the last call."""
        out, self._out = self._out, BlockObservations()
        return out
