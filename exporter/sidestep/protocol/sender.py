"""The sender of the delivery protocol: a bounded ring, a window, and retransmission.

Rules S1 to S8 are those of docs/protocol.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from enum import Enum
from random import Random
from typing import NamedTuple, Protocol

import msgspec

from sidestep.errors import WireError
from sidestep.protocol.limits import MAX_BATCH_ITEMS, VERSION, escape
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
from sidestep.protocol.progress import Progress, is_overdue
from sidestep.protocol.ring import Chunk, Ring

RING_BYTES = 8 << 20
BATCH_BYTES = 64 << 10
ACK_TIMEOUT = 3.0
HEARTBEAT = 1.0
OVERDUE_HEARTBEAT = 0.25
"""Seconds between heartbeats while an engine's progress is overdue."""
HELLO_BACKOFF = (0.2, 5.0)


class State(Enum):
    """State of a sender; docs/protocol.md has the transitions."""

    HANDSHAKE = "handshake"
    """The Hello is not sent, or not answered yet."""
    STREAMING = "streaming"
    """The exporter answered the Hello: items are sent."""
    STOPPED = "stopped"
    """Another process has this stream's id: nothing is sent any more."""


NIL = msgspec.Raw(b"\xc0")
"""An empty item, which takes the seq of one that the exporter cannot read (S7)."""


class Folded(NamedTuple):
    """Merged items, as the encoded totals in each frame to send."""

    items: int
    frames: list[list[bytes]]

    @property
    def size(self) -> int:
        """Bytes of the totals."""
        return sum(len(totals) for frame in self.frames for totals in frame)


class Folder(Protocol):
    """Merges the items of one stream, from one ``seal`` to the next.

    Attributes:
        settings: Settings of the exporter that answered last: items are merged by its rules.
        kv_sample_rate: Share of KV blocks that it asked to be sampled.
    """

    settings: Settings
    kv_sample_rate: float | None

    @property
    def count(self) -> int:
        """Items merged since the last seal."""

    def fold(self, data: bytes, engines: Sequence[EngineInfo]) -> bool:
        """Add an encoded item; return whether it could be counted."""

    def seal(self) -> Folded:
        """Return the merged items, and start again with the next item."""


