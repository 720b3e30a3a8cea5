"""Sender and receiver of the delivery protocol, connected by a network that the test simulates."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest

from sidestep.engines.folding import ItemFolder
from sidestep.protocol.claims import Placement
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
    decode_from_sender,
    encode,
)
from sidestep.protocol.receiver import ACK_BYTES, ACK_INTERVAL, MAX_STREAMS, Receiver
from sidestep.protocol.sender import ACK_TIMEOUT, BATCH_BYTES, Sender, State
from sidestep.protocol.stream import Stream, StreamState

ENGINE = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})


def sender(incarnation: int = 7, **options: Any) -> Sender:
    """Return a sender of stream ``s``."""
    return Sender("s", incarnation, [ENGINE], Random(1), ItemFolder(), **options)


def item(number: int) -> bytes:
    """Return a placeholder of an encoded item."""
    return msgspec.msgpack.encode(number)


def frames(of: Sender, now: float) -> list[bytes]:
    """Return all frames that may be sent at ``now``."""
    found = []
    while (frame := of.next_frame(now)) is not None:
        found.append(frame)
        of.sent(now)
    return found


class Link:
    """A lossless connection, and the items that the receiver applied through it."""

    def __init__(self, of: Sender, receiver: Receiver, peer: bytes = b"p") -> None:
        self.sender, self.receiver, self.peer = of, receiver, peer
        self.applied: list[int] = []

    def run(self, now: float) -> None:
        """Deliver messages in both directions until there are none."""
        moved = True
        while moved:
            moved = False
            if self.sender.reopen:
                self.sender.reopened()
            for frame in frames(self.sender, now):
                moved = True
                received = self.receiver.receive(self.peer, decode_from_sender(frame), now)
                self.applied += [msgspec.msgpack.decode(raw) for raw in received.items]
                for _, reply in received.replies:
                    self.sender.receive(encode(reply), now)
            for _, ack in self.receiver.acks(now + ACK_INTERVAL):
                self.sender.receive(encode(ack), now)


def test_a_connection_that_takes_nothing_is_reopened() -> None:
    """Though no frame is in flight that an answer could be missing for."""
    one = sender()
    Link(one, Receiver(boot=1)).run(0.0)
    one.add([item(1)])
    assert one.next_frame(0.1) is not None
    assert one.next_frame(0.1 + ACK_TIMEOUT / 2) is not None
    assert one.next_frame(0.1 + ACK_TIMEOUT) is None
    assert one.reopen


def test_hellos_are_repeated_with_backoff() -> None:
    """The pause doubles up to five seconds, with jitter (S6)."""
    one = sender()
    now, times = 0.0, []
    while now < 60:
        times += [now for _ in frames(one, now)]
        if one.reopen:
            one.reopened()
        now += 0.01
    gaps = [b - a for a, b in pairwise(times)]

    assert gaps[0] < 0.3
    assert all(b > a for a, b in pairwise(gaps[:4]))
    assert 3.7 < gaps[-1] < 6.3


def test_an_ack_of_another_boot_requires_a_new_handshake() -> None:
    """It is that of another exporter process."""
    link = Link(sender(), Receiver(1))
    link.run(0.0)

    link.sender.receive(encode(Ack(VERSION, 99, 7, None, 0, 0)), 0.0)

    assert link.sender.reopen


def test_the_window_is_half_the_ring() -> None:
    """Frames in flight exceed half of the ring by one frame at most (S3)."""
    size = 8 * BATCH_BYTES
    link = Link(sender(ring_bytes=size), Receiver(1))
    link.run(0.0)
    link.sender.add([b"\xc5\x7f\xfd" + bytes(32765) for _ in range(15)])

    sent = frames(link.sender, 1.0)

    assert size // 2 <= sum(map(len, sent)) < size // 2 + 2 * BATCH_BYTES


def test_only_the_unreadable_frame_is_replaced() -> None:
    """The applied seq of the next Ack identifies it."""
    one, receiver = sender(), Receiver(1)
    link = Link(one, receiver)
    link.run(0.0)
    for number in (1, 2):
        one.add([item(number)])
        (frame,) = (f for f in frames(one, 0.1) if isinstance(decode_from_sender(f), Batch))
        if number == 1:
            received = receiver.receive(b"p", decode_from_sender(frame), 0.1)
            link.applied += [msgspec.msgpack.decode(raw) for raw in received.items]
    for _ in range(2):
        one.receive(encode(Nack(1, 0, "bad_schema", "")), 0.1)
    one.add([item(3)])
    link.run(0.2)

    assert one.dropped == 1
    assert link.applied == [1, None, 3]


def opened(receiver: Receiver, first: int = 1) -> None:
    """Open stream ``s``, incarnation 1, on connection ``p``."""
    receiver.receive(b"p", Hello(VERSION, "s", 1, 1, first, [ENGINE]), 0.0)


def codes(replies: list[tuple[bytes, FromExporter]]) -> list[str]:
    """Return the codes of the Nacks among ``replies``."""
    return [reply.code for _, reply in replies if isinstance(reply, Nack)]


@pytest.mark.parametrize(
    ("first", "count", "applied", "duplicates", "refused"),
    [
        (6, 3, 3, 0, []),
        (1, 5, 0, 5, []),
        (4, 4, 0, 0, ["need_hello"]),
        (7, 1, 0, 0, ["need_hello"]),
    ],
    ids=["next", "duplicate", "straddling", "gap"],
)
def test_only_the_next_items_are_applied(
    first: int, count: int, applied: int, duplicates: int, refused: list[str]
) -> None:
    """After seq 5 known items are duplicates, and anything else but seq 6 is refused."""
    receiver = Receiver(1)
    opened(receiver, first=6)

    received = receiver.receive(b"p", Batch(1, first, [msgspec.Raw(item(0))] * count), 0.0)

    assert len(received.items) == applied
    assert received.duplicates == duplicates
    assert codes(received.replies) == refused


def test_items_that_the_sender_no_longer_has_are_lost() -> None:
    """A Hello that begins behind the next seq reports them."""
    receiver = Receiver(1)
    opened(receiver)

    received = receiver.receive(b"p", Hello(VERSION, "s", 1, 2, 11, [ENGINE]), 0.0)

    assert received.lost == 10


def prepared(state: StreamState) -> Receiver:
    """A receiver whose stream ``s``, incarnation 1, is in ``state``, on connection ``p`` if it has one."""
    receiver = Receiver(1)
    if state is StreamState.LOCAL:
        receiver.attach("s", 1)
    elif state is not StreamState.UNKNOWN:
        opened(receiver)
    if state is StreamState.DETACHED:
        receiver.detach(receiver.streams["s"])
    elif state is StreamState.CLOSED:
        receiver.receive(b"p", Bye(1, 0), 0.0)
    elif state is StreamState.RETIRED:
        new = Hello(VERSION, "s", 2, 1, 1, [ENGINE])
        receiver.receive(b"q", new, 0.0, placed=Placement(new))
    return receiver


UNKNOWN, DETACHED, OPEN, CLOSED, RETIRED, LOCAL = StreamState
BATCH, HELLO = Batch(1, 1, [msgspec.Raw(item(1))]), Hello(VERSION, "s", 1, 1, 1, [ENGINE])
OTHERS = [BATCH, Aggregate(1, 1, 1, []), Heartbeat(1, 0, 0), Bye(1, 0)]


@pytest.mark.parametrize(
    ("states", "peer", "messages", "refusals", "following"),
    [
        ([UNKNOWN, DETACHED, OPEN, CLOSED], b"p", [HELLO], [], OPEN),
        ([UNKNOWN, DETACHED, OPEN, CLOSED], b"new", [HELLO], [], OPEN),
        ([LOCAL], b"new", [HELLO], ["id_conflict"], None),
        ([DETACHED, OPEN, CLOSED], b"q", [Hello(VERSION, "s", 2, 1, 1, [ENGINE])], [], RETIRED),
        ([LOCAL], b"q", [Hello(VERSION, "s", 2, 1, 1, [ENGINE])], ["id_conflict"], LOCAL),
        ([DETACHED, OPEN, CLOSED, LOCAL], b"q", [Hello(VERSION, "t", 1, 1, 1, [ENGINE])], ["id_conflict"], None),
        ([OPEN], b"p", OTHERS[:3], [], OPEN),
        ([OPEN], b"p", [Bye(1, 0)], [], CLOSED),
        ([OPEN], b"p", [Heartbeat(1, 3, 0)], ["need_hello"], OPEN),
        ([RETIRED], b"p", OTHERS, ["need_hello"], UNKNOWN),
        ([UNKNOWN, DETACHED, CLOSED, LOCAL], b"p", OTHERS, ["need_hello"], None),
        ([UNKNOWN, DETACHED, OPEN, CLOSED, LOCAL], b"other", OTHERS, ["need_hello"], None),
    ],
)  # fmt: skip
def test_a_message_is_answered_by_the_state_table(
    states: list[StreamState],
    peer: bytes,
    messages: list[FromSender],
    refusals: list[str],
    following: StreamState | None,
) -> None:
    """The state of its incarnation decides what is refused, what is applied and what comes next."""
    for state in states:
        for message in messages:
            receiver = prepared(state)
            stream = receiver._by_incarnation.get(1)
            placed = Placement(message) if isinstance(message, Hello) else None
            received = receiver.receive(peer, message, 0.0, placed=placed)

            assert codes(received.replies) == refusals
            assert bool(received.items) == (state is OPEN and message is BATCH and peer == b"p")
            stream = stream or receiver._by_incarnation.get(1, Stream("s", 1))
            assert stream.state is (state if following is None else following)


def test_reported_drops_add_up_over_incarnations() -> None:
    """Heartbeats carry running totals of a process; those of a stream continue at a restart."""
    receiver = Receiver(1)
    opened(receiver)

    receiver.receive(b"p", Heartbeat(1, 0, 0, dropped=3, errors=1), 0.0)
    receiver.receive(b"p", Heartbeat(1, 0, 0, dropped=5, errors=1), 0.0)
    for now in (4.0, 5.0):
        receiver.receive(b"q", Hello(VERSION, "s", 2, 1, 1, [ENGINE]), now)
    receiver.receive(b"q", Heartbeat(2, 0, 0, dropped=4), 5.0)
    stream = receiver.streams["s"]

    assert (stream.dropped, stream.errors) == (9, 1)


def test_a_closed_stream_is_removed_for_a_new_one() -> None:
    """While none is closed, one more than the limit is refused."""
    receiver = Receiver(1)
    for number in range(1, MAX_STREAMS + 1):
        receiver.receive(b"p", Hello(VERSION, f"s{number}", number, 1, 1, []), 0.0)
    late = Hello(VERSION, "late", 1000, 1, 1, [])

    assert codes(receiver.receive(b"p", late, 0.0).replies) == ["over_limit"]
    receiver.receive(b"p", Bye(1, 0), 0.0)
    assert codes(receiver.receive(b"p", late, 0.0).replies) == []


def busy(seconds: float, size: int) -> list[float]:
    """Return the times of Acks to a stream that sends ``size`` bytes 8 times a second."""
    receiver = Receiver(1)
    receiver.receive(b"p", Hello(VERSION, "s", 1, 1, 1, [ENGINE]), 0.0)
    reported: list[float] = []
    sent = 0
    for tick in range(int(20 * (seconds + 1))):
        now = tick / 20
        while now < seconds and sent / 8 <= now:
            sent += 1
            receiver.receive(b"p", Batch(1, sent, [msgspec.Raw(item(1))]), now, size)
        for _, ack in receiver.acks(now):
            assert isinstance(ack, Ack)
            assert ack.applied == sent
            reported.append(now)
    assert receiver.streams["s"].acked == (sent, sent, None)
    return reported


@pytest.mark.parametrize(
    ("size", "interval"), [(500, 1.0), (ACK_BYTES, ACK_INTERVAL)], ids=["slow", "fast"]
)
def test_acks_follow_a_streams_bytes(size: int, interval: float) -> None:
    """A slow stream gets one each second, a fast one four, and both one soon after the last item."""
    reported = busy(9.5, size)

    assert all(0.9 * interval < b - a < 1.3 * interval for a, b in pairwise(reported[:-1]))
    assert 9.5 <= reported[-1] <= 9.5 + 1.2 * ACK_INTERVAL


@pytest.mark.parametrize("seed", range(6))
def test_no_sender_runs_into_the_timeout_of_acks(seed: int) -> None:
    """Whatever its ring holds, how much and how often it sends, and how late snapshots are."""
    random = Random(seed)
    ring_bytes = random.choice([2 << 10, 64 << 10, 8 << 20])
    every = random.choice([0.05, 0.2, 0.3, 0.9, 2.0, 5.0])
    size = min(random.choice([10, 1000, 60_000]), ring_bytes // 4)
    # A snapshot each 0.25 s, of which the last acknowledgement may just not tell.
    late = random.choice([0.0, 0.3])
    one = sender(ring_bytes=ring_bytes)
    receiver = Receiver(1)
    receiver.durable = bool(late)
    said = random.randbytes(size)
    raw = msgspec.msgpack.encode(said)
    hellos = taken = sent = 0
    saved: list[tuple[float, list[Any]]] = []
    for tick in range(20 * 60):
        now = tick / 20
        if now < 50.0 and sent * every <= now:
            sent += 1
            one.add([raw])
        for frame in frames(one, now):
            message = decode_from_sender(frame)
            hellos += isinstance(message, Hello)
            received = receiver.receive(b"p", message, now, len(frame))
            assert not received.duplicates
            taken += len(received.items)
            for _, reply in received.replies:
                one.receive(encode(reply), now)
        saved.append((now + late, receiver.cursors()))
        while saved and saved[0][0] <= now:
            receiver.mark_durable(saved.pop(0)[1])
        for _, ack in receiver.acks(now):
            one.receive(encode(ack), now)

    assert hellos == 1
    assert one.drained
    assert taken + one.folded == sent
    if size / every * 1.7 < ring_bytes - size:
        assert not one.folded


def rates(replies: list[tuple[bytes, FromExporter]]) -> list[tuple[bytes, float | None]]:
    """Return the sample rate of each Ack, with its connection."""
    return [(peer, reply.kv_sample_rate) for peer, reply in replies if isinstance(reply, Ack)]


def test_a_changed_sample_rate_is_sent_to_open_streams_at_once() -> None:
    """Once, though nothing was applied since the last Ack."""
    receiver = Receiver(1)
    links = [Link(Sender(name, number, [ENGINE], Random(1), ItemFolder()), receiver, name.encode())
             for number, name in enumerate(["a", "b", "left"], 1)]  # fmt: skip
    for link in links:
        link.run(0.0)
    receiver.receive(b"left", Bye(3, 0), 0.0)
    assert receiver.acks(0.0) == []

    receiver.kv_sample_rate = 0.0
    reported = receiver.acks(0.0)
    for _, ack in reported:
        links[0].sender.receive(encode(ack), 0.0)

    assert sorted(rates(reported)) == [(b"a", 0.0), (b"b", 0.0)]
    assert links[0].sender.kv_sample_rate == 0.0
    assert links[0].sender.state is State.STREAMING
    receiver.kv_sample_rate = 0.0
    assert receiver.acks(1000.0) == []


def test_nothing_is_sent_before_the_hello_is_answered() -> None:
    """Only an Ack with the nonce of this Hello completes the handshake (S5)."""
    one = sender()
    one.add([item(1)])
    (hello,) = frames(one, 0.0)
    first = decode_from_sender(hello)
    assert isinstance(first, Hello)

    one.receive(encode(Ack(VERSION, 5, 7, first.nonce + 1, 0, 0)), 0.0)
    assert frames(one, 0.0) == []
    one.receive(encode(Ack(VERSION, 5, 8, first.nonce, 0, 0)), 0.0)
    assert frames(one, 0.0) == []
    one.receive(encode(Ack(VERSION, 5, 7, first.nonce, 0, 0)), 0.0)

    assert isinstance(decode_from_sender(frames(one, 0.0)[0]), Batch)
