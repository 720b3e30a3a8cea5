"""Trace contexts of requests whose latencies front ends report: those have no id, but an arrival.

The arrival is exact to the last bit, see ``front_end``. Parallel samples share one, and their trace.
"""

from __future__ import annotations

MAX_TRACES = 4096
"""Requests whose latencies may still be reported."""


class Traces:
    """The trace contexts of an engine's latest requests, by arrival."""

    def __init__(self) -> None:
        self._by_arrival: dict[float, str] = {}

    def add(self, arrival: float, trace: str) -> None:
        """Remember the trace of a request; of two requests that arrived at once, none is known."""
        known = self._by_arrival.setdefault(arrival, trace)
        if known != trace:
            self._by_arrival[arrival] = ""
        if len(self._by_arrival) > MAX_TRACES:
            del self._by_arrival[next(iter(self._by_arrival))]

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._by_arrival)

    def find(self, arrival: float) -> str:
        """Return the trace of the request that arrived then; empty if it is unknown."""
        return self._by_arrival.get(arrival, "")
