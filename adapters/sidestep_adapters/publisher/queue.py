"""What the engine's threads have handed over and nobody has encoded yet.

Handing over is an append to a deque. The publisher's thread encodes in slices, between which
the engine has the interpreter.
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
SLICE = 1e-4
"""Seconds of encoding after which the publisher lets the engine have the interpreter."""
REST = 5e-4
FOLDING_REST = 1e-3
"""Likewise while items are folded, which takes tens of microseconds each."""
BACKLOG = 64
"""Queued items for which a slice grows by its length."""
URGENT = 1024
"""From which on it only lets the engine have the interpreter, and goes on."""

Later = Callable[[], Iterable[Item]]
"""Makes items in the publisher thread, from values of its own."""


class Notes(Protocol):
    """What the engine's threads noted down, to become items in the publisher's."""

    @property
    def lost(self) -> int:
        """How many found no place, so far."""

    def __len__(self) -> int: ...

    def items(self) -> Iterable[Item]:
        """The items of a slice of them, which are forgotten."""

    def clear(self) -> None:
        """Forget all."""

    def close(self) -> None:
        """Forget all, and take no more."""


class Pending:
    """Items in a queue, and notes that are to become items.

    Args:
        fail: Called inside ``except`` with what went wrong.

    Attributes:
        queue: Items, and what makes some.
        room: How many may be queued.
        overflowed: Items that found no room since the last encoding.
        encoding: Whether some have left the queue that no sender has yet.
    """

    def __init__(self, notes: Notes | None, fail: Callable[[str], None]) -> None:
        self.queue: deque[Item | Later] = deque()
        self.room = QUEUE_ITEMS
        self.overflowed = 0
        self.encoding = False
        self._notes = notes
        self._fail = fail
        self._lost = 0
        """Of the notes lost, those that are counted."""

    def __bool__(self) -> bool:
        return bool(self.queue or self._notes)

    def clear(self) -> None:
        """In a forked child: all that is here is the parent's."""
        self.queue = deque()
        self.encoding = False
        if self._notes is not None:
            self._notes.clear()

    def renew(self) -> None:
        """Begin to count, for a stream that begins."""
        self.room = QUEUE_ITEMS
        self.overflowed = 0

    def close(self) -> None:
        """Take nothing any more: nobody will have it."""
        self.room = 0
        self.overflowed += len(self.queue)
        self.queue.clear()
        if self._notes is not None:
            self._notes.close()

    def encode(self, sender: Sender, describe: Callable[[], None]) -> None:
        """Give ``sender`` what is here, in slices: the interpreter belongs to the engine.

        Args:
            sender: The stream's.
            describe: Called before each item, which may be of an engine that is new.
        """
        self.encoding = True
        notes = self._notes
        started = time.perf_counter()
        for _ in range(len(self.queue)):
            self._add(sender, self.queue.popleft(), describe)
            started = self._rest(sender, started)
        for _ in range(len(notes or ())):
            if not notes:
                break
            self._add(sender, notes.items, describe)
            started = self._rest(sender, started)
        lost = 0 if notes is None else notes.lost
        sender.dropped += self.overflowed + lost - self._lost
        self.overflowed, self._lost = 0, lost
        self.encoding = False

    def _add(self, sender: Sender, entry: Item | Later, describe: Callable[[], None]) -> None:
        encoded: list[bytes] = []
        try:
            items = entry() if callable(entry) else (entry,)
            encoded += map(encode_item, items)
        except Exception:  # noqa: BLE001 - an odd value costs its own record
            self._fail("an item could not be encoded")
        describe()
        fitting = [item for item in encoded if len(item) <= MAX_ITEM_BYTES]
        sender.dropped += len(encoded) - len(fitting)
        sender.add(fitting)

    def _rest(self, sender: Sender, started: float) -> float:
        """Let the engine have the interpreter if it is time to; when this slice has begun."""
        behind = len(self.queue)
        # Behind a thread that never rests each rest costs it 5 ms: a backlog takes longer slices.
        if time.perf_counter() - started <= SLICE * (1 + behind // BACKLOG):
            return started
        # On a machine that has no core to spare a rest lasts as long as others like.
        rest = FOLDING_REST if sender.folding else REST
        time.sleep(rest if behind < URGENT else 0)
        return time.perf_counter()