class Sender:
    """Sends one stream. The caller owns the connection and the clock.

    Call ``add`` with encoded items, then ``next_frame`` and, once the socket took
    the frame, ``sent``, until there is none; pass what arrives to ``receive``.
    When ``reopen`` is set, open a new connection and call ``reopened``.

    Attributes:
        reopen: True if the caller is to open a new connection.
        dropped: Items that could not be folded, or that the exporter refused.
        seals: Number of times that folded items were queued to be sent.
        errors: Steps that could not be made into items; the caller counts them here.
        boot: Number of the exporter process that answered last.
        complaint: Reason for which the exporter refuses the stream; empty while it does not.
        lookup_key: See ``messages.Settings``, of the exporter that answered last.
        kv_sample_rate: Share of KV blocks to sample, as the exporter that answered last sent
            it; ``None`` if it sent none.
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
        server: str = "",
        process: str = "",
    ) -> None:
        self.stream = stream
        self._server, self._process = server, process
        self.incarnation = incarnation
        self.engines = list(engines)
        self.state = State.HANDSHAKE
        self.reopen = False
        self.dropped = self.errors = self.folded = self.seals = 0
        self.complaint = ""
        self.kv_sample_rate: float | None = None
        self.lookup_key = b""
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
        self._hello_sent = False
        self._hello_at = self._beat_at = self._beat_sent_at = 0.0
        self._progress: Sequence[Progress] = ()
        self._deadline = math.inf
        """Monotonic time by which the exporter must answer."""
        self._backoff = HELLO_BACKOFF[0]
        self._reported = 0

    @property
    def held_bytes(self) -> int:
        """Bytes in the ring and queued before it."""
        return self._ring.used + self._pending_bytes

    @property
    def drained(self) -> bool:
        """True if every item is durable at the exporter."""
        return not self._pending and not self._ring and not self._folder.count

    @property
    def folding(self) -> bool:
        """True if items that are added now are folded (S4)."""
        return self._folder.count > 0

    def idle(self, now: float) -> bool:
        """Return whether nothing is to be sent or awaited at ``now``."""
        return (
            self.state is State.STREAMING
            and not self.reopen
            and self.drained
            and now < self._beat_at
            and self._reported == self.dropped + self.errors
        )

    def add(self, items: Sequence[bytes]) -> None:
        """Queue encoded items; fold them while the ring is full (S4)."""
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
        """Replace the engines of the stream; known ones keep their index."""
        self.engines = list(engines)
        # A Hello that is on its way has the engines as they were: its answer no longer counts (S5).
        if self.state is State.STREAMING or (self.state is State.HANDSHAKE and self._hello_sent):
            self._start_handshake()

    def report(self, progress: Sequence[Progress]) -> None:
        """Put ``progress`` into the next heartbeat, which is due earlier while it is overdue.

        Its longest step is of the time since the last report; that of reports that no heartbeat
        has carried is kept. One with tokens goes before a front end's without.
        """
        unsent = {each.engine: each for each in self._progress}
        for each in progress:
            before = unsent.get(each.engine)
            if before is not None and _length(before) > _length(each):
                each.longest, each.longest_tokens = before.longest, before.longest_tokens
        self._progress = progress
        if any(map(is_overdue, progress)):
            self._beat_at = min(self._beat_at, self._beat_sent_at + OVERDUE_HEARTBEAT)

    def next_frame(self, now: float) -> bytes | None:
        """Return the frame to send now, if any: the same one until ``sent`` or a change of state."""
        if now >= self._deadline:
            self.reopen = True
            if self.state is State.HANDSHAKE:
                self._backoff = min(2 * self._backoff, HELLO_BACKOFF[1])
        if self.state is State.STOPPED or self.reopen:
            return None
        if self.state is State.HANDSHAKE:
            return None if self._hello_sent or now < self._hello_at else encode(self._hello())
        if self._ring.next is None:
            self._fill_ring()
        if self._ring.next is not None:
            # Before it is sent, too: a connection that takes nothing is as silent as one without answers.
            self._deadline = min(self._deadline, now + ACK_TIMEOUT)
            return self._ring.next.frame
        if now >= self._beat_at or self._reported != self.dropped + self.errors:
            return encode(self._heartbeat())
        return None

    def sent(self, now: float) -> None:
        """Record that the connection took the frame of ``next_frame``."""
        if self.state is State.HANDSHAKE:
            self._hello_sent = True
            self._deadline = now + self._backoff * self._random.uniform(0.75, 1.25)
        elif self._ring.next is not None:
            self._ring.mark_sent()
        else:
            self._beat_sent_at = now
            self._beat_at = now + HEARTBEAT
            for each in self._progress:
                each.longest, each.longest_tokens = 0.0, 0
            self._reported = self.dropped + self.errors

    def receive(self, frame: bytes, now: float) -> None:
        """Process a message of the exporter; one for another incarnation is ignored."""
        try:
            message = decode_from_exporter(frame)
        except WireError:
            return
        if self.state is State.STOPPED or message.incarnation not in (self.incarnation, 0):
            return
        match message:
            case Ack() if self.state is State.HANDSHAKE:
                if self._hello_sent and message.nonce == self._nonce:
                    self._start_streaming(message, now)
            case Ack() if message.boot != self.boot:
                self.reopen = True
            case Ack():
                self._acknowledge(message, now)
            case Nack():
                self._refused(message, now)

    def reopened(self) -> None:
        """Start a handshake on the caller's new connection."""
        self.reopen = False
        if self.state is not State.STOPPED:
            self._start_handshake()

    def bye(self, reason: str) -> bytes:
        """Return the frame that closes the stream."""
        return encode(Bye(self.incarnation, self._seq, reason))

    def _start_handshake(self) -> None:
        self.state = State.HANDSHAKE
        self._nonce += 1
        self._hello_sent = False
        self._deadline = math.inf

    def _hello(self) -> Hello:
        first = self._seq + 1 if self._ring.first is None else self._ring.first
        return Hello(
            VERSION,
            self.stream,
            self.incarnation,
            self._nonce,
            first,
            self.engines,
            self._server,
            self._process,
        )

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            self.incarnation,
            self._seq,
            self.held_bytes,
            dropped=self.dropped,
            errors=self.errors,
            folded=self.folded,
            progress=list(self._progress),
        )

    def _start_streaming(self, ack: Ack, now: float) -> None:
        """Complete the handshake and resume behind what this exporter has applied (S5)."""
        self.state = State.STREAMING
        # A late answer completes the handshake all the same.
        self.reopen = False
        self.complaint = ""
        self.boot = ack.boot
        # None ends what the exporter before this one asked for.
        self.kv_sample_rate = ack.kv_sample_rate
        self._folder.settings = ack.settings or Settings()
        self.lookup_key = self._folder.settings.lookup_key
        self._backoff = HELLO_BACKOFF[0]
        self._beat_at = now
        self._ring.resume(ack.applied)
        # Not the larger of the two: a restarted exporter may have applied less than the one before.
        self._applied = ack.applied
        if self._unreadable:
            self._unreadable = False
            # By as many empty items: a gap in the seqs would make the receiver ask for them forever (S7).
            self.dropped += self._ring.replace(self._applied, self._empty)
        self._acknowledge(ack, now)

    def _acknowledge(self, ack: Ack, now: float) -> None:
        self._applied = max(self._applied, ack.applied)
        if ack.kv_sample_rate is not None:
            self.kv_sample_rate = ack.kv_sample_rate
            self._folder.kv_sample_rate = ack.kv_sample_rate
        self._ring.mark_applied(self._applied)
        self._ring.free(ack.durable)
        self._deadline = now + ACK_TIMEOUT if self._ring.in_flight else math.inf

    def _refused(self, nack: Nack, now: float) -> None:
        if nack.code != "need_hello":
            self.complaint = escape(f"{nack.code} {nack.detail}".strip())
        if nack.code == "id_conflict":
            self.state = State.STOPPED
            waiting = sum(p.items if isinstance(p, Folded) else 1 for p in self._pending)
            self.dropped += waiting + self._folder.seal().items + self._seq - self._applied
            self._pending.clear()
            self._ring.clear()
            self._pending_bytes = 0
            return
        if nack.code == "bad_schema" and self.state is State.STREAMING:
            # The next Ack's applied seq shows which frame it was (S7).
            self._unreadable = True
        elif nack.code != "need_hello":
            self._hello_at = now + HELLO_BACKOFF[1]
        self.reopen = True

    def _empty(self, first: int, last: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for start in range(first, last + 1, MAX_BATCH_ITEMS):
            end = min(start + MAX_BATCH_ITEMS - 1, last)
            nothing = Batch(self.incarnation, start, [NIL] * (end - start + 1))
            chunks.append(Chunk(start, end, encode(nothing)))
        return chunks

    def _fill_ring(self) -> None:
        """Move pending items into the ring as one frame, if they fit into the window."""
        if self._folder.count and self.held_bytes <= self._ring_bytes // 2:
            self._seal()
        if not self._pending or self._ring.in_flight >= self._ring_bytes // 2:
            return
        head = self._pending[0]
        if isinstance(head, Folded):
            self._pending.popleft()
            self._pending_bytes -= head.size
            self._append_folded(head)
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
        folded = self._folder.seal()
        self.seals += 1
        self._pending.append(folded)
        self._pending_bytes += folded.size

    def _append_folded(self, folded: Folded) -> None:
        """Append the frames of folded items: one seq each, the last frame has all remaining ones."""
        end = self._seq + folded.items
        for left, totals in zip(range(len(folded.frames) - 1, -1, -1), folded.frames, strict=True):
            first = self._seq + 1
            last = first if left else end
            raws = [msgspec.Raw(one) for one in totals]
            self._append(last, Aggregate(self.incarnation, first, last, raws))

    def _append(self, last: int, message: Batch | Aggregate) -> None:
        self._ring.append(message.first, last, encode(message))
        self._seq = last


def _length(progress: Progress) -> tuple[bool, float]:
    return progress.longest_tokens > 0, progress.longest
