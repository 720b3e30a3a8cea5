"""What KV blocks have shown: the observations that one call of ``residency`` has to tell."""

from __future__ import annotations

import msgspec

Observation = tuple[float, int]
"""Seconds, or a number of hits, and how many blocks it stands for."""


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
        halvings: How often the ratio was halved.
        abandoned: Lives whose end was not seen.
        unknown: Events of blocks whose birth was not seen, or before their last one.
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
    halvings: int = 0
    abandoned: int = 0
    unknown: int = 0
    cached: dict[str, CachedLives] = {}
