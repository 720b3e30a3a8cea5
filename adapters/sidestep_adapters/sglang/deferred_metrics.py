"""Recorded calls of an engine's metric objects, for the publisher thread.

Recording a call appends one tuple to a deque; the publisher thread makes items of them.
Nothing here needs an engine or prometheus_client.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sidestep.engines.items import Item

Labels = Mapping[str, Any]
Values = tuple[str, ...]
Key = Labels | Values
"""All labels of a child, or its own label values as exposed."""
Recorder = Callable[[Any, Any, int], None]

MAX_QUEUED = 1 << 16
"""Maximum number of recorded calls that wait; a flush runs every 50 to 250 ms."""
SLICE = 256
"""Recorded calls converted at once, before the engine gets the interpreter again."""


class DeferredMetrics:
    """The recorded calls of one process.

    Attributes:
        queue: Recorded calls: source, key, value and weight.
        dropped: Calls dropped so far because the queue was full.
        limit: Maximum number of waiting calls; 0 after ``close``.
        is_open: Whether the last call that was taken begins a group that has not ended: a source sets
            it. The items of a group are made together.
        is_full: Whether a source has as many calls as an item holds; it sets this.
        fail: Called inside ``except`` with a description of the problem; ``Publisher.fail``.
    """

    def __init__(self) -> None:
        self.queue: deque[tuple[MetricSource, Any, Any, int]] = deque()
        self.dropped = 0
        self.limit = MAX_QUEUED
        self.is_open = self.is_full = False
        self._touched: dict[MetricSource, None] = {}
        self.fail: Callable[[str], None] = _ignore

    def __len__(self) -> int:
        return len(self.queue)

    def clear(self) -> None:
        """Discard all recorded calls; in a forked child they belong to the parent."""
        self.queue.clear()
        self.is_open = False

    def close(self) -> None:
        """Discard all recorded calls and accept no more."""
        self.limit = 0
        self.clear()

    def recorder(self, source: MetricSource) -> Recorder:
        """Return a function that records calls for ``source``; a closure, for the engine's loops."""
        queue = self.queue
        append = queue.append

        def record(key: Key, value: Any, weight: int) -> None:
            if len(queue) < self.limit:
                append((source, key, value, weight))
            else:
                self.dropped += 1

        return record

    def items(self) -> list[Item]:
        """Remove a slice of the recorded calls and return their items; runs in the publisher thread."""
        queue = self.queue
        self.is_full = False
        for _ in range(min(len(queue), SLICE)):
            self._take()
            if self.is_full:
                break
        while self.is_open and queue:
            self._take()
        if self.is_open:
            # The engine's thread records the rest of the group just now.
            return []
        touched, self._touched = self._touched, {}
        now = time.monotonic()
        made: list[Item] = []
        for source in sorted(touched, key=lambda source: source.order):
            try:
                made += source.items(now)
            except Exception:  # noqa: BLE001 - as above
                self.fail("recorded values could not be converted to items")
        return made

    def _take(self) -> None:
        source, key, value, weight = self.queue.popleft()
        try:
            self._touched[source] = None
            source.add(key, value, weight)
        except Exception:  # noqa: BLE001 - an invalid value drops its own call only
            self.fail("a value could not be read")


def _ignore(problem: str) -> None:
    """Ignore a problem until a publisher exists."""


class MetricSource(Protocol):
    """A source of recorded calls; its methods run in the publisher thread.

    Attributes:
        order: Sources of a lower order make their items first.
    """

    order: int

    def add(self, key: Any, value: Any, weight: int) -> None:
        """Add a recorded call to the next items."""

    def items(self, now: float) -> list[Item]:
        """Return the items of the calls added since the previous call."""

    def current_state(self, now: float) -> list[Item]:
        """Return the items that a restarted exporter needs again."""
