"""The shared limit on requests in flight, of which each engine has a guaranteed share."""

from __future__ import annotations

FULL_SHARES = 2
"""Engines that may each track the full number of requests."""


class RequestCapacity:
    """The number of requests that all engines may track, and that they track now.

    Attributes:
        capacity: Most requests of all engines; an engine within its share may exceed it.
        engines: Number of engines.
        used: Requests tracked now.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.engines = self.used = 0

    def add_engine(self, capacity: int) -> None:
        """Add an engine that may track ``capacity`` requests."""
        self.capacity = max(self.capacity, FULL_SHARES * capacity)
        self.engines += 1

    @property
    def share(self) -> int:
        """Requests that an engine may track whatever the others do."""
        return self.capacity // max(self.engines, 1)

    def allows(self, tracked: int) -> bool:
        """Return whether an engine that tracks ``tracked`` requests may track one more."""
        return self.used < self.capacity or tracked < self.share
