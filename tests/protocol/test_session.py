"""Both ends of the protocol, over a network that the test plays."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidestep.engines.folding import ItemFolder
from sidestep.errors import WireError
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import (
    Ack,
    Batch,
    Bye,
    EngineInfo,
    FromExporter,
    Heartbeat,
    Hello,
    Nack,
    decode_from_exporter,
    decode_from_sender,
    encode,
)
from sidestep.protocol.receiver import ACK_BYTES, ACK_INTERVAL, MAX_STREAMS, Receiver
from sidestep.protocol.sender import ACK_TIMEOUT, BATCH_BYTES, Sender, State

ENGINE = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})


def sender(incarnation: int = 7, **options: int) -> Sender:
    """A sender of stream ``s``."""
    return Sender("s", incarnation, [ENGINE], Random(1), ItemFolder(), **options)


def item(number: int) -> bytes:
    """Stands for an encoded item."""
    return msgspec.msgpack.encode(number)


def frames(of: Sender, now: float) -> list[bytes]:
    """All that may go out at ``now``."""
    found = []
    while (frame := of.next_frame(now)) is not None:
        found.append(frame)
        of.sent(now)
    return found


class Link:
    """A lossless connection, and what the exporter applied through it."""

    def __init__(self, of: Sender, receiver: Receiver, peer: bytes = b"p") -> None:
        self.sender, self.receiver, self.peer = of, receiver, peer
        self.applied: list[int] = []

    def run(self, now: float) -> None:
        """Carry everything in both directions until nothing moves."""
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


def test_items_arrive_once_and_in_order() -> None:
    """After the handshake all items are applied and the ring is empty."""
    link = Link(sender(), Receiver(1))
    link.sender.add([item(n) for n in range(2000)])

    link.run(0.0)

    assert list(range(2000)) == link.applied
    assert link.sender.drained
    assert link.sender.held_bytes == 0


def test_nothing_is_sent_before_the_hello_is_answered() -> None:
    """Only the answer with this Hello's nonce opens the stream."""
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


def test_a_new_exporter_gets_what_the_last_one_had_not_acknowledged() -> None:
    """Unacknowledged frames are sent again, unchanged, to the exporter that answers next."""
    one = sender()
    first = Receiver(1)
    link = Link(one, first)
    link.run(0.0)
    one.add([item(1)])
    (lost,) = frames(one, 0.1)

    after = Link(one, Receiver(2))
    assert frames(one, 0.1 + ACK_TIMEOUT) == []
    assert one.reopen
    after.run(0.2 + ACK_TIMEOUT)

    assert [1] == after.applied
    assert isinstance(decode_from_sender(lost), Batch)


def test_an_unanswered_hello_is_repeated_ever_more_slowly() -> None:
    """Between two Hellos the time doubles up to five seconds, with jitter."""
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


def test_another_boot_number_means_another_exporter() -> None:
    """An acknowledgement of a boot we did not greet makes the sender greet anew."""
    link = Link(sender(), Receiver(1))
    link.run(0.0)

    link.sender.receive(encode(Ack(VERSION, 99, 7, None, 0, 0)), 0.0)

    assert link.sender.reopen


def test_the_window_is_half_the_ring() -> None:
    """Unacknowledged frames never fill more than half of the ring, by one frame at most."""
    size = 8 * BATCH_BYTES
    link = Link(sender(ring_bytes=size), Receiver(1))
    link.run(0.0)
    link.sender.add([b"\xc5\x7f\xfd" + bytes(32765) for _ in range(15)])

    sent = frames(link.sender, 1.0)

    assert size // 2 <= sum(map(len, sent)) < size // 2 + 2 * BATCH_BYTES


def test_a_frame_that_the_exporter_cannot_read_is_given_up() -> None:
    """Its items are counted as dropped; those behind it arrive."""
    one = sender()
    link = Link(one, Receiver(1))
    link.run(0.0)
    one.add([item(1)])
    frames(one, 0.1)
    one.receive(encode(Nack(1, 0, "bad_schema", "")), 0.1)
    one.add([item(2)])
    link.run(0.2)

    assert one.dropped == 1
    assert [None, 2] == link.applied


