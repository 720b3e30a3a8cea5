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
Recorder = Callable[[Key, Any, int], None]

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
        fail: Called inside ``except`` with a description of the problem; ``Publisher.fail``.
    """

    def __init__(self) -> None:
        self.queue: deque[tuple[MetricSource, Any, Any, int]] = deque()
        self.dropped = 0
        self.limit = MAX_QUEUED
        self.fail: Callable[[str], None] = _ignore

    def __len__(self) -> int:
        return len(self.queue)

    def clear(self) -> None:
        """Discard all recorded calls; in a forked child they belong to the parent."""
        self.queue.clear()

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
        touched: dict[MetricSource, None] = {}
        queue = self.queue
        for _ in range(min(len(queue), SLICE)):
            source, key, value, weight = queue.popleft()
            try:
                source.add(key, value, weight)
                touched[source] = None
            except Exception:  # noqa: BLE001 - an invalid value drops its own call only
                self.fail("a value could not be read")
        now = time.monotonic()
        made: list[Item] = []
        for source in touched:
            try:
                made += source.items(now)
            except Exception:  # noqa: BLE001 - as above
                self.fail("recorded values could not be converted to items")
        return made


def _ignore(problem: str) -> None:
    """Ignore a problem until a publisher exists."""


class MetricSource(Protocol):
    """A source of recorded calls; its methods run in the publisher thread."""

    def add(self, key: Any, value: Any, weight: int) -> None:
        """Add a recorded call to the next items."""

    def items(self, now: float) -> list[Item]:
        """Return the items of the calls added since the previous call."""

    def current_state(self, now: float) -> list[Item]:
        """Return the items that a restarted exporter needs again."""
