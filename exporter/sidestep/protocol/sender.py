"""The sending end: a bounded ring, a window, and retransmission after a reconnect."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from enum import Enum
from random import Random

import msgspec

from sidestep.errors import WireError
from sidestep.protocol.folding import Folded, Folder
from sidestep.protocol.limits import MAX_BATCH_ITEMS, VERSION
from sidestep.protocol.messages import (
    Ack,
    Aggregate,
    Batch,
    Bye,
    EngineInfo,
    Heartbeat,
    Hello,
    Nack,
    Settings,
    decode_from_exporter,
    encode,
)
from sidestep.protocol.ring import Chunk, Ring

RING_BYTES = 8 << 20
BATCH_BYTES = 64 << 10
ACK_TIMEOUT = 3.0
HEARTBEAT = 1.0
HELLO_BACKOFF = (0.2, 5.0)


class State(Enum):
    """Where a sender stands with the exporter."""

    GREETING = "greeting"
    """The Hello is not sent, or not answered yet."""
    STREAMING = "streaming"
    STOPPED = "stopped"
    """Another process took this stream's name; nothing is sent any more."""


NIL = msgspec.Raw(b"\xc0")
"""An item that is none: takes the seq of one that cannot be read."""


class Sender:
    """One stream's sending end. The caller owns socket and clock.

    Call ``add`` with encoded items, then ``next_frame`` and, once the socket took
    the frame, ``sent``, until there is none; give what comes in to ``receive``.
    When ``reopen`` is set, open a new socket and call ``reopened``.

    Args:
        folder: Takes the items that find the ring full.

    Attributes:
        dropped: Items given up: they could not be counted, or the exporter refused them.
        folded: Items that were folded.
        seals: Times that what was folded was made ready to be sent.
        errors: Records that could not be made into items; the caller counts them here.
        boot: The exporter process that answered last.
        complaint: Why the exporter refuses us, for one log line; empty once it does not.
        kv_sample_rate: Share of KV blocks to follow, as the exporter said last; ``None``
            while none has said anything, or if this one's release knows no such thing.
    """

    def __init__(
        self,
        stream: str,
        incarnation: int,
        engines: Sequence[EngineInfo],
        random: Random,
        folder: Folder,
        *,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        self.stream = stream
        self.incarnation = incarnation
        self.engines = list(engines)
        self.state = State.GREETING
        self.reopen = False
        self.dropped = self.errors = self.folded = self.seals = 0
        self.complaint = ""
        self.kv_sample_rate: float | None = None
        self._random = random
        self._folder = folder
        self._ring_bytes = ring_bytes
        self._pending: deque[bytes | Folded] = deque()
        self._pending_bytes = 0
        self._ring = Ring()
        self._seq = self._applied = 0
        self.boot: int | None = None
        self._unreadable = False
        self._nonce = 1
        self._greeted = False
        self._greet_at = self._beat_at = 0.0
        self._deadline = math.inf
        """When the exporter must have answered."""
        self._backoff = HELLO_BACKOFF[0]
        self._reported = 0

    @property
    def held_bytes(self) -> int:
        """Bytes in the ring and before it."""
        return self._ring.used + self._pending_bytes

    @property
    def drained(self) -> bool:
        """Whether all there is has arrived, and outlives the exporter where it can."""
        return not self._pending and not self._ring and not self._folder.count

    @property
    def folding(self) -> bool:
        """Whether items that are added now are folded."""
        return self._folder.count > 0

    def idle(self, now: float) -> bool:
        """Whether there is nothing to send, to wait for, or to say before ``now``."""
        return (
            self.state is State.STREAMING
            and not self.reopen
            and self.drained
            and now < self._beat_at
            and self._reported == self.dropped + self.errors
        )

    def add(self, items: Sequence[bytes]) -> None:
        """Queue encoded items; where there is no room they are folded, all until it is back."""
        if self.state is State.STOPPED:
            self.dropped += len(items)
            return
        for item in items:
            if self._folder.count or self.held_bytes + len(item) > self._ring_bytes:
                self.folded += 1
                self.dropped += not self._folder.fold(item, self.engines)
            else:
                self._pending.append(item)
                self._pending_bytes += len(item)

    def describe(self, engines: Sequence[EngineInfo]) -> None:
        """Say from now on that the stream feeds ``engines``; indices of known ones stay."""
        self.engines = list(engines)
        # A Hello that is on its way told of the engines as they were: its answer is not taken.
        if self.state is State.STREAMING or (self.state is State.GREETING and self._greeted):
            self._greet()

    def next_frame(self, now: float) -> bytes | None:
        """What to send now, if anything; the same until ``sent`` or a change of state."""
        if now >= self._deadline:
            self.reopen = True
            if self.state is State.GREETING:
                self._backoff = min(2 * self._backoff, HELLO_BACKOFF[1])
        if self.state is State.STOPPED or self.reopen:
            return None
        if self.state is State.GREETING:
            return None if self._greeted or now < self._greet_at else encode(self._hello())
        if self._ring.next is None:
            self._cut()
        if self._ring.next is not None:
            return self._ring.next.frame
        if now >= self._beat_at or self._reported != self.dropped + self.errors:
            return encode(self._heartbeat())
        return None

    def sent(self, now: float) -> None:
        """The socket took what ``next_frame`` gave."""
        if self.state is State.GREETING:
            self._greeted = True
            self._deadline = now + self._backoff * self._random.uniform(0.75, 1.25)
        elif self._ring.next is not None:
            self._ring.sent()
            self._deadline = min(self._deadline, now + ACK_TIMEOUT)
        else:
            self._beat_at = now + HEARTBEAT
            self._reported = self.dropped + self.errors

    def receive(self, frame: bytes, now: float) -> None:
        """Take in what the exporter said; what is not for this process is ignored."""
        try:
            message = decode_from_exporter(frame)
        except WireError:
            return
        if self.state is State.STOPPED or message.incarnation not in (self.incarnation, 0):
            return
        match message:
            case Ack() if self.state is State.GREETING:
                if self._greeted and message.nonce == self._nonce:
                    self._stream(message, now)
            case Ack() if message.boot != self.boot:
                self.reopen = True
            case Ack():
                self._acknowledge(message, now)
            case Nack():
                self._refused(message, now)

    def reopened(self) -> None:
        """The caller has a new socket; greet on it."""
        self.reopen = False
        if self.state is not State.STOPPED:
            self._greet()

    def bye(self, reason: str) -> bytes:
        """The frame that ends the stream."""
        return encode(Bye(self.incarnation, self._seq, reason))

    def _greet(self) -> None:
        self.state = State.GREETING
        self._nonce += 1
        self._greeted = False
        self._deadline = math.inf

    def _hello(self) -> Hello:
        first = self._seq + 1 if self._ring.first is None else self._ring.first
        return Hello(VERSION, self.stream, self.incarnation, self._nonce, first, self.engines)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            self.incarnation,
            self._seq,
            self.held_bytes,
            dropped=self.dropped,
            errors=self.errors,
            folded=self.folded,
        )

    def _stream(self, ack: Ack, now: float) -> None:
        """The handshake is complete: go on behind what this exporter has applied."""
        self.state = State.STREAMING
        self.reopen = False  # late is soon enough
        self.complaint = ""
        self.boot = ack.boot
        # Even if it says nothing: an older exporter would refuse what the last one asked for.
        self.kv_sample_rate = ack.kv_sample_rate
        self._folder.settings = ack.settings or Settings()
        self._backoff = HELLO_BACKOFF[0]
        self._beat_at = now
        self._ring.resume(ack.applied)
        # Not the larger of the two: a restarted exporter may know less than the last one.
        self._applied = ack.applied
        if self._unreadable:
            self._unreadable = False
            self._blank()
        self._acknowledge(ack, now)

    def _acknowledge(self, ack: Ack, now: float) -> None:
        self._applied = max(self._applied, ack.applied)
        if ack.kv_sample_rate is not None:
            self.kv_sample_rate = ack.kv_sample_rate
            self._folder.kv_sample_rate = ack.kv_sample_rate
        self._ring.land(self._applied)
        self._ring.free(ack.durable)
        self._deadline = now + ACK_TIMEOUT if self._ring.in_flight else math.inf

    def _refused(self, nack: Nack, now: float) -> None:
        if nack.code != "need_hello":
            self.complaint = f"{nack.code} {nack.detail}".strip()
        if nack.code == "id_conflict":
            self.state = State.STOPPED
            waiting = sum(p.items if isinstance(p, Folded) else 1 for p in self._pending)
            self.dropped += waiting + self._folder.seal().items + self._seq - self._applied
            self._pending.clear()
            self._ring.clear()
            self._pending_bytes = 0
            return
        if nack.code == "bad_schema" and self.state is State.STREAMING:
            # Which frame it was shows when the exporter says what it has applied.
            self._unreadable = True
        elif nack.code != "need_hello":
            self._greet_at = now + HELLO_BACKOFF[1]
        self.reopen = True

    def _blank(self) -> None:
        """Replace the chunk that cannot be read by as many empty items.

        Its seqs stay taken: a gap would make the receiver ask for it for ever.
        """
        self.dropped += self._ring.replace(self._applied, self._empty)

    def _empty(self, first: int, last: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for start in range(first, last + 1, MAX_BATCH_ITEMS):
            end = min(start + MAX_BATCH_ITEMS - 1, last)
            nothing = Batch(self.incarnation, start, [NIL] * (end - start + 1))
            chunks.append(Chunk(start, end, encode(nothing)))
        return chunks

    def _cut(self) -> None:
        """Move pending items into the ring as one frame, if the window has room."""
        if self._folder.count and self.held_bytes <= self._ring_bytes // 2:
            self._seal()
        if not self._pending or self._ring.in_flight >= self._ring_bytes // 2:
            return
        head = self._pending[0]
        if isinstance(head, Folded):
            self._pending.popleft()
            self._pending_bytes -= head.size
            self._cut_folded(head)
            return
        items: list[msgspec.Raw] = []
        size = 0
        while self._pending and len(items) < MAX_BATCH_ITEMS:
            item = self._pending[0]
            if isinstance(item, Folded) or (items and size + len(item) > BATCH_BYTES):
                break
            self._pending.popleft()
            size += len(item)
            items.append(msgspec.Raw(item))
        self._pending_bytes -= size
        first = self._seq + 1
        self._append(first + len(items) - 1, Batch(self.incarnation, first, items))

    def _seal(self) -> None:
        """There is room again: what was folded gets its place behind what waits already."""
        folded = self._folder.seal()
        self.seals += 1
        self._pending.append(folded)
        self._pending_bytes += folded.size

    def _cut_folded(self, folded: Folded) -> None:
        """One frame or several, which share the seqs of what was folded: one each, the last the rest."""
        end = self._seq + folded.items
        for left, records in zip(range(len(folded.frames) - 1, -1, -1), folded.frames, strict=True):
            first = self._seq + 1
            last = first if left else end
            raws = [msgspec.Raw(record) for record in records]
            self._append(last, Aggregate(self.incarnation, first, last, raws))

    def _append(self, last: int, message: Batch | Aggregate) -> None:
        self._ring.append(message.first, last, encode(message))
        self._seq = last
