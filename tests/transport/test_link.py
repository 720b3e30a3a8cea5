"""A sender's connection to its exporter: bytes, failures and pauses."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from fuzz import zmtp_peer as raw
from fuzz.hostile_exporter import hostile_exporter
from hypothesis import given
from hypothesis import strategies as st

from key_ring import Ring
from sidestep.errors import ConfigError, WireError
from sidestep.transport import keys
from sidestep.transport.curve_connection import CurveConnection
from sidestep.transport.keys import Keys
from sidestep.transport.link import LASTING, PENALTY, Link
from sidestep.transport.peer_limits import (
    FRAMES,
    MAX_ANSWER_BYTES,
)
from sidestep.transport.plain_connection import PlainConnection
from sidestep.transport.zmtp import Parser

PATIENCE = 10.0
ANSWERS = [b"", b"a", b"b" * 255, b"c" * 256, b"d" * MAX_ANSWER_BYTES]
SPOKEN = (
    raw.greeting()
    + raw.ready(b"ROUTER", b"")
    + raw.ping(b"context")
    + b"".join(raw.frame(answer) for answer in ANSWERS)
)


def until(condition: Callable[[], object]) -> None:
    """Wait for ``condition``."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def opened(endpoint: str) -> PlainConnection:
    """Return a connection that is ready or has ended."""
    connection = PlainConnection(endpoint, time.monotonic())

    def advanced() -> bool:
        connection.advance(time.monotonic())
        return connection.ready or bool(connection.ended)

    until(advanced)
    return connection


def keyed(endpoint: str, ring: Ring) -> CurveConnection:
    """Return a connection with keys."""
    secret = keys.read_secret(ring.engine("engine"))
    server = keys.read_public(ring.public).text.encode()
    return CurveConnection(endpoint, Keys(server, keys.public_of(secret), secret), time.monotonic())


@pytest.fixture(params=["ipc", "tcp", "tcp6"])
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    """A ROUTER of libzmq, at one of the kinds of endpoint."""
    endpoint = {
        "ipc": f"ipc://{tmp_path}/r",
        "tcp": "tcp://127.0.0.1:*",
        "tcp6": "tcp://[::1]:*",
    }[request.param]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as made:
        made.linger = 0
        made.setsockopt(zmq.IPV6, 1)
        made.setsockopt(zmq.HEARTBEAT_IVL, 20)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, 200)
        made.bind(endpoint)
        yield made


def test_messages_of_all_sizes_pass_in_both_directions(router: zmq.Socket[bytes]) -> None:
    """The peer is a real libzmq, whose heartbeats are answered meanwhile."""
    connection = opened(router.getsockopt_string(zmq.LAST_ENDPOINT))
    sizes = [0, 1, 255, 256, 65536, 1 << 20]
    received = []
    for size in sizes:
        assert connection.send(bytes(size))
        while not router.poll(1):
            connection.advance(time.monotonic())
        peer, message = router.recv_multipart()
        received.append(len(message))
        router.send_multipart([peer, message[:1000]])
        answers: list[bytes] = []

        def answered(answers: list[bytes] = answers) -> list[bytes]:
            answer = connection.receive(time.monotonic())
            answers += [] if answer is None else [answer]
            return answers

        until(answered)
        assert answers == [message[:1000]]
    time_left = time.monotonic() + 0.5
    while time.monotonic() < time_left:
        connection.wait(0.01)
        assert connection.receive(time.monotonic()) is None

    assert received == sizes
    assert connection.ready
    connection.close()


@given(st.lists(st.integers(0, len(SPOKEN))))
def test_messages_are_parsed_however_the_bytes_are_cut(cuts: list[int]) -> None:
    """The result does not depend on the boundaries of reads."""
    parser = Parser()
    read = []
    places = [0, *sorted(cuts), len(SPOKEN)]
    for start, end in itertools.pairwise(places):
        parser.feed(SPOKEN[start:end])
        while (message := parser.next_message()) is not None:
            read.append(message)

    assert read == ANSWERS
    assert parser.frames == len(ANSWERS) + 2
    assert parser.replies.endswith(raw.command(b"PONG", b"context"))


