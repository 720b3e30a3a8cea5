"""Room for requests in flight, of all engines together: each has a share that no other can take."""

from __future__ import annotations

FULL_SHARES = 2
"""How many engines may follow as many as one may."""


class RequestCapacity:
    """Counts the requests that all engines follow.

    Attributes:
        capacity: Of all of them; an engine within its share may pass it.
        engines: How many there are.
        used: Requests followed now.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.engines = self.used = 0

    def add_engine(self, capacity: int) -> None:
        """An engine comes that may follow ``capacity`` by itself."""
        self.capacity = max(self.capacity, FULL_SHARES * capacity)
        self.engines += 1

    @property
    def share(self) -> int:
        """What an engine may follow however many others do."""
        return self.capacity // max(self.engines, 1)

    def allows(self, tracked: int) -> bool:
        """Whether an engine that follows ``held`` may follow one more."""
        return self.used < self.capacity or tracked < self.share
