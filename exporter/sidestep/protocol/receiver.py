"""The receiving end: which items of which stream are applied, once and in order."""

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
"""Seconds between two acknowledgements at least; also after which a stream that is quiet gets one."""
LATEST_ACK = 1.0
"""Seconds after which one that goes on sending gets it, well within the time that senders wait."""
ACK_BYTES = 32 << 10
"""Bytes taken after which it need not be quiet: senders keep 8 MiB, and send half of it ahead."""
MAX_STREAMS = 256
FORGOTTEN = 300.0
"""Seconds of silence after which a stream makes room for another, where there is no room."""
MAX_RETIRED = 16
"""Incarnations of one stream that are remembered as superseded."""


@dataclasses.dataclass(slots=True)
class Stream:
    """One sending process, as the exporter knows it.

    Attributes:
        peer: The connection of its last Hello; empty while this process has heard none.
        engines: What its items' engine indices mean.
        seq: Highest seq applied.
        durable: Highest seq that outlives this process.
        heard: When its last message came.
        silent: Nothing came for so long that it is taken for gone.
        beat: Its last Heartbeat.
        open: False after its Bye.
        dropped: Items that it, over all its incarnations, reported dropped.
        errors: Likewise, records that it could not translate or encode.
        folded: Likewise, items that it folded.
        acked: What its last acknowledgement said: applied, durable, and the sample rate.
        acked_at: When that was.
        taken: Bytes of the messages that came since.
        local: Fed by a source in this process, which needs no word from here.
        mark: What that source goes on with, beside ``seq``.
    """

    id: str
    incarnation: int
    peer: bytes
    engines: list[EngineInfo]
    seq: int
    durable: int = 0
    heard: float = 0.0
    silent: bool = False
    beat: Heartbeat | None = None
    open: bool = True
    dropped: int = 0
    errors: int = 0
    folded: int = 0
    acked: tuple[int, int, float | None] | None = None
    acked_at: float = 0.0
    taken: int = 0
    retired: list[int] = dataclasses.field(default_factory=list)
    local: bool = False
    mark: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Received:
    """What to do about a message.

    Attributes:
        stream: Whose it is, where that is known.
        items: To be applied now, in order; their seqs are consumed whatever comes of it.
        records: Likewise, of items that were folded.
        replies: To be sent to connections.
        greeted: The Hello opened the stream or changed what it feeds.
        retired: The incarnation that the stream's new process has replaced.
        duplicates: Items that had been applied before.
        lost: Items that nobody holds any more.
    """

    stream: Stream | None = None
    items: Sequence[msgspec.Raw] = ()
    records: Sequence[msgspec.Raw] = ()
    replies: list[tuple[bytes, FromExporter]] = dataclasses.field(default_factory=list)
    greeted: bool = False
    retired: int | None = None
    duplicates: int = 0
    lost: int = 0


