"""Peers that send nonsense faster than a mistake can explain are ignored for a while."""

from __future__ import annotations

from typing import TypeVar

LIMIT = 100
"""Bad messages within ``PERIOD`` that are forgiven."""
PERIOD = 1.0
PENALTY = 10.0
CAPACITY = 1024
"""Peers remembered of either kind; the one remembered longest makes room."""

Value = TypeVar("Value")
Peer = bytes | str
"""A connection; where it has a key, the key: a new connection is no new start."""


class Throttle:
    """Counts bad messages per peer, in a table that no number of peers can grow."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._counts: dict[Peer, tuple[float, int]] = {}
        self._ignored: dict[Peer, float] = {}
        """Until when."""

    def __len__(self) -> int:
        return len(self._counts) + len(self._ignored)

    def ignores(self, peer: Peer, now: float) -> bool:
        """Whether ``peer`` is not heard at the moment."""
        if not self._ignored or peer not in self._ignored:
            return False
        if now < self._ignored[peer]:
            return True
        del self._ignored[peer]
        return False

    def bad(self, peer: Peer, now: float) -> bool:
        """Count a bad message; whether this one makes ``peer`` ignored."""
        since, count = self._counts.pop(peer, (now, 0))
        if now - since >= PERIOD:
            since, count = now, 0
        if count + 1 > LIMIT:
            self._put(self._ignored, peer, now + PENALTY)
            return True
        self._put(self._counts, peer, (since, count + 1))
        return False

    def _put(self, table: dict[Peer, Value], peer: Peer, value: Value) -> None:
        if len(table) >= self._capacity:
            del table[next(iter(table))]
        table[peer] = value
