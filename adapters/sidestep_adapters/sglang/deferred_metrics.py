"""What an engine tells its own metric objects, noted down for the publisher's thread.

A note is one tuple appended to a deque; the publisher's thread makes items of them.
Nothing here needs an engine, nor prometheus_client.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sidestep.engines.items import Item

Labels = Mapping[str, Any]
Values = tuple[str, ...]
Key = Labels | Values
"""All labels of a child, or its own values as they are shown."""
Note = Callable[[Key, Any, int], None]

LIMIT = 1 << 16
"""Notes that wait at most; a flush comes every 50 ms."""
SLICE = 256
"""Notes that become items at once: the interpreter belongs to the engine."""


class Notes:
    """The notes of one process.

    Attributes:
        lost: Notes that found no place, so far.
        limit: How many may wait; 0 once nobody will have them.
        fail: Called inside ``except`` with what went wrong; a Publisher's.
    """

    def __init__(self) -> None:
        self.queue: deque[tuple[Source, Any, Any, int]] = deque()
        self.lost = 0
        self.limit = LIMIT
        self.fail: Callable[[str], None] = _ignore

    def __len__(self) -> int:
        return len(self.queue)

    def clear(self) -> None:
        """Forget all: they are another process's."""
        self.queue.clear()

    def close(self) -> None:
        """Forget all, and take no more: nobody will have them."""
        self.limit = 0
        self.clear()

    def of(self, source: Source) -> Note:
        """What notes for ``source``; a closure, for the engine's loops call it."""
        queue = self.queue
        append = queue.append

        def note(key: Key, value: Any, weight: int) -> None:
            if len(queue) < self.limit:
                append((source, key, value, weight))
            else:
                self.lost += 1

        return note

    def items(self) -> list[Item]:
        """The items of a slice of the notes, in the publisher's thread."""
        touched: dict[Source, None] = {}
        queue = self.queue
        for _ in range(min(len(queue), SLICE)):
            source, key, value, weight = queue.popleft()
            try:
                source.take(key, value, weight)
                touched[source] = None
            except Exception:  # noqa: BLE001 - what an engine says oddly costs itself
                self.fail("a value could not be read")
        now = time.monotonic()
        made: list[Item] = []
        for source in touched:
            try:
                made += source.items(now)
            except Exception:  # noqa: BLE001 - likewise
                self.fail("what was noted could not be told")
        return made


def _ignore(what: str) -> None:
    """Nobody listens yet."""


class Source:
    """Whom notes are of; both calls come in the publisher's thread."""

    def take(self, key: Any, value: Any, weight: int) -> None:
        """Add a note to what the next items will tell."""
        raise NotImplementedError

    def items(self, now: float) -> Sequence[Item]:
        """What was noted since the last call."""
        raise NotImplementedError