class Receiver:
    """All streams of one exporter process.

    Attributes:
        boot: Tells this process from the one before it.
        streams: By stream id; the newest incarnation of each.
        durable: Whether ``saved`` says what outlives this process; else nothing does, and what
            is applied is as durable as it gets.
        changes: Grows with all that a snapshot of the streams would hold.
        settings: What senders fold by; said with the answer to a Hello.
        kv_sample_rate: Share of KV blocks that senders are to follow. May be set at any
            time: open streams hear of it with the next ``acks``.
    """

    def __init__(self, boot: int) -> None:
        self.boot = boot
        self.streams: dict[str, Stream] = {}
        self.kv_sample_rate: float | None = None
        self.durable = False
        self.changes = 0
        self.settings: Settings | None = None
        self._by_incarnation: dict[int, Stream] = {}

    def receive(  # noqa: PLR0911
        self, peer: bytes, message: FromSender, now: float, size: int = 0
    ) -> Received:
        """Decide about ``message``, a frame of ``size`` bytes from the connection ``peer``."""
        if isinstance(message, Hello):
            return self._hello(peer, message, now)
        stream = self._by_incarnation.get(message.incarnation)
        if stream is None or stream.peer != peer:
            return self._refuse(peer, message.incarnation, "need_hello")
        if self.streams.get(stream.id) is not stream:
            return self._refuse(peer, message.incarnation, "id_conflict", _CONFLICT)
        if not stream.open:
            # It has said goodbye: its engines may be others' or nobody's by now.
            return self._refuse(peer, message.incarnation, "need_hello")
        stream.heard = now
        stream.taken += size
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
        """Acknowledgements that are due, to be sent to their connections."""
        return [
            self._ack(stream, now)
            for stream in self.streams.values()
            if stream.open and not stream.local and self._is_ack_due(stream, now)
        ]

    def marks(self) -> list[tuple[Stream, int]]:
        """What a snapshot of this moment holds, to be told to ``saved`` once it is safe."""
        return [(stream, stream.seq) for stream in self.streams.values()]

    def saved(self, marks: Iterable[tuple[Stream, int]]) -> None:
        """A snapshot outlives this process."""
        for stream, seq in marks:
            stream.durable = max(stream.durable, seq)

    def restore(self, stream: Stream) -> None:
        """Know a stream from a snapshot: it has to greet, and goes on where it was."""
        stream.durable = stream.seq
        self._adopt(stream)

    def attach(self, name: str, incarnation: int) -> Stream:
        """The stream of a source in this process, known from a snapshot or new."""
        stream = self.streams.get(name)
        if stream is None or stream.incarnation != incarnation:
            stream = self._adopt(Stream(name, incarnation, b"", [], 0))
            stream.silent = True
        stream.local = stream.open = True
        return stream

    def refuse_frame(self, peer: bytes, error: WireError) -> list[tuple[bytes, FromExporter]]:
        """The answer to a frame that could not be read."""
        code = error.reason if error.reason in _TOLD else "bad_schema"
        return self._refuse(peer, 0, code, str(error)).replies

    def refuse_hello(self, peer: bytes, hello: Hello, error: WireError) -> Received:
        """The answer to a Hello whose engines cannot be taken; nothing changes."""
        code = "unauthorised" if error.reason == "unauthorised" else "over_limit"
        return self._refuse(peer, hello.incarnation, code, str(error))

    def _hello(self, peer: bytes, hello: Hello, now: float) -> Received:
        stream = self.streams.get(hello.stream)
        if stream is not None and (stream.local or hello.incarnation in stream.retired):
            return self._refuse(peer, hello.incarnation, "id_conflict", _CONFLICT)
        owner = self._by_incarnation.get(hello.incarnation)
        if owner is not None and owner.id != hello.stream:
            return self._refuse(peer, hello.incarnation, "id_conflict", "incarnation is taken")
        received = Received(greeted=True)
        self.changes += 1
        before = max(hello.first - 1, 0)
        if stream is None:
            if len(self.streams) >= MAX_STREAMS and not self._forget_one(now):
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
            # Remembered by its number; what it fed would be kept 16 times over.
            stream.engines = []
            for old in set(stream.retired) - set(retired):
                self._by_incarnation.pop(old, None)
            stream = self._adopt(new)
        elif before > stream.seq:
            received.lost = before - stream.seq
            stream.seq = before
        stream.peer, stream.engines, stream.open = peer, hello.engines, True
        stream.heard = now
        received.stream = stream
        received.replies.append(self._ack(stream, now, hello.nonce))
        return received

    def _adopt(self, stream: Stream) -> Stream:
        self.streams[stream.id] = stream
        self._by_incarnation[stream.incarnation] = stream
        return stream

    def _forget_one(self, now: float) -> bool:
        """Make room by forgetting a stream that said goodbye, or the one silent for longest."""
        gone = [
            s
            for s in self.streams.values()
            if not s.local and (not s.open or now - s.heard >= FORGOTTEN)
        ]
        if not gone:
            return False
        stream = min(gone, key=lambda stream: (stream.open, stream.heard))
        del self.streams[stream.id]
        for known in (stream.incarnation, *stream.retired):
            self._by_incarnation.pop(known, None)
        return True

    def _items(self, stream: Stream, first: int, last: int, received: Received) -> Received:
        """The seqs ``first`` to ``last``, of which ``received`` tells, if it is their turn."""
        if first == stream.seq + 1 and last >= stream.seq:
            stream.seq = last
            self.changes += 1
            return received
        if last <= stream.seq:
            # Its acknowledgement was lost, or is on the way: say it again.
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
        # Most streams send a little all the time: four each second would be most of their cost.
        return (
            stream.acked is None
            or stream.taken >= ACK_BYTES
            or now >= min(stream.heard + ACK_INTERVAL, stream.acked_at + LATEST_ACK)
        )

    def _ack(
        self, stream: Stream, now: float, nonce: int | None = None
    ) -> tuple[bytes, FromExporter]:
        stream.acked = self._state(stream)
        stream.acked_at, stream.taken = now, 0
        settings = None if nonce is None else self.settings
        reply = Ack(VERSION, self.boot, stream.incarnation, nonce, *stream.acked, settings)
        return stream.peer, reply

    def _refuse(self, peer: bytes, incarnation: int, code: str, detail: str = "") -> Received:
        return Received(replies=[(peer, Nack(self.boot, incarnation, code, detail[:256]))])


def _grown(total: int, more: int) -> int:
    """``total`` and ``more``, as far as a snapshot holds it: a peer may say any number, ever again."""
    return min(total + max(more, 0), TOTAL_LIMIT)


_TOLD = ("version", "unauthorised", "over_limit", "ended_epoch")
"""Reasons that have a code of their own."""
_CONFLICT = (
    "another process, or a second instance of the plugin, has this stream id;"
    " set SIDESTEP_NAMESPACE to tell deployments apart"
)
