"""The receiver of the delivery protocol: which items of which stream are applied, once and in order.

Rules R1 to R8 are those of docs/protocol.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import msgspec

from sidestep.errors import WireError
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import (
    Ack,
    Aggregate,
    Batch,
    Bye,
    EngineInfo,
    FromExporter,
    FromSender,
    Heartbeat,
    Hello,
    Nack,
    Settings,
)
from sidestep.protocol.records import TOTAL_LIMIT

ACK_INTERVAL = 0.25
"""Least seconds between two acknowledgements; a stream that pauses for as long gets one."""
LATEST_ACK = 1.0
"""Most seconds until a stream that keeps sending gets one; senders wait for 3 s."""
ACK_BYTES = 32 << 10
"""Bytes after which a stream gets one without a pause: a sender has at most 4 MiB in flight."""
MAX_STREAMS = 256
REMOVABLE = 300.0
"""Seconds of silence after which a stream may be removed in favor of a new one."""
MAX_RETIRED = 16
"""Retired incarnations that are remembered for each stream."""


@dataclasses.dataclass(slots=True)
class Stream:
    """State of one sending process.

    Attributes:
        peer: Connection of its last Hello; empty before the first one.
        engines: Engines by the index that items use.
        seq: Highest seq applied.
        durable: Highest seq that outlives this process.
        seen_at: Monotonic time of its last message.
        silent: Whether it has been silent for so long that it counts as gone.
        beat: Its last Heartbeat.
        open: Whether it may send: not before a Hello, nor after a Bye.
        dropped: Items that all its incarnations reported as dropped.
        errors: Records that they could not translate or encode.
        folded: Items that they folded.
        acked: Applied, durable and sample rate of its last acknowledgement.
        acked_at: Monotonic time of that.
        received: Bytes received since then.
        retired: Earlier incarnations.
        local: Whether a source in this process feeds it, which needs no acknowledgements.
        mark: State from which that source resumes, beside ``seq``.
    """

    id: str
    incarnation: int
    peer: bytes
    engines: list[EngineInfo]
    seq: int
    durable: int = 0
    seen_at: float = 0.0
    silent: bool = False
    beat: Heartbeat | None = None
    open: bool = True
    dropped: int = 0
    errors: int = 0
    folded: int = 0
    acked: tuple[int, int, float | None] | None = None
    acked_at: float = 0.0
    received: int = 0
    retired: list[int] = dataclasses.field(default_factory=list)
    local: bool = False
    mark: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Received:
    """Result of one message: what to apply, and what to send.

    Attributes:
        stream: The sender's stream, if it is known.
        items: Items to apply now, in order; their seqs are consumed even if that fails (R1).
        records: Records of folded items, to be applied likewise.
        replies: Messages to send, each with its connection.
        opened: Whether a Hello opened the stream or changed its engines.
        retired: The incarnation that a new process of the stream replaced.
        duplicates: Number of items that were applied before.
        lost: Number of items that the sender no longer has.
    """

    stream: Stream | None = None
    items: Sequence[msgspec.Raw] = ()
    records: Sequence[msgspec.Raw] = ()
    replies: list[tuple[bytes, FromExporter]] = dataclasses.field(default_factory=list)
    opened: bool = False
    retired: int | None = None
    duplicates: int = 0
    lost: int = 0


class Receiver:
    """All streams of one exporter process.

    Attributes:
        boot: Random number of this process.
        streams: The newest incarnation of each stream, by stream id.
        durable: Whether ``mark_durable`` reports what outlives this process; if not, durable
            equals applied (R4).
        changes: Version of everything that a snapshot of the streams holds.
        settings: Settings by which senders fold, part of the answer to a Hello; None: none are sent.
        kv_sample_rate: Share of KV blocks that senders sample. May be set at any time: open
            streams get it with the next acknowledgement.
    """

    def __init__(self, boot: int, settings: Settings | None = None) -> None:
        self.boot = boot
        self.settings = settings
        self.streams: dict[str, Stream] = {}
        self.kv_sample_rate: float | None = None
        self.durable = False
        self.changes = 0
        self._by_incarnation: dict[int, Stream] = {}

    def receive(  # noqa: PLR0911
        self, peer: bytes, message: FromSender, now: float, size: int = 0
    ) -> Received:
        """Apply the state table of docs/protocol.md to ``message``, of ``size`` bytes from ``peer``."""
        if isinstance(message, Hello):
            return self._hello(peer, message, now)
        stream = self._by_incarnation.get(message.incarnation)
        if stream is None or stream.peer != peer:
            return self._refuse(peer, message.incarnation, "need_hello")
        if self.streams.get(stream.id) is not stream:
            return self._refuse(peer, message.incarnation, "id_conflict", _CONFLICT)
        if not stream.open:
            # After a Bye its engines may belong to other streams.
            return self._refuse(peer, message.incarnation, "need_hello")
        stream.seen_at = now
        stream.received += size
        match message:
            case Batch():
                last = message.first + len(message.items) - 1
                return self._items(stream, message.first, last, Received(stream, message.items))
            case Aggregate():
                received = Received(stream, records=message.records)
                return self._items(stream, message.first, message.last, received)
            case Heartbeat():
                return self._heartbeat(stream, message)
            case Bye():
                stream.open = False
                self.changes += 1
                lost = max(message.last - stream.seq, 0)
                return Received(stream, replies=[self._ack(stream, now)], lost=lost)

    def acks(self, now: float) -> list[tuple[bytes, FromExporter]]:
        """Return the acknowledgements that are due, each with its connection."""
        return [
            self._ack(stream, now)
            for stream in self.streams.values()
            if stream.open and not stream.local and self._is_ack_due(stream, now)
        ]

    def cursors(self) -> list[tuple[Stream, int]]:
        """Return the applied seq of each stream now, for ``mark_durable`` once a snapshot has it."""
        return [(stream, stream.seq) for stream in self.streams.values()]

    def mark_durable(self, cursors: Iterable[tuple[Stream, int]]) -> None:
        """Record that a snapshot with these ``cursors`` is on disk (R4)."""
        for stream, seq in cursors:
            stream.durable = max(stream.durable, seq)

    def restore(self, stream: Stream) -> None:
        """Restore a stream from a snapshot; it continues from its seq after its next Hello."""
        stream.durable = stream.seq
        self._adopt(stream)

    def attach(self, name: str, incarnation: int) -> Stream:
        """Return the stream of a source in this process, restored from a snapshot or new."""
        stream = self.streams.get(name)
        if stream is None or stream.incarnation != incarnation:
            stream = self._adopt(Stream(name, incarnation, b"", [], 0))
            stream.silent = True
        stream.local = stream.open = True
        return stream

    def refuse_frame(self, peer: bytes, error: WireError) -> list[tuple[bytes, FromExporter]]:
        """Return the answer to a frame that could not be decoded."""
        code = error.reason if error.reason in _CODES else "bad_schema"
        return self._refuse(peer, 0, code, str(error)).replies

    def refuse_hello(self, peer: bytes, hello: Hello, error: WireError) -> Received:
        """Return the answer to a Hello whose engines are refused; nothing changes."""
        code = "unauthorised" if error.reason == "unauthorised" else "over_limit"
        return self._refuse(peer, hello.incarnation, code, str(error))

    def _hello(self, peer: bytes, hello: Hello, now: float) -> Received:
        stream = self.streams.get(hello.stream)
        if stream is not None and (stream.local or hello.incarnation in stream.retired):
            return self._refuse(peer, hello.incarnation, "id_conflict", _CONFLICT)
        owner = self._by_incarnation.get(hello.incarnation)
        if owner is not None and owner.id != hello.stream:
            return self._refuse(peer, hello.incarnation, "id_conflict", "incarnation is taken")
        received = Received(opened=True)
        self.changes += 1
        before = max(hello.first - 1, 0)
        if stream is None:
            if len(self.streams) >= MAX_STREAMS and not self._remove_one(now):
                return self._refuse(peer, hello.incarnation, "over_limit", "too many streams")
            stream = self._adopt(Stream(hello.stream, hello.incarnation, peer, [], before))
        elif stream.incarnation != hello.incarnation:
            received.retired = stream.incarnation
            retired = [*stream.retired, stream.incarnation][-MAX_RETIRED:]
            if stream.open:
                reply = Nack(self.boot, stream.incarnation, "id_conflict", _CONFLICT)
                received.replies.append((stream.peer, reply))
            new = Stream(hello.stream, hello.incarnation, peer, [], before)
            new.retired = retired
            new.dropped, new.errors = stream.dropped, stream.errors
            new.folded = stream.folded
            # Only its number is remembered: its engines would be held 16 times over.
            stream.engines = []
            for old in set(stream.retired) - set(retired):
                self._by_incarnation.pop(old, None)
            stream = self._adopt(new)
        elif before > stream.seq:
            received.lost = before - stream.seq
            stream.seq = before
        stream.peer, stream.engines, stream.open = peer, hello.engines, True
        stream.seen_at = now
        received.stream = stream
        received.replies.append(self._ack(stream, now, hello.nonce))
        return received

    def _adopt(self, stream: Stream) -> Stream:
        self.streams[stream.id] = stream
        self._by_incarnation[stream.incarnation] = stream
        return stream

    def _remove_one(self, now: float) -> bool:
        """Remove a closed stream, or else the one silent for longest; return whether one was."""
        gone = [
            s
            for s in self.streams.values()
            if not s.local and (not s.open or now - s.seen_at >= REMOVABLE)
        ]
        if not gone:
            return False
        stream = min(gone, key=lambda stream: (stream.open, stream.seen_at))
        del self.streams[stream.id]
        for known in (stream.incarnation, *stream.retired):
            self._by_incarnation.pop(known, None)
        return True

    def _items(self, stream: Stream, first: int, last: int, received: Received) -> Received:
        """Accept the seqs ``first`` to ``last`` if they are next, else report what is wrong."""
        if first == stream.seq + 1 and last >= stream.seq:
            stream.seq = last
            self.changes += 1
            return received
        if last <= stream.seq:
            # The acknowledgement was lost or is on its way: send it again.
            stream.acked = None
            return Received(stream, duplicates=max(last - first + 1, 0))
        return self._refuse(stream.peer, stream.incarnation, "need_hello")

    def _heartbeat(self, stream: Stream, beat: Heartbeat) -> Received:
        before = stream.beat or Heartbeat(beat.incarnation, 0, 0)
        stream.beat = beat
        stream.dropped = _grown(stream.dropped, beat.dropped - before.dropped)
        stream.errors = _grown(stream.errors, beat.errors - before.errors)
        stream.folded = _grown(stream.folded, beat.folded - before.folded)
        received = Received(stream)
        if beat.head > stream.seq:
            received.replies = self._refuse(stream.peer, stream.incarnation, "need_hello").replies
        return received

    def _state(self, stream: Stream) -> tuple[int, int, float | None]:
        durable = stream.durable if self.durable else stream.seq
        return stream.seq, durable, self.kv_sample_rate

    def _is_ack_due(self, stream: Stream, now: float) -> bool:
        state = self._state(stream)
        if stream.acked is not None and stream.acked[2] != state[2]:
            return True
        if stream.acked == state or now < stream.acked_at + ACK_INTERVAL:
            return False
        # Most streams send a little all the time: four a second would be most of their cost.
        return (
            stream.acked is None
            or stream.received >= ACK_BYTES
            or now >= min(stream.seen_at + ACK_INTERVAL, stream.acked_at + LATEST_ACK)
        )

    def _ack(
        self, stream: Stream, now: float, nonce: int | None = None
    ) -> tuple[bytes, FromExporter]:
        stream.acked = self._state(stream)
        stream.acked_at, stream.received = now, 0
        settings = None if nonce is None else self.settings
        reply = Ack(VERSION, self.boot, stream.incarnation, nonce, *stream.acked, settings)
        return stream.peer, reply

    def _refuse(self, peer: bytes, incarnation: int, code: str, detail: str = "") -> Received:
        return Received(replies=[(peer, Nack(self.boot, incarnation, code, detail[:256]))])


def _grown(total: int, more: int) -> int:
    """Return the sum, up to what a snapshot holds: a peer may send any number any number of times."""
    return min(total + max(more, 0), TOTAL_LIMIT)


_CODES = ("version", "unauthorised", "over_limit", "ended_epoch")
"""Reasons that have a code of their own in a Nack."""
_CONFLICT = (
    "another process, or a second instance of the plugin, has this stream id;"
    " set SIDESTEP_NAMESPACE to tell deployments apart"
)
