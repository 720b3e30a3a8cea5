"""Throttling of peers that send too many invalid messages (R8 of docs/protocol.md)."""

from __future__ import annotations

from typing import TypeVar

LIMIT = 100
"""Invalid messages tolerated within ``PERIOD`` seconds."""
PERIOD = 1.0
PENALTY = 10.0
"""Seconds that a throttled peer is ignored."""
CAPACITY = 1024
"""Peers tracked per table; the oldest entry is evicted."""

Value = TypeVar("Value")
Peer = bytes | str
"""Routing id of a connection, or its key, so that reconnecting does not reset the count."""


class Throttle:
    """Counter of invalid messages per peer, in tables of bounded size."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._counts: dict[Peer, tuple[float, int]] = {}
        self._ignored: dict[Peer, float] = {}
        """By peer: the time until which it is ignored."""

    def __len__(self) -> int:
        return len(self._counts) + len(self._ignored)

    def ignores(self, peer: Peer, now: float) -> bool:
        """Return whether ``peer`` is ignored at ``now``."""
        if not self._ignored or peer not in self._ignored:
            return False
        if now < self._ignored[peer]:
            return True
        del self._ignored[peer]
        return False

    def count_invalid(self, peer: Peer, now: float) -> bool:
        """Count an invalid message; return whether ``peer`` is ignored from now on."""
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
