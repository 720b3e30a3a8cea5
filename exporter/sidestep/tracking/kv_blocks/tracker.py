"""Limits and results that the trackers of physical and cached KV blocks share."""

from __future__ import annotations

import msgspec

from sidestep.tracking.kv_blocks.sampling import Observation, Sampling


class CachedObservations(msgspec.Struct, gc=False):
    """Observations of the hashes in one medium; a hit is a hash that is stored again."""

    lifetimes: list[Observation] = []
    idles: list[Observation] = []
    gaps: list[Observation] = []


class BlockObservations(msgspec.Struct, gc=False):
    """Observations and counts since the last call.

    Attributes:
        lifetimes: Birth to eviction.
        idles: Last hit, or birth, to eviction.
        last_gaps: Gaps between the last four hits, at eviction, as in the engine.
        gaps: Gaps between any two successive hits, at the later one.
        reuses: Hits from birth to eviction, at eviction.
        reset_ages: Lifetimes of blocks that a reset evicted.
        reset_idles: Idle times of blocks that a reset evicted.
        resets: Number of resets of the whole cache.
        refused: Sampled blocks that were not tracked, at the capacity.
        abandoned: Tracked blocks whose eviction was not seen.
        unknown: Events of blocks whose birth was not seen, and stamps before the block's last one.
        cached: Observations of hashes by medium.
        stores: Blocks by which the GPU's cache was too small to have a hash that is stored; infinite
            if it was not removed before.
        surplus: Stores of hashes that a medium had, less removals of hashes that it had not: those of the
            sample, times what each stands for. Events are missing, or two requests had equal blocks.
        absences: Seconds from the removal of a hash from the GPU's cache to its next store.
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
    stores: list[Observation] = []
    absences: list[Observation] = []
    surplus: dict[str, int] = {}


class BlockTracker:
    """Tracker of sampled blocks of one engine, at most ``capacity`` at once.

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
        """True if ``drain`` has more to return, without another event."""
        return False

    @property
    def rate(self) -> float | None:
        """Share of blocks that is sampled; None while unknown."""
        raise NotImplementedError

    def resize(self, capacity: int) -> None:
        """Track at most ``capacity`` blocks; abandon the newest excess ones."""
        raise NotImplementedError

    def drain(self) -> BlockObservations:
        """Return the observations since the last call."""
        out, self._out = self._out, BlockObservations()
        return out