def test_the_newest_process_of_a_stream_wins() -> None:
    """The older one is told, stops, and counts what it is given from then on."""
    receiver = Receiver(1)
    old, new = Link(sender(1), receiver, b"old"), Link(sender(2), receiver, b"new")
    old.run(0.0)
    new.run(0.0)

    old.sender.add([item(1)])
    old.run(1.0)
    old.sender.add([item(2)])

    assert old.applied == []
    assert old.sender.state is State.STOPPED
    assert old.sender.dropped == 2
    assert receiver.streams["s"].incarnation == 2


def test_a_stopped_sender_stays_stopped() -> None:
    """Whatever its engine has to say of itself: another process has the stream's name."""
    receiver = Receiver(1)
    old, new = Link(sender(1), receiver, b"old"), Link(sender(2), receiver, b"new")
    old.run(0.0)
    new.run(0.0)
    old.sender.add([item(1)])
    old.run(1.0)
    old.sender.describe([ENGINE])

    assert old.sender.state is State.STOPPED
    assert frames(old.sender, 9.0) == []


def test_a_description_that_comes_while_the_hello_is_out_is_said() -> None:
    """The answer to the Hello before it does not count as one to this."""
    one, receiver = sender(), Receiver(1)
    (hello,) = frames(one, 0.0)
    new = EngineInfo("e", "vllm", ENGINE.labels, {"cache_config": {"block_size": "16"}})
    one.describe([new])
    for _, reply in receiver.receive(b"p", decode_from_sender(hello), 0.0).replies:
        one.receive(encode(reply), 0.0)
    assert one.state is State.HANDSHAKE

    Link(one, receiver).run(0.1)

    assert receiver.streams["s"].engines == [new]


def test_only_the_frame_that_was_not_read_is_given_up() -> None:
    """Which one it was shows when the exporter says what it has applied."""
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


def test_a_restart_is_told_from_a_reconnect() -> None:
    """Another incarnation restarted; the same one merely came back."""
    receiver = Receiver(1)
    hello = Hello(VERSION, "s", 1, 1, 1, [ENGINE])

    assert receiver.receive(b"a", hello, 0.0).retired is None
    assert receiver.receive(b"b", hello, 0.0).retired is None
    assert receiver.receive(b"c", Hello(VERSION, "s", 2, 1, 1, [ENGINE]), 0.0).retired == 1


def opened(receiver: Receiver, first: int = 1) -> None:
    """Stream ``s`` of incarnation 1 on connection ``p``."""
    receiver.receive(b"p", Hello(VERSION, "s", 1, 1, first, [ENGINE]), 0.0)


def codes(replies: list[tuple[bytes, FromExporter]]) -> list[str]:
    """Of the refusals among ``replies``."""
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
    """After seq 5: the next apply, known ones are duplicates, all else is asked for anew."""
    receiver = Receiver(1)
    opened(receiver, first=6)

    received = receiver.receive(b"p", Batch(1, first, [msgspec.Raw(item(0))] * count), 0.0)

    assert len(received.items) == applied
    assert received.duplicates == duplicates
    assert codes(received.replies) == refused


def test_what_a_sender_no_longer_holds_is_counted_as_lost() -> None:
    """A known incarnation that begins behind the next seq has lost what lies between."""
    receiver = Receiver(1)
    opened(receiver)

    received = receiver.receive(b"p", Hello(VERSION, "s", 1, 2, 11, [ENGINE]), 0.0)

    assert received.lost == 10


def test_a_lost_tail_is_found_by_the_heartbeat() -> None:
    """A heartbeat that claims more than has arrived makes the sender send it again."""
    receiver = Receiver(1)
    opened(receiver)

    assert codes(receiver.receive(b"p", Heartbeat(1, 3, 0), 0.0).replies) == ["need_hello"]


@pytest.mark.parametrize(
    "message", [Batch(9, 1, []), Heartbeat(9, 0, 0), Bye(9, 0)], ids=["batch", "beat", "bye"]
)
def test_a_stranger_is_asked_for_its_hello(message: Batch | Heartbeat | Bye) -> None:
    """Neither an unknown incarnation nor a known one on another connection is taken in."""
    receiver = Receiver(1)
    opened(receiver)

    assert codes(receiver.receive(b"p", message, 0.0).replies) == ["need_hello"]
    message.incarnation = 1
    assert codes(receiver.receive(b"other", message, 0.0).replies) == ["need_hello"]


