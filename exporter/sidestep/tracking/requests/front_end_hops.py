"""Time from a first token in the engine's core until its front end has received it.

The core and the front end report a request's first token separately, in any order and without an
id. Both know the request's arrival to the last bit: one process has set it, and a latency that was
subtracted from a Unix time is exact. Parallel samples have one arrival, and are left out.
"""

from __future__ import annotations

MAX_UNMATCHED = 4096
"""Requests of each side whose other side is awaited; of some, such as aborted ones, it never comes."""


class FrontEndHops:
    """First tokens that one of the two sides has reported: Unix times, by the request's arrival."""

    def __init__(self) -> None:
        self._core: dict[float, float] = {}
        self._front_end: dict[float, float] = {}

    def core_output(self, arrival: float, at: float) -> float | None:
        """Return the seconds of the hop if the front end has reported the request, else None."""
        received = self._front_end.pop(arrival, None)
        if received is None:
            _remember(self._core, arrival, at)
            return None
        return received - at

    def front_end_output(self, arrival: float, at: float) -> float | None:
        """Return the seconds of the hop if the core has reported the request, else None."""
        sent = self._core.pop(arrival, None)
        if sent is None:
            _remember(self._front_end, arrival, at)
            return None
        return at - sent


def _remember(side: dict[float, float], arrival: float, at: float) -> None:
    side[arrival] = at
    if len(side) > MAX_UNMATCHED:
        del side[next(iter(side))]
