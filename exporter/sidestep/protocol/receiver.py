"""The receiver of the delivery protocol: which items of which stream are applied, once and in order.

``TRANSITIONS`` is the state table, from which docs/protocol.md is written. Rules R1 to R10 are those of
docs/protocol.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from sidestep.errors import WireError
from sidestep.protocol.claims import Claims, Placement, numbered
from sidestep.protocol.engine_totals import TOTAL_LIMIT
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import (
    Ack,
    Aggregate,
    Batch,
    Bye,
    FromExporter,
    FromSender,
    Heartbeat,
    Hello,
    Nack,
    Settings,
)
from sidestep.protocol.stream import Stream, StreamState

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


class Event(IntEnum):
    """Event of one incarnation of a stream; an index into the state table."""

    HELLO = 0
    """Hello"""
    HELLO_OVER_LIMIT = 1
    """Hello while there are 256 streams, none of which may be removed"""
    SUCCESSOR = 2
    """Hello of a new incarnation"""
    TAKEN = 3
    """Hello with an incarnation that is another stream's"""
    OTHER_CONNECTION = 4
    """Batch, Aggregate, Heartbeat or Bye on another connection than that of its last Hello"""
    UNEXPECTED = 5
    """Batch, Aggregate, Heartbeat or Bye on its connection while it is not open"""
    NEXT = 6
    """Batch or Aggregate with first = seq + 1"""
    REPEATED = 7
    """Batch or Aggregate with last <= seq"""
    GAP = 8
    """Any other Batch or Aggregate"""
    HEARTBEAT = 9
    """Heartbeat with head <= seq"""
    HEARTBEAT_AHEAD = 10
    """Heartbeat with head > seq"""
    BYE = 11
    """Bye"""
    SILENCE = 12
    """Silence for 300 s"""


# For the path of every frame: members of an enum are slow to look up before Python 3.12.
_OPEN = StreamState.OPEN
_OTHER_CONNECTION, _NEXT = Event.OTHER_CONNECTION, Event.NEXT
_WITH_ITEMS = Batch, Aggregate