def test_reports_of_drops_add_up_over_heartbeats() -> None:
    """They carry running totals of a process; a stream's go on over its restarts."""
    receiver = Receiver(1)
    opened(receiver)

    receiver.receive(b"p", Heartbeat(1, 0, 0, dropped=3, errors=1), 0.0)
    receiver.receive(b"p", Heartbeat(1, 0, 0, dropped=5, errors=1), 0.0)
    receiver.receive(b"q", Hello(VERSION, "s", 2, 1, 1, [ENGINE]), 0.0)
    receiver.receive(b"q", Heartbeat(2, 0, 0, dropped=4), 0.0)
    stream = receiver.streams["s"]

    assert (stream.dropped, stream.errors) == (9, 1)


def test_streams_are_bounded_and_those_that_left_make_room() -> None:
    """One more than the limit is refused until one says goodbye."""
    receiver = Receiver(1)
    for number in range(1, MAX_STREAMS + 1):
        receiver.receive(b"p", Hello(VERSION, f"s{number}", number, 1, 1, []), 0.0)
    late = Hello(VERSION, "late", 1000, 1, 1, [])

    assert codes(receiver.receive(b"p", late, 0.0).replies) == ["over_limit"]
    receiver.receive(b"p", Bye(1, 0), 0.0)
    assert codes(receiver.receive(b"p", late, 0.0).replies) == []


def test_an_unreadable_frame_is_answered() -> None:
    """The sender learns that it is to give the frame up, or that versions differ."""
    receiver = Receiver(1)

    assert codes(receiver.refuse_frame(b"p", WireError("bad_schema"))) == ["bad_schema"]
    assert codes(receiver.refuse_frame(b"p", WireError("version"))) == ["version"]


def test_what_is_no_answer_is_ignored() -> None:
    """A sender is not disturbed by bytes that are none of the exporter's messages."""
    one = sender()
    one.receive(b"\xc1 nonsense", 0.0)

    assert one.state is State.HANDSHAKE


def busy(seconds: float, size: int, every: float = 0.125) -> list[float]:
    """When a stream that sends frames of ``size`` bytes is told so, if it is asked 20 times a second.

    After that time it is quiet for a second.
    """
    receiver = Receiver(1)
    receiver.receive(b"p", Hello(VERSION, "s", 1, 1, 1, [ENGINE]), 0.0)
    told: list[float] = []
    sent = 0
    for tick in range(int(20 * (seconds + 1))):
        now = tick / 20
        while now < seconds and sent * every <= now:
            sent += 1
            receiver.receive(b"p", Batch(1, sent, [msgspec.Raw(item(1))]), now, size)
        for _, ack in receiver.acks(now):
            assert isinstance(ack, Ack)
            assert ack.applied == sent
            told.append(now)
    assert receiver.streams["s"].acked == (sent, sent, None)
    return told


def test_a_stream_that_sends_a_little_is_told_once_a_second() -> None:
    """And soon after it has become quiet: senders that close wait for that."""
    told = busy(9.5, 500)

    assert len(told) == 10
    assert all(0.9 < b - a < 1.1 for a, b in pairwise(told[:-1]))
    assert told[-1] <= 9.5 + 1.2 * ACK_INTERVAL


def test_a_stream_that_sends_much_is_told_four_times_a_second() -> None:
    """So that what it has sent ahead stays far below what it may."""
    told = busy(10.0, ACK_BYTES)

    assert len(told) >= 36
    assert all(b - a < 1.3 * ACK_INTERVAL for a, b in pairwise(told[:-1]))


def test_a_stream_that_sends_seldom_is_told_each_time() -> None:
    """A quarter of a second after what it sent."""
    assert len(busy(10.0, 500, every=1.0)) == 10


@pytest.mark.parametrize("seed", range(20))
def test_no_sender_waits_for_its_acknowledgement_until_it_greets_again(seed: int) -> None:
    """Whatever its ring holds, how much it sends and how often, and how late what it sent is safe.

    Nothing is folded where the ring has room for what comes in as long as that takes.
    """
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
    """Which connections were told which sample rate."""
    return [(peer, reply.kv_sample_rate) for peer, reply in replies if isinstance(reply, Ack)]


