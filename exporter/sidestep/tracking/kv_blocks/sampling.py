"""Sampling of KV blocks at a fixed rate: which hashes are tracked, and the weight of a block."""

from __future__ import annotations

import dataclasses

Observation = tuple[float, int]
"""Seconds or a number of hits, and the number of blocks that it stands for."""


@dataclasses.dataclass(slots=True)
class Sampling:
    """Settings of block tracking, which all engines share.

    Attributes:
        rate: Share of cached hashes to track, 0 to 1; may change at any time.
        scale: Count an observation for all blocks that it stands for, not for one.
        capacity: Blocks tracked at once, per engine.
    """

    rate: float = 0.01
    scale: bool = False
    capacity: int = 100_000

    def weight(self, rate: float) -> float:
        """Return how many blocks an observation stands for at the sampling ``rate``."""
        return 1.0 / rate if self.scale and rate else 1.0


class Diffusion:
    """Error diffusion of weights to integers: the remainder is carried on, so sums are exact."""

    __slots__ = ("_carry",)

    def __init__(self) -> None:
        # Starting at a half rounds to nearest, so the error is unbiased.
        self._carry = 0.5

    def observe(self, observed: list[Observation], value: float, weight: float) -> None:
        """Append ``value`` with ``weight`` rounded, the last remainder included."""
        due = self._carry + weight
        count = int(due)
        self._carry = due - count
        observed.append((value, count))
