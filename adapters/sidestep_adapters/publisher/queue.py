"""The queue between an engine's threads and the publisher thread.

Queueing is an append to a deque. The publisher thread encodes in short slices, between which
the engine gets the interpreter.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from sidestep.engines.items import Item, encode_item
from sidestep.protocol.limits import MAX_ITEM_BYTES
from sidestep.protocol.sender import Sender

QUEUE_ITEMS = 4096
ENCODING = 2e-4, 5e-4
"""Seconds of encoding after which the publisher yields the interpreter, and how many it yields for.

Slices of half the length make the encoding of small steps 50 % slower: each starts with cold caches.
"""
FOLDING = 1e-4, 1e-3
"""The same while items are folded, which takes tens of microseconds each."""
BACKLOG = 64
BACKLOG_SLICE = 1e-4
"""Least seconds of a slice for each ``BACKLOG`` queued items."""
URGENT = 1024
"""Number of queued items from which the publisher yields without sleeping."""

MAX_INTERVALS = 5
"""Most seconds between two flushes, in units of the least."""
FLUSH_RECORDS = 64
"""Records that a flush waits for, between the least and the most seconds."""

ItemFactory = Callable[[], Iterable[Item]]
"""A function that makes items in the publisher thread, from values that it owns."""


class DeferredItems(Protocol):
    """Values that the engine's threads recorded, to become items in the publisher thread."""

    @property
    def dropped(self) -> int:
        """Number of values dropped so far because the limit was reached."""

    def __len__(self) -> int: ...

    def items(self) -> Iterable[Item]:
        """Remove some of the recorded values, one slice of work, and return the items made of them."""

    def clear(self) -> None:
        """Discard all recorded values."""

    def close(self) -> None:
        """Discard all recorded values and accept no more."""


class ItemQueue:
    """Queued items, and recorded values that become items.

    Args:
        deferred: Recorded values, if the plugin has any.
        fail: Called inside ``except`` with a description of the problem.

    Attributes:
        overflowed: Items dropped because the queue was full, since the last encoding.
        encoding: Whether entries have left the queue and have not reached the sender.
    """

    def __init__(self, deferred: DeferredItems | None, fail: Callable[[str], None]) -> None:
        self.entries: deque[Item | ItemFactory] = deque()
        self.capacity = QUEUE_ITEMS
        self.overflowed = 0
        self.encoding = False
        self._deferred = deferred
        self._fail = fail
        self._counted_drops = 0
        """Dropped recorded values that the sender has counted."""

    def __len__(self) -> int:
        return len(self.entries) + len(self._deferred or ())

    def clear(self) -> None:
        """Discard all entries; a forked child calls this, since they belong to its parent."""
        self.entries = deque()
        self.encoding = False
        if self._deferred is not None:
            self._deferred.clear()

    def reset(self) -> None:
        """Reset the capacity and the overflow count for a new stream."""
        self.capacity = QUEUE_ITEMS
        self.overflowed = 0

    def close(self) -> None:
        """Drop all entries and accept no more."""
        self.capacity = 0
        self.overflowed += len(self.entries)
        self.entries.clear()
        if self._deferred is not None:
            self._deferred.close()

    def encode(self, sender: Sender, describe: Callable[[], None]) -> None:
        """Encode all entries for ``sender``, in slices that leave the engine the interpreter.

        ``describe`` is called before each item, which may belong to a new engine.
        """
        self.encoding = True
        deferred = self._deferred
        slice_started = time.perf_counter()
        for _ in range(len(self.entries)):
            self._add(sender, self.entries.popleft(), describe)
            slice_started = self._yield_interpreter(sender, slice_started)
        for _ in range(len(deferred or ())):
            if not deferred:
                break
            self._add(sender, deferred.items, describe)
            slice_started = self._yield_interpreter(sender, slice_started)
        dropped = 0 if deferred is None else deferred.dropped
        sender.dropped += self.overflowed + dropped - self._counted_drops
        self.overflowed, self._counted_drops = 0, dropped
        self.encoding = False

    def _add(self, sender: Sender, entry: Item | ItemFactory, describe: Callable[[], None]) -> None:
        encoded: list[bytes] = []
        try:
            for item in entry() if callable(entry) else (entry,):
                try:
                    encoded.append(encode_item(item))
                except Exception:  # noqa: BLE001 - an invalid value drops its own item only
                    self._fail("an item could not be encoded")
                    sender.dropped += 1
        except Exception:  # noqa: BLE001 - as above
            self._fail("a record could not be made into items")
        describe()
        fitting = [item for item in encoded if len(item) <= MAX_ITEM_BYTES]
        sender.dropped += len(encoded) - len(fitting)
        sender.add(fitting)

    def _yield_interpreter(self, sender: Sender, slice_started: float) -> float:
        """Yield the interpreter to the engine if the slice is over; return when the slice began."""
        behind = len(self.entries)
        length, pause = FOLDING if sender.folding else ENCODING
        # Behind a busy engine thread each yield costs 5 ms: with a backlog, slices are longer.
        length = max(length, BACKLOG_SLICE * (1 + behind // BACKLOG))
        if time.perf_counter() - slice_started <= length:
            return slice_started
        # Without an idle core, a yield lasts as long as other threads run.
        time.sleep(pause if behind < URGENT else 0)
        return time.perf_counter()


def next_interval(interval: float, records: int, shortest: float) -> float:
    """Return the seconds until the next flush: as long as ``FLUSH_RECORDS`` take to be recorded.

    Each wake of the publisher costs as much as several small records, and delays the records by
    its interval.
    """
    needed = interval * FLUSH_RECORDS / max(records, 1)
    return min(max(needed, shortest), MAX_INTERVALS * shortest)
