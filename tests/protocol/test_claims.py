"""Servers that claim one identity; time and the network are data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.engines.folding import ItemFolder
from sidestep.errors import WireError
from sidestep.protocol.claims import MAX_REPLICAS, Claims, Placement, numbered_id
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import (
    CORE,
    FRONT_END,
    FRONT_END_STATS,
    Bye,
    EngineInfo,
    Hello,
    decode_from_sender,
    encode,
)
from sidestep.protocol.receiver import Receiver
from sidestep.protocol.sender import Sender, State
from sidestep.protocol.stream import Stream, StreamState

TURN = 0.1
LONGEST = 30.0
"""Seconds in which all handshakes end: senders wait for up to 6 s between two Hellos."""


def info(role: str, *, tapped: bool = True, name: str = "host/m/0") -> EngineInfo:
    """Return the engine as a process with ``role`` describes it."""
    features = [FRONT_END_STATS] if tapped and role == CORE else []
    return EngineInfo(
        name, "vllm", {"engine": "0", "model_name": "m"}, features=features, role=role
    )


@dataclasses.dataclass
class Process:
    """One process of a server, and when it sends again; None: it has ended."""

    sender: Sender
    frozen_until: float = 0.0
    alive: bool = True


class Server:
    """A server with API servers, and with a core if it has a tap."""

    def __init__(self, number: int, streams: Sequence[str], key: str) -> None:
        tapped = "core" in streams
        self.processes = [
            Process(
                Sender(
                    f"host/m/engine0/{stream}",
                    100 * number + index,
                    [info(CORE if stream == "core" else FRONT_END if tapped else "")],
                    Random(100 * number + index),
                    ItemFolder(),
                    server=key,
                )
            )
            for index, stream in enumerate(streams)
        ]

    @property
    def alive(self) -> list[Process]:
        """Its processes that have not ended."""
        return [process for process in self.processes if process.alive]


class Network:
    """A receiver, and servers that send to it without loss."""

    def __init__(self) -> None:
        self.receiver = Receiver(1)
        self.servers: list[Server] = []
        self.now = 0.0

    def start(self, streams: Sequence[str]) -> Server:
        """Start a server."""
        number = len(self.servers) + 1
        self.servers.append(Server(number, streams, f"key {number}"))
        return self.servers[-1]

    def run(self, seconds: float) -> None:
        """Let all processes that are not frozen send and receive."""
        until = self.now + seconds
        while self.now < until:
            self.now += TURN
            for server in self.servers:
                for process in server.alive:
                    if self.now >= process.frozen_until:
                        self._turn(process.sender)

    def _turn(self, sender: Sender) -> None:
        if sender.reopen:
            sender.reopened()
        peer = str(sender.incarnation).encode()
        while (frame := sender.next_frame(self.now)) is not None:
            sender.sent(self.now)
            for _, reply in self.receiver.receive(
                peer, decode_from_sender(frame), self.now
            ).replies:
                sender.receive(encode(reply), self.now)

    def replicas(self, server: Server) -> set[int]:
        """Return the replica numbers of the processes of ``server``."""
        known = {stream.incarnation: stream for stream in self.receiver.streams.values()}
        assert all(each.sender.state is State.STREAMING for each in server.alive)
        return {known[each.sender.incarnation].replica for each in server.alive}


SERVERS = st.sampled_from(
    [("api0",), ("core",), ("api0", "core"), ("core", "api0"), ("api0", "api1", "core")]
)
STEPS = st.one_of(
    st.tuples(st.just("start"), SERVERS),
    st.tuples(st.sampled_from(["kill", "freeze", "restart"]), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.sampled_from([0.2, 1.5, 5.0, 20.0])),
)


@given(st.lists(STEPS, min_size=2, max_size=12))
def test_each_living_server_is_one_replica(steps: list[tuple[str, object]]) -> None:
    """Whatever starts, ends, freezes and restarts: its processes are together, and apart from others.

    A server that freezes has the processes of its successors: others would stay where they are.
    """
    network = Network()
    shapes = [which for what, which in steps if what == "start"]
    has_one_shape = any(what == "freeze" for what, _ in steps)
    for what, which in steps:
        alive = [server for server in network.servers if server.alive]
        if what == "start":
            network.start(shapes[0] if has_one_shape else which)  # type: ignore[arg-type]
        elif what == "wait":
            network.run(which)  # type: ignore[arg-type]
        elif alive:
            server = alive[which % len(alive)]  # type: ignore[operator]
            if what == "freeze":
                # One that freezes while its processes are being placed may be divided.
                network.run(LONGEST)
            for process in server.alive:
                process.alive = what == "freeze"
                process.frozen_until = network.now + 15.0
            if what == "restart":
                streams = [process.sender.stream.rpartition("/")[2] for process in server.processes]
                network.start(streams)
    network.run(15.0 + LONGEST)

    living = [server for server in network.servers if server.alive]
    numbers = [network.replicas(server) for server in living]
    assert all(len(found) == 1 for found in numbers)
    assert len({min(found) for found in numbers}) == len(living)


def test_a_restarted_server_continues_as_the_replica_that_ended() -> None:
    """While the others live, one place is free."""
    network = Network()
    for _ in range(4):
        network.start(("api0", "core"))
    network.run(LONGEST)
    for _ in range(3):
        ended = Random(4).choice([server for server in network.servers if server.alive])
        before = network.replicas(ended)
        for process in ended.alive:
            process.alive = False
        after = network.start(("core", "api0"))
        network.run(LONGEST)

        assert network.replicas(after) == before


def test_a_server_that_has_said_goodbye_makes_room_at_once() -> None:
    """Its successor waits for nothing."""
    receiver = Receiver(1)
    first = Hello(VERSION, "host/m/api0", 1, 1, 1, [info("")])
    receiver.receive(b"a", first, 0.0)
    receiver.receive(b"a", Bye(1, 0), 0.0)

    assert receiver.receive(b"b", Hello(VERSION, "host/m/api0", 2, 1, 1, [info("")]), 0.0).opened


def placed(claims: Claims, hello: Hello, times: Sequence[float]) -> Iterator[Placement | None]:
    """Yield where ``hello``, sent at ``times``, is placed."""
    for now in times:
        yield claims.place(hello, now)


def stream(seen_at: float, **more: object) -> Stream:
    """Return an open stream that was last seen at ``seen_at``."""
    made = Stream("host/m/api0", 1, engines=[info("")], state=StreamState.OPEN, seen_at=seen_at)
    for name, value in more.items():
        setattr(made, name, value)
    return made


HELLO = Hello(VERSION, "host/m/api0", 2, 1, 1, [info("")], "new")


def test_a_message_that_had_waited_in_a_socket_does_not_prove_life() -> None:
    """The exporter may have been stopped while a server was restarted."""
    before = stream(0.0, server="old")
    claims = Claims({before.id: before})
    assert claims.place(HELLO, 60.0) is None
    before.seen_at = 60.2

    *_, found = placed(claims, HELLO, [60.3, 62.0, 63.5])

    assert found is not None
    assert (found.replica, found.rival) == (1, None)


def test_a_core_whose_front_end_counts_the_same_is_refused() -> None:
    """And the other way round; with a front end that knows of the tap it is not."""
    for own, other in ((CORE, ""), ("", CORE)):
        before = stream(9.0, server="a", engines=[info(other)], id="host/m/other")
        claims = Claims({before.id: before})
        hello = Hello(VERSION, "host/m/own", 2, 1, 1, [info(own)], "a")
        assert claims.place(hello, 9.0) is None
        before.seen_at = 10.5
        with pytest.raises(WireError, match="id_conflict: another process of this engine counts"):
            claims.place(hello, 10.5)

    before.engines = [info(FRONT_END)]
    assert claims.place(Hello(VERSION, "host/m/own", 3, 1, 1, [info(CORE)], "a"), 11.0) is not None


def test_the_number_of_replicas_is_bounded() -> None:
    """A peer may claim one id as often as it likes."""
    streams = {}
    for replica in range(1, MAX_REPLICAS + 1):
        name = numbered_id("host/m/api0", replica)
        streams[name] = stream(9.0, id=name, incarnation=10 + replica, replica=replica)

    with pytest.raises(WireError, match="over_limit"):
        Claims(streams).place(HELLO, 0.0)
