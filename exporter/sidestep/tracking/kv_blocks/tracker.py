"""Sampling, limits and results that the trackers of physical and cached KV blocks share."""

from __future__ import annotations

import dataclasses

import msgspec

Observation = tuple[float, int]
"""Seconds or a number of hits, and the number of blocks that have it."""


@dataclasses.dataclass(slots=True)
class Sampling:
    """Settings of block tracking, which all engines share.

    Attributes:
        rate: Share of cached hashes to track, 0 to 1; may change at any time.
        scale: Whether an observation counts for all blocks that the sampled block stands for.
        capacity: Blocks tracked at once, per engine.
    """

    rate: float = 0.01
    scale: bool = False
    capacity: int = 100_000

    def weight(self, rate: float) -> float:
        """Return how many blocks an observation stands for at the sampling ``rate``."""
        return 1.0 / rate if self.scale and rate else 1.0


class Diffusion:
    """Rounding of weights to integers that carries the remainder on, so that sums are exact."""

    __slots__ = ("_carry",)

    def __init__(self) -> None:
        # A start at one half rounds to the nearest integer, so that the error has no bias.
        self._carry = 0.5

    def observe(self, observed: list[Observation], value: float, weight: float) -> None:
        """Append ``value`` with ``weight`` plus the last remainder, rounded."""
        due = self._carry + weight
        count = int(due)
        self._carry = due - count
        observed.append((value, count))


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
        abandoned: Tracked blocks whose eviction was not seen.
        unknown: Events of blocks whose birth was not seen, and events before their block's last one.
        cached: Observations of hashes by medium.
        stores: Blocks by which the GPU's cache was too small to have a hash that is stored; infinite
            if it was not removed before.
        surplus: Stores of hashes that a medium had, less removals of hashes that it did not have, scaled
            up from the sample. Events are missing, or two requests had equal blocks.
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
    """Tracker of sampled blocks of one engine, at most ``capacity`` at once."""

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