@given(st.binary(), st.booleans())
def test_arbitrary_bytes_raise_only_wire_errors(noise: bytes, greets: bool) -> None:
    """Before the handshake and after it."""
    parser = Parser()
    parser.feed(raw.greeting() + raw.ready(b"ROUTER") if greets else b"")
    parser.feed(noise)
    with contextlib.suppress(WireError):
        while parser.next_message() is not None:
            pass


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"HTTP/1.1 400", "does not speak ZMTP"),
        (b"\xff" + bytes(8) + b"\x7f\x01\x05", "speaks ZMTP 1"),
        (raw.greeting(b"CURVE"), "asks for CURVE keys"),
        (raw.greeting() + raw.frame(b"x"), "before the end of the handshake"),
        (raw.greeting() + raw.command(b"ERROR", b"\x02no"), "refuses the handshake: 'no'"),
        (raw.greeting() + raw.ready(b"ROUTER") + raw.frame(b"x", raw.MORE), "several frames"),
        (raw.greeting() + raw.ready(b"ROUTER") + raw.frame(bytes(1 << 17)), "131072 bytes"),
        (raw.greeting() + raw.ready(b"ROUTER") + raw.frame(b"", 0x80), "frame flags 0x80"),
    ],
)
def test_a_connection_ends_with_the_reason(sent: bytes, why: str, tmp_path: Path) -> None:
    """A message that no exporter sends ends the connection, with the reason."""

    def speak(peer: socket.socket, _: int) -> None:
        peer.sendall(sent)
        peer.recv(1 << 16)

    with hostile_exporter(tmp_path / "x", speak) as one:
        connection = PlainConnection(one.endpoint, time.monotonic())
        until(lambda: connection.receive(time.monotonic()) or connection.ended)

    assert why in connection.ended


@pytest.mark.parametrize(
    "endpoint",
    ["http://x", "tcp://x", "tcp://x:port", "tcp://:1", "tcp://x:99999", "tcp://a..b:1"],
)
def test_a_malformed_endpoint_is_a_configuration_error(endpoint: str) -> None:
    """It would never connect."""
    with pytest.raises(ConfigError, match="endpoint"):
        PlainConnection(endpoint, 0.0)


def test_an_unanswered_handshake_times_out(tmp_path: Path) -> None:
    """The peer accepts and sends nothing."""
    with contextlib.closing(raw.listen(tmp_path / "x")):
        connection = PlainConnection(f"ipc://{tmp_path}/x", 0.0)
        connection.advance(1.0)
        assert not connection.ended
        connection.advance(10.0)

    assert "handshake" in connection.ended


@pytest.mark.parametrize("seconds", [-1e-9, -1e6])
@pytest.mark.parametrize("has_keys", [False, True], ids=["plain", "keys"])
def test_a_wait_in_the_past_ends_at_once(has_keys: bool, seconds: float, tmp_path: Path) -> None:
    """A negative time is endless for poll() and for libzmq's linger."""

    def stay(peer: socket.socket, _: int) -> None:
        if not has_keys:
            raw.welcome(peer)
        while peer.recv(1 << 16):
            pass

    with hostile_exporter(("127.0.0.1", 0), stay) as one:
        connection = keyed(one.endpoint, Ring(tmp_path)) if has_keys else opened(one.endpoint)

        def wait_and_close() -> None:
            connection.wait(seconds)
            connection.close(seconds)

        waiting = threading.Thread(target=wait_and_close, daemon=True)
        waiting.start()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()


def test_pauses_after_a_flood_grow_to_a_minute(tmp_path: Path) -> None:
    """Though the exporter answers every handshake."""

    def flood(peer: socket.socket, _: int) -> None:
        raw.welcome(peer)
        peer.sendall(raw.frame(b"x") * 3 * FRAMES)
        peer.recv(1)

    pauses = []
    with hostile_exporter(tmp_path / "x", flood) as hostile:
        link = Link(hostile.endpoint, random.Random(1))
        now = 0.0
        for _ in range(8):
            link.advance(now)

            def ended(now: float = now) -> bool:
                link.receive(now)
                return link.advance(now)

            until(ended)
            assert "more than an exporter should" in link.problem
            began, link.opened_at = now, -1.0
            while link.opened_at < 0:
                now += 0.1
                link.advance(now)
            pauses.append(now - began)
        link.close()

    assert pauses[0] < 2 * PENALTY[0]
    assert pauses[3] > 4 * pauses[0]
    assert PENALTY[1] / 2 < pauses[-1] < 2 * PENALTY[1]
    assert LASTING < pauses[-1]