@dataclasses.dataclass(slots=True)
class Received:
    """Result of one message: what to apply, and what to send.

    Attributes:
        stream: The sender's stream, if it is known.
        items: Items to apply now, in order; their seqs are consumed even if that fails (R1).
        totals: Encoded totals of folded items, to be added likewise.
        replies: Messages to send, each with its connection.
        opened: True if a Hello opened the stream or changed its engines.
        retired: The incarnation that a new process of the stream replaced.
        duplicates: Number of items that were applied before.
        lost: Number of items that the sender no longer has.
    """

    stream: Stream | None = None
    items: Sequence[msgspec.Raw] = ()
    totals: Sequence[msgspec.Raw] = ()
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
        durable: True if ``mark_durable`` reports what outlives this process; if False, durable
            equals applied (R4).
        changes: Version of everything that a snapshot of the streams holds.
        settings: Settings by which senders fold, part of the answer to a Hello; None: none are sent.
        kv_sample_rate: Share of KV blocks that senders sample. May be set at any time: open
            streams get it with the next acknowledgement.
    """

    def __init__(
        self, boot: int, settings: Settings | None = None, *, durable: bool = False
    ) -> None:
        self.boot = boot
        self.settings = settings
        self.streams: dict[str, Stream] = {}
        self.kv_sample_rate: float | None = None
        self.durable = durable
        self.changes = 0
        self._by_incarnation: dict[int, Stream] = {}
        self._claims = Claims(self.streams)

    def place(self, hello: Hello, now: float) -> Placement | None:
        """Return ``hello`` with the ids under which its server is counted (R10).

        None: it is not known yet whether another process that has them is alive. Leave the Hello
        unanswered; the sender repeats it.

        Raises:
            WireError: Too many processes claim the ids, or another process counts the same.
        """
        known = self._by_incarnation.get(hello.incarnation)
        if known is not None:
            return Placement(numbered(hello, known.replica), known.replica)
        return self._claims.place(hello, now)

    def paused(self, seconds: float, now: float) -> None:
        """Note that the exporter stood still until ``now``: what was sent meanwhile has not been received."""
        for stream in self.streams.values():
            stream.seen_at = min(stream.seen_at + seconds, now)
        # A process that died before the pause would now seem to have sent something after a Hello.
        self._claims.restart_waits()

    def receive(
        self,
        peer: bytes,
        message: FromSender,
        now: float,
        size: int = 0,
        placed: Placement | None = None,
    ) -> Received:
        """Apply ``TRANSITIONS`` to ``message``, of ``size`` bytes from ``peer``.

        ``placed`` is what ``place`` has returned for a Hello; None: it is called here.
        """
        if isinstance(message, Hello):
            placed = placed or self.place(message, now)
            if placed is None:
                return Received()
            message = placed.hello
            stream, event = self._hello_event(message, now)
        else:
            stream = self._by_incarnation.get(message.incarnation) or Stream("", 0)
            if stream.peer != peer:
                event = _OTHER_CONNECTION
            elif stream.state is not _OPEN:
                event = Event.UNEXPECTED
            else:
                event = _event(message, stream.seq)
                stream.seen_at = now
                stream.received += size
        action, following = _TABLE[stream.state][event]
        received: Received = action(self, stream, peer, message, now)
        stream.state = following
        if received.opened and placed is not None and received.stream is not None:
            received.stream.replica = placed.replica
        return received

    def acks(self, now: float) -> list[tuple[bytes, FromExporter]]:
        """Return the acknowledgements that are due, each with its connection."""
        return [
            self._ack(stream, now)
            for stream in self.streams.values()
            if stream.state is _OPEN and self._is_ack_due(stream, now)
        ]

    def cursors(self) -> list[tuple[Stream, int]]:
        """Return the applied seq of each stream now, for ``mark_durable`` once a snapshot has it."""
        return [(stream, stream.seq) for stream in self.streams.values()]

    def mark_durable(self, cursors: Iterable[tuple[Stream, int]]) -> None:
        """Record that a snapshot with these ``cursors`` is on disk (R4)."""
        for stream, seq in cursors:
            stream.durable = max(stream.durable, seq)

    def restore(self, stream: Stream) -> None:
        """Add a stream from a snapshot; it continues from its seq after its next Hello."""
        stream.durable = stream.seq
        self._adopt(stream)

    def attach(self, name: str, incarnation: int) -> Stream:
        """Return the stream of a source in this process, restored from a snapshot or new."""
        stream = self.streams.get(name)
        if stream is None or stream.incarnation != incarnation:
            if stream is not None:
                stream.state = StreamState.RETIRED
            stream = self._adopt(Stream(name, incarnation, silent=True))
        stream.state = StreamState.LOCAL
        return stream

    def detach(self, stream: Stream) -> None:
        """Forget the connection."""
        stream.peer = b""
        _, stream.state = _TABLE[stream.state][Event.SILENCE]

    def refuse_frame(self, peer: bytes, error: WireError) -> list[tuple[bytes, FromExporter]]:
        """Return the answer to a frame that could not be decoded."""
        code = error.reason if error.reason in ("version", "unauthorised") else "bad_schema"
        return self._refuse(peer, 0, code, str(error)).replies

    def refuse_hello(
        self, peer: bytes, hello: Hello, error: WireError
    ) -> list[tuple[bytes, FromExporter]]:
        """Return the answer to a Hello whose engines are refused; nothing changes."""
        code = error.reason if error.reason in ("unauthorised", "id_conflict") else "over_limit"
        return self._refuse(peer, hello.incarnation, code, str(error)).replies

    def _hello_event(self, hello: Hello, now: float) -> tuple[Stream, Event]:
        """Return the known incarnation of the stream, and the event that ``hello`` is for it."""
        stream = self.streams.get(hello.stream) or Stream(hello.stream, hello.incarnation)
        owner = self._by_incarnation.get(hello.incarnation)
        if owner is not None and owner.id != stream.id:
            return stream, Event.TAKEN
        if hello.incarnation != stream.incarnation:
            return stream, Event.SUCCESSOR
        if stream.state is StreamState.UNKNOWN and not self._has_capacity(now):
            return stream, Event.HELLO_OVER_LIMIT
        return stream, Event.HELLO

    def _open(self, stream: Stream, peer: bytes, hello: Hello, now: float) -> Received:
        """Set seq to first - 1, or to that of the incarnation when it was retired; send an Ack."""
        stream.seq = max(hello.first - 1, 0)
        for known in (*self.streams.values(), stream):
            if hello.incarnation in known.retired:
                stream.seq = known.retired.pop(hello.incarnation)
        self._claims.forget(hello.incarnation)
        return self._resume(self._adopt(stream), peer, hello, now)

    def _resume(self, stream: Stream, peer: bytes, hello: Hello, now: float) -> Received:
        """Skip to seq = first - 1 if that is ahead, and count lost items; send an Ack."""
        received = Received(stream, opened=True, lost=max(hello.first - 1 - stream.seq, 0))
        stream.seq += received.lost
        stream.peer, stream.engines, stream.seen_at = peer, hello.engines, now
        stream.caught_up = False
        stream.server, stream.process = hello.server, hello.process
        self.changes += 1
        received.replies.append(self._ack(stream, now, hello.nonce))
        return received

    def _replace(self, stream: Stream, peer: bytes, hello: Hello, now: float) -> Received:
        """Remember seq; open the new incarnation; send an Ack to it."""
        del self._by_incarnation[stream.incarnation]
        retired = [*stream.retired.items(), (stream.incarnation, stream.seq)][-MAX_RETIRED:]
        new = Stream(hello.stream, hello.incarnation, state=StreamState.OPEN, retired=dict(retired))
        # R3: what a stream reports adds up over its incarnations.
        new.dropped, new.errors, new.folded = stream.dropped, stream.errors, stream.folded
        new.duplicates = stream.duplicates
        received = self._open(new, peer, hello, now)
        received.retired = stream.incarnation
        return received

    def _apply(
        self, stream: Stream, peer: bytes, message: Batch | Aggregate, now: float
    ) -> Received:
        """Apply the items; set seq to last."""
        self.changes += 1
        if isinstance(message, Batch):
            stream.seq += len(message.items)
            return Received(stream, message.items)
        stream.seq = message.last
        return Received(stream, totals=message.totals)

    def _count_duplicates(
        self, stream: Stream, peer: bytes, message: Batch | Aggregate, now: float
    ) -> Received:
        """Count duplicates; send an Ack again, since the last one was lost or is on its way."""
        stream.acked = None
        duplicates = max(message.last - message.first + 1, 0)
        stream.duplicates += duplicates
        return Received(stream, duplicates=duplicates)

    def _record_heartbeat(
        self, stream: Stream, peer: bytes, beat: Heartbeat, now: float
    ) -> Received:
        """Add up what the sender dropped, folded or could not encode."""
        before = stream.beat or Heartbeat(beat.incarnation, 0, 0)
        stream.beat = beat
        # A sender sends its first one after all items that it holds.
        stream.caught_up = stream.caught_up or beat.head <= stream.seq
        stream.dropped = _grown(stream.dropped, beat.dropped - before.dropped)
        stream.errors = _grown(stream.errors, beat.errors - before.errors)
        stream.folded = _grown(stream.folded, beat.folded - before.folded)
        return Received(stream)

    def _record_heartbeat_ahead(
        self, stream: Stream, peer: bytes, beat: Heartbeat, now: float
    ) -> Received:
        """Add up the same; send a Nack `need_hello`, since items are missing."""
        received = self._record_heartbeat(stream, peer, beat, now)
        received.replies = self._ask_for_hello(stream, peer, beat, now).replies
        return received

    def _close(self, stream: Stream, peer: bytes, bye: Bye, now: float) -> Received:
        """Count the items that are missing up to last as lost; send an Ack."""
        self.changes += 1
        lost = max(bye.last - stream.seq, 0)
        return Received(stream, replies=[self._ack(stream, now)], lost=lost)

    def _ask_for_hello(
        self, stream: Stream, peer: bytes, message: FromSender, now: float
    ) -> Received:
        """Send a Nack `need_hello`."""
        return self._refuse(peer, message.incarnation, "need_hello")

    def _refuse_conflict(
        self, stream: Stream, peer: bytes, message: FromSender, now: float
    ) -> Received:
        """Send a Nack `id_conflict`."""
        return self._refuse(peer, message.incarnation, "id_conflict", _CONFLICT)

    def _refuse_over_limit(self, stream: Stream, peer: bytes, hello: Hello, now: float) -> Received:
        """Send a Nack `over_limit`."""
        return self._refuse(peer, hello.incarnation, "over_limit", "too many streams")

    def _has_capacity(self, now: float) -> bool:
        """Return whether a stream may be added; remove one if need be: a closed one, or the most silent."""
        if len(self.streams) < MAX_STREAMS:
            return True
        removable = [
            s
            for s in self.streams.values()
            if s.state is StreamState.CLOSED
            or (s.state is not StreamState.LOCAL and now - s.seen_at >= REMOVABLE)
        ]
        if not removable:
            return False
        stream = min(removable, key=lambda s: (s.state is not StreamState.CLOSED, s.seen_at))
        del self.streams[stream.id]
        del self._by_incarnation[stream.incarnation]
        return True

    def _adopt(self, stream: Stream) -> Stream:
        self.streams[stream.id] = stream
        self._by_incarnation[stream.incarnation] = stream
        return stream

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
        # A WireError's text begins with the code where both are the same.
        detail = detail.removeprefix(f"{code}: ")
        return Received(replies=[(peer, Nack(self.boot, incarnation, code, detail[:256]))])


def _event(message: Batch | Aggregate | Heartbeat | Bye, seq: int) -> Event:
    """Return the event that ``message`` is for an open stream whose items are applied up to ``seq``."""
    if isinstance(message, _WITH_ITEMS):
        if message.first == seq + 1 and message.last >= seq:
            return _NEXT
        return Event.REPEATED if message.last <= seq else Event.GAP
    if isinstance(message, Bye):
        return Event.BYE
    return Event.HEARTBEAT if message.head <= seq else Event.HEARTBEAT_AHEAD


def _grown(total: int, more: int) -> int:
    """Return the sum, at most what a snapshot can hold: a peer may send any number any number of times."""
    return min(total + max(more, 0), TOTAL_LIMIT)


_CONFLICT = "another process has this stream id; set SIDESTEP_NAMESPACE to distinguish deployments"


_Action = Callable[..., Any]


class Transition(NamedTuple):
    """Rows of the state table: one action for each of ``states`` with each of ``events``.

    ``following`` is the next state; None: it stays the same. The docstring of ``action`` describes it.
    """

    states: Sequence[StreamState]
    events: Sequence[Event]
    action: _Action
    following: StreamState | None = None


_KNOWN = (StreamState.DETACHED, StreamState.OPEN, StreamState.CLOSED)

TRANSITIONS = (
    Transition([StreamState.UNKNOWN], [Event.HELLO], Receiver._open, StreamState.OPEN),
    Transition([StreamState.UNKNOWN], [Event.HELLO_OVER_LIMIT], Receiver._refuse_over_limit),
    Transition(_KNOWN, [Event.HELLO], Receiver._resume, StreamState.OPEN),
    Transition(_KNOWN, [Event.SUCCESSOR], Receiver._replace, StreamState.RETIRED),
    Transition([StreamState.OPEN], [Event.NEXT], Receiver._apply),
    Transition([StreamState.OPEN], [Event.REPEATED], Receiver._count_duplicates),
    Transition([StreamState.OPEN], [Event.HEARTBEAT], Receiver._record_heartbeat),
    Transition([StreamState.OPEN], [Event.HEARTBEAT_AHEAD], Receiver._record_heartbeat_ahead),
    Transition([StreamState.OPEN], [Event.BYE], Receiver._close, StreamState.CLOSED),
    Transition([StreamState.OPEN], [Event.SILENCE], Receiver.detach, StreamState.DETACHED),
    Transition([StreamState.LOCAL], [Event.HELLO, Event.SUCCESSOR], Receiver._refuse_conflict),
    Transition(list(StreamState), [Event.TAKEN], Receiver._refuse_conflict),
)
"""The state table of docs/protocol.md."""
OTHERWISE = Receiver._ask_for_hello
"""Action for all other pairs of a state and an event; the state stays the same."""


def _table() -> list[list[tuple[_Action, StreamState]]]:
    table = [[(OTHERWISE, state) for _ in Event] for state in StreamState]
    for row in TRANSITIONS:
        for state in row.states:
            for event in row.events:
                following = state if row.following is None else row.following
                table[state][event] = row.action, following
    return table


_TABLE = _table()