def test_every_acknowledgement_carries_the_sample_rate() -> None:
    """That of the hello, of items and of the goodbye; the sender keeps it."""
    receiver = Receiver(1)
    receiver.kv_sample_rate = 0.25
    hello = Hello(VERSION, "s", 1, 1, 1, [ENGINE])

    assert rates(receiver.receive(b"p", hello, 0.0).replies) == [(b"p", 0.25)]
    receiver.receive(b"p", Batch(1, 1, [msgspec.Raw(item(1))]), 1.0)
    assert rates(receiver.acks(1.0)) == [(b"p", 0.25)]
    assert rates(receiver.receive(b"p", Bye(1, 1), 2.0).replies) == [(b"p", 0.25)]

    link = Link(sender(), receiver)
    assert link.sender.kv_sample_rate is None
    link.run(3.0)
    assert link.sender.kv_sample_rate == 0.25


def test_another_sample_rate_is_told_at_once_to_open_streams() -> None:
    """Though nothing new was applied and an acknowledgement went out just now; but only once."""
    receiver = Receiver(1)
    links = [Link(Sender(name, number, [ENGINE], Random(1), ItemFolder()), receiver, name.encode())
             for number, name in enumerate(["a", "b", "left"], 1)]  # fmt: skip
    for link in links:
        link.run(0.0)
    receiver.receive(b"left", Bye(3, 0), 0.0)
    assert receiver.acks(0.0) == []

    receiver.kv_sample_rate = 0.0
    told = receiver.acks(0.0)
    for _, ack in told:
        links[0].sender.receive(encode(ack), 0.0)

    assert sorted(rates(told)) == [(b"a", 0.0), (b"b", 0.0)]
    assert links[0].sender.kv_sample_rate == 0.0
    assert links[0].sender.state is State.STREAMING
    receiver.kv_sample_rate = 0.0
    assert receiver.acks(1000.0) == []


def test_a_sample_rate_outlives_the_connection() -> None:
    """While the sender greets anew it goes on with what it was told."""
    receiver = Receiver(1)
    receiver.kv_sample_rate = 0.5
    link = Link(sender(), receiver)
    link.run(0.0)
    link.sender.reopened()

    assert link.sender.state is State.HANDSHAKE
    assert link.sender.kv_sample_rate == 0.5


class OldAck(msgspec.Struct, array_like=True, gc=False, tag="A"):
    """An acknowledgement as it was before it carried settings."""

    version: int
    boot: int
    incarnation: int
    nonce: int | None
    applied: int
    durable: int


def test_an_older_sender_understands_the_acknowledgement() -> None:
    """It passes over the field that it does not know."""
    new = encode(Ack(VERSION, 1, 7, 2, 5, 4, 0.25))

    assert msgspec.msgpack.decode(new, type=OldAck) == OldAck(VERSION, 1, 7, 2, 5, 4)


def test_an_older_exporter_says_nothing_about_samples() -> None:
    """What the last one asked for ends with its successor's answer; within a life it stays."""
    one = sender()
    receiver = Receiver(1)
    receiver.kv_sample_rate = 0.5
    Link(one, receiver).run(0.0)
    one.receive(msgspec.msgpack.encode(OldAck(VERSION, 1, 7, None, 0, 0)), 0.0)
    assert one.kv_sample_rate == 0.5

    one.reopened()
    (hello,) = (decode_from_sender(frame) for frame in frames(one, 1.0))
    assert isinstance(hello, Hello)
    one.receive(msgspec.msgpack.encode(OldAck(VERSION, 2, 7, hello.nonce, 0, 0)), 1.0)

    assert one.state is State.STREAMING
    assert one.kv_sample_rate is None


