"""Recorded calls of an engine's metric objects, for the publisher thread.

Recording a call appends one tuple to a deque; the publisher thread makes items of them.
Nothing here needs an engine or prometheus_client.
"""

from __future__ import annotations

import abc
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from sidestep.engines.items import Item

Labels = Mapping[str, Any]
Values = tuple[str, ...]
Key = Labels | Values
"""All labels of a child, or its own label values as exposed."""

MAX_QUEUED = 1 << 16
"""Maximum number of recorded calls that wait; a flush runs every 50 to 250 ms."""
SLICE = 256
"""Recorded calls converted at once, before the engine gets the interpreter again."""


class DeferredMetrics:
    """The recorded calls of one process.

    Attributes:
        queue: Recorded calls: source, key, value and weight.
        lists: Observations that are recorded in lists, outside the queue.
        dropped: Calls dropped so far because the queue was full.
        limit: Maximum number of waiting calls; 0 after ``close``.
        is_full: A source sets it when it has as many calls as an item holds.
        fail: ``Publisher.fail``, once there is a publisher.
    """

    def __init__(self) -> None:
        self.queue: deque[tuple[MetricSource, Any, Any, int]] = deque()
        self.lists: list[Observations] = []
        self.dropped = 0
        self.limit = MAX_QUEUED
        self.is_full = False
        self._touched: dict[MetricSource, None] = {}
        self.fail: Callable[[str], None] = lambda _: None

    def __len__(self) -> int:
        return len(self.queue) + sum(bool(each.weights) for each in self.lists)

    def clear(self) -> None:
        """Discard all recorded calls; in a forked child they belong to the parent."""
        self.queue.clear()
        for each in self.lists:
            each.take()

    def close(self) -> None:
        """Discard all recorded calls and accept no more."""
        self.limit = 0
        self.clear()

    def recorder(self, source: MetricSource) -> Callable[[Any, Any, int], None]:
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
        for each in self.lists:
            if each.weights:
                self._touched[each.source] = None
                each.source.add(each.key, each.take(), 1)
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


class Observations:
    """Observations of one child of a histogram in two lists, for the most frequent calls of all."""

    def __init__(self, deferred: DeferredMetrics, source: MetricSource, key: Key) -> None:
        self.source = source
        self.key = key
        self.weights: list[int] = []
        self._values: list[float] = []
        self._deferred = deferred

    def record(self, value: float, weight: int) -> None:
        """Record ``weight`` equal observations."""
        if len(self.weights) < self._deferred.limit:
            # The order matters: the publisher thread takes as many values as there are weights.
            self._values.append(value)
            self.weights.append(weight)
        else:
            self._deferred.dropped += 1

    def take(self) -> list[list[Any]]:
        """Remove all observations; return values and weights, in the publisher thread."""
        part = slice(len(self.weights))
        taken: list[list[Any]] = [self._values[part], self.weights[part]]
        del self._values[part], self.weights[part]
        return taken


class MetricSource(abc.ABC):
    """A source of recorded calls; its methods run in the publisher thread.

    Args:
        deferred: Where the calls are recorded.
        engine: Index of the engine in the stream.

    Attributes:
        record: Records a call; see ``DeferredMetrics.recorder``.
    """

    order = 1
    """Sources of a lower order make their items first."""

    def __init__(self, deferred: DeferredMetrics, engine: int) -> None:
        self._deferred = deferred
        self._engine = engine
        self.record = deferred.recorder(self)

    @abc.abstractmethod
    def add(self, key: Any, value: Any, weight: int) -> None:
        """Add a recorded call to the next items."""

    @abc.abstractmethod
    def items(self, now: float) -> list[Item]:
        """Return the items of the calls added since the previous call."""

    def current_state(self, now: float) -> list[Item]:  # noqa: ARG002 - for sources with a state
        """Return the items that a restarted exporter needs again."""
        return []
