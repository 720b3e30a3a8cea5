"""Which lives are followed, and for how many blocks an observation stands.

A life is followed if the number that it mixes to is below a bound. What is sampled at one
rate is so sampled at every higher one, and everyone who mixes alike follows the same.
"""

from __future__ import annotations

from weakref import WeakSet

import msgspec

from sidestep.tracking.kv_blocks.observations import Observation

ALL = 1 << 64
MASK = ALL - 1
FIRST, SHIFT, SECOND = 0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D, 0xD6E8FEB86659FD93
"""Odd and without pattern. No other process has to agree on them but exporters of the
same engines, which then sample the same hashes."""


def mix(value: int) -> int:
    """A number below 2**64 that looks drawn anew for each ``value``.

    Engines' hashes can be counters, or aligned, or have less than 64 bits; the
    top bits of the result depend on all of theirs.
    """
    first = value * FIRST + SHIFT & MASK
    return (first ^ first >> 32) * SECOND & MASK


class Share(msgspec.Struct, weakref=True, eq=False):
    """How likely a life was to be followed; one object for all lives with the same chance.

    Attributes:
        rate: What the sender let through.
        bound: Of that, what is kept here, of 2**64: the least of the lives' time.
        weight: Blocks that an observation stands for.
    """

    rate: float
    bound: int
    weight: float


class Sample:
    """The part of one kind of lives that is followed.

    Args:
        scale: Whether an observation counts for all blocks that it stands for, or for one.

    Attributes:
        bound: What a life that begins now must mix below.
    """

    __slots__ = ("_current", "_scale", "_shares", "bound")

    def __init__(self, *, scale: bool) -> None:
        self.bound = ALL
        self._scale = scale
        self._shares: WeakSet[Share] = WeakSet()
        self._current: Share | None = None

    def share(self, rate: float = 1.0) -> Share:
        """The one of a life that begins now."""
        share = self._current
        if share is None or share.rate != rate or share.bound != self.bound:
            share = self._current = Share(rate, self.bound, self.weight(rate, self.bound))
            self._shares.add(share)
        return share

    def limit(self, bound: int) -> bool:
        """Follow what mixes below ``bound`` from now on; whether earlier lives can be outside.

        The shares of earlier lives are lowered at once, however many lives have them; where the
        bound was raised they stay.
        """
        self.bound = bound
        lowered = [share for share in self._shares if share.bound > bound]
        for share in lowered:
            share.bound = bound
            share.weight = self.weight(share.rate, bound)
        return bool(lowered)

    def forget(self) -> None:
        """Leave the shares of all lives so far as they are: these lives are over."""
        self._shares.clear()
        self._current = None

    def weight(self, rate: float, bound: int = ALL) -> float:
        """Blocks that an observation stands for."""
        chance = rate * (bound / ALL)
        return 1.0 / chance if self._scale and chance else 1.0


class Diffusion:
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