class Network(RuleBasedStateMachine):
    """Frames are lost with their connection, repeated, delayed; exporters restart.

    Within one exporter's life nothing is lost or doubled; and what no exporter
    acknowledged reaches the next one.
    """

    @initialize()
    def begin(self) -> None:
        """One sender, one exporter, nothing on the way."""
        self.now = 0.0
        self.pushed = 0
        self.boot = 0
        self.sender = sender(ring_bytes=1 << 20)
        self.peer = 0
        self.to_exporter: list[tuple[bytes, bytes]] = []
        self.to_sender: list[tuple[bytes, bytes]] = []
        self.rate = 0.01
        self.start()

    def start(self) -> None:
        """Another exporter process, which knows nothing but its configuration."""
        self.boot += 1
        self.receiver = Receiver(self.boot)
        self.receiver.kv_sample_rate = self.rate
        self.applied: list[int] = []
        self.acknowledged = self.sender._applied

    @property
    def connection(self) -> bytes:
        """Whose frames arrive: the socket that is open now."""
        return str(self.peer).encode()

    @rule(count=st.integers(1, 40))
    def push(self, count: int) -> None:
        """The engine pushes."""
        self.sender.add([item(self.pushed + n) for n in range(1, count + 1)])
        self.pushed += count

    @rule(seconds=st.sampled_from([0.01, 0.3, 4.0]))
    def pass_time(self, seconds: float) -> None:
        """Time passes, and the publisher looks at what there is to do."""
        self.now += seconds
        self.turn()

    def turn(self) -> None:
        """One round of the publisher's loop."""
        if self.sender.reopen:
            self.peer += 1
            self.to_exporter, self.to_sender = [], []
            self.sender.reopened()
        for frame in frames(self.sender, self.now):
            self.to_exporter.append((self.connection, frame))

    @precondition(lambda self: self.to_exporter)
    @rule(again=st.booleans())
    def deliver(self, again: bool) -> None:
        """The exporter reads a frame, perhaps one that it will read again."""
        peer, frame = self.to_exporter[0] if again else self.to_exporter.pop(0)
        received = self.receiver.receive(peer, decode_from_sender(frame), self.now)
        self.applied += [msgspec.msgpack.decode(raw) for raw in received.items]
        self.to_sender += [(to, encode(reply)) for to, reply in received.replies]

    @rule()
    def acknowledge(self) -> None:
        """The exporter sends what acknowledgements are due."""
        acks = self.receiver.acks(self.now)
        self.to_sender += [(to, encode(ack)) for to, ack in acks]

    @precondition(lambda self: self.to_sender)
    @rule(lost=st.booleans())
    def answer(self, lost: bool) -> None:
        """An answer arrives, or does not."""
        peer, frame = self.to_sender.pop(0)
        if not lost and peer == self.connection:
            self.sender.receive(frame, self.now)
            self.turn()

    @rule(rate=st.sampled_from([0.0, 0.01, 0.5]))
    def adjust(self, rate: float) -> None:
        """The exporter is told another sample rate."""
        self.rate = self.receiver.kv_sample_rate = rate

    @rule()
    def cut(self) -> None:
        """The connection breaks with all that was on the way."""
        self.to_exporter, self.to_sender = [], []
        self.sender.reopen = True

    @rule()
    def restart(self) -> None:
        """The exporter dies with what it had not acknowledged."""
        self.to_exporter, self.to_sender = [], []
        self.start()

    @invariant()
    def applied_in_order_without_gap(self) -> None:
        """An exporter applies consecutive items, each once."""
        if self.applied:
            first = self.applied[0]
            assert list(range(first, first + len(self.applied))) == self.applied
            assert first <= self.acknowledged + 1

    @invariant()
    def acknowledged_only_what_was_applied(self) -> None:
        """The sender never believes more to be applied than was."""
        assert self.sender._applied <= self.pushed
        if self.sender.boot == self.boot and self.applied:
            assert self.sender._applied <= self.applied[-1]

    def teardown(self) -> None:
        """When the faults end, everything pushed is applied, and settings are known."""
        # Where nothing flows an answer that is lost is not missed: the next items bring it.
        self.push(1)
        for _ in range(60):
            self.now += 0.3
            self.turn()
            while self.to_exporter:
                self.deliver(again=False)
            self.acknowledge()
            while self.to_sender:
                self.answer(lost=False)
        assert self.sender.drained
        assert self.sender.dropped == 0
        assert self.sender.kv_sample_rate == self.rate
        if self.applied:
            assert self.applied[-1] == self.pushed


Network.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNetwork = Network.TestCase


def test_answers_are_decoded_by_kind() -> None:
    """Ack and Nack are what an exporter says."""
    assert isinstance(decode_from_exporter(encode(Nack(1, 2, "need_hello"))), Nack)
