"""Keys of blocks, the least first, of which most are still tracked."""

from __future__ import annotations

from collections.abc import Container
from heapq import heappop, heappush

SIFT = 8
"""Keys that are looked at for each that is added: no call looks at all of them."""


class LeastKeys:
    """Keys, each once."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._heap: list[int] = []
        self._unsifted: list[int] = []
        """Another heap, from which wanted keys are moved into the first one."""

    def __len__(self) -> int:
        return len(self._known)

    def add(self, key: int, tracked: Container[int], most: int) -> None:
        """Add a key; with more than twice ``most`` of them, forget those that are not ``tracked``."""
        if key in self._known:
            return
        self._known.add(key)
        heappush(self._heap, key)
        if self._unsifted:
            self._sift(tracked)
        elif len(self._known) > 2 * most:
            self._unsifted, self._heap = self._heap, []

    def pop(self) -> int:
        """Remove the least key."""
        key = heappop(self._lower_heap())
        self._known.discard(key)
        return key

    def _lower_heap(self) -> list[int]:
        heap, unsifted = self._heap, self._unsifted
        return unsifted if unsifted and (not heap or unsifted[0] < heap[0]) else heap

    def _sift(self, tracked: Container[int]) -> None:
        unsifted = self._unsifted
        for _ in range(min(SIFT, len(unsifted))):
            # A heap without its end is one.
            key = unsifted.pop()
            if key in tracked:
                heappush(self._heap, key)
            else:
                self._known.discard(key)
