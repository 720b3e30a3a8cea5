"""Latencies in fixed memory: counts per bucket of nanoseconds, at most 12 % wide."""

from __future__ import annotations

from array import array

DIGITS = 3
TOP = 40
"""Bits of the longest latency, 18 minutes."""


class Latencies:
    """Latencies of a long run."""

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * (TOP << DIGITS)))
        self.most = 0
        self.count = 0

    def note(self, nanoseconds: int) -> None:
        """Count one latency."""
        shift = max(nanoseconds.bit_length() - 1 - DIGITS, 0)
        place = min((shift << DIGITS) + (nanoseconds >> shift), len(self._counts) - 1)
        self._counts[place] += 1
        self.count += 1
        self.most = max(self.most, nanoseconds)

    def percentile(self, share: float) -> float:
        """Return the microseconds that ``share`` (0 to 1) of the latencies did not exceed, to the end of a bucket."""
        left = share * self.count
        for place, count in enumerate(self._counts):
            left -= count
            if count and left <= 0:
                return min(_upper(place), self.most) / 1e3
        return self.most / 1e3

    @property
    def figures(self) -> dict[str, float]:
        """Return the figures of a report, in microseconds."""
        shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
        found = {name: round(self.percentile(share), 2) for name, share in shares.items()}
        return {"count": self.count, **found, "max": round(self.most / 1e3, 2)}


def _upper(place: int) -> int:
    shift = max((place >> DIGITS) - 1, 0)
    return (((place - (shift << DIGITS)) + 1) << shift) - 1
