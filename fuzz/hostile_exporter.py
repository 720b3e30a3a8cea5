"""A hostile exporter: it accepts connections of engines, answers their Hello, and then misbehaves."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

from fuzz import zmtp_peer as zmtp
from fuzz.zmtp_peer import Address
from sidestep.errors import WireError
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import Ack, Hello, Nack, Settings, decode_from_sender, encode

Behaviour = Callable[[socket.socket, int], None]
"""Behaviour on one connection; the number distinguishes connections."""

ENDLESS_BYTES = 64 << 20
"""Bytes after which an endless message ends, unless the engine has ended the connection."""


def hello_of(peer: socket.socket) -> Hello:
    """Return the Hello that comes over a connection.

    Raises:
        OSError: No Hello comes.
    """
    while True:
        with contextlib.suppress(WireError):
            message = decode_from_sender(zmtp.read_message(peer))
            if isinstance(message, Hello):
                return message


def answered(peer: socket.socket, number: int = 1, settings: Settings | None = None) -> Ack:
    """Shake hands, answer the Hello, and return that answer."""
    zmtp.welcome(peer)
    hello = hello_of(peer)
    ack = Ack(VERSION, number, hello.incarnation, hello.nonce, 0, 0, None, settings)
    peer.sendall(zmtp.frame(encode(ack)))
    return ack


def tiny_frames_with_pings(peer: socket.socket, number: int) -> None:
    """Send thousands of tiny messages with heartbeats among them, and reset."""
    zmtp.welcome(peer)
    zmtp.send_some(peer, (zmtp.frame(b"xyz") * (20 + number % 9) + zmtp.ping(b"1234")) * 400)


def parts_without_end(peer: socket.socket, number: int) -> None:
    """Answer the Hello, then send a message of many frames that is never finished."""
    answered(peer, number)
    part = zmtp.frame(bytes(60_000), zmtp.MORE)
    for _ in range(ENDLESS_BYTES // len(part)):
        peer.sendall(part)


def acknowledgements_without_end(peer: socket.socket, number: int) -> None:
    """Answer the Hello, then acknowledge as fast as the connection takes it."""
    ack = answered(peer, number)
    ack.nonce = None
    burst = zmtp.frame(encode(ack)) * 1000
    for _ in range(ENDLESS_BYTES // len(burst)):
        peer.sendall(burst)


def pings_without_end(peer: socket.socket, number: int) -> None:
    """Answer the Hello, then ask for heartbeats, and read no answer."""
    answered(peer, number)
    burst = zmtp.ping(b"x" * 16, ttl=number % 3) * 1000
    for _ in range(ENDLESS_BYTES // len(burst)):
        peer.sendall(burst)


def long_frames(peer: socket.socket, number: int) -> None:
    """Answer the Hello, then send a frame longer than any answer, or announce one."""
    answered(peer, number)
    size = (1 << 17, 1 << 24, 1 << 40, (1 << 64) - 1)[number % 4]
    head = bytes([zmtp.LONG]) + size.to_bytes(8, "big")
    peer.sendall(head + bytes(min(size, 1 << 24)))


def refuses_each_hello(peer: socket.socket, number: int) -> None:
    """Answer each Hello with need_hello, or with a wrong version."""
    zmtp.welcome(peer)
    code = ("need_hello", "version", "over_limit", "bad_schema", "unauthorised")[number % 5]
    while True:
        hello = hello_of(peer)
        nack = Nack(number, hello.incarnation, code, "x" * 200)
        peer.sendall(zmtp.frame(encode(nack)))


def a_new_process_each_time(peer: socket.socket, number: int) -> None:
    """Acknowledge items that were never sent, each time as another boot and with unusual settings."""
    bounds = [float(n) for n in range(number % 250)] or [1.0]
    settings = Settings(buckets={f"family{n}": bounds for n in range(number % 20)})
    ack = answered(peer, number, settings)
    ack.nonce = None
    for boot in itertools.count(number):
        ack.boot = boot
        ack.applied = ack.durable = 1 << (boot % 62)
        peer.sendall(zmtp.frame(encode(ack)))
        peer.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            peer.recv(1 << 16) or zmtp.closed()


def noise(peer: socket.socket, number: int) -> None:
    """Shake hands, then send random bytes."""
    zmtp.welcome(peer)
    peer.sendall(zmtp.frame(zmtp.noise(number % 250)) * 20 + zmtp.noise(1000))


def bad_greetings(peer: socket.socket, number: int) -> None:
    """Greet with HTTP, an old ZMTP, another mechanism, or half a greeting."""
    greetings = (
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x01\x00",
        b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00",
        zmtp.greeting(b"CURVE"),
        zmtp.greeting(b"PLAIN", server=1),
        zmtp.greeting() + zmtp.command(b"ERROR", b"\x03no!"),
        zmtp.greeting() + zmtp.command(b"READY") * 50,
        zmtp.greeting() + zmtp.frame(b"too early"),
        zmtp.greeting()[: number % 64],
        zmtp.noise(number % 300),
        b"",
    )
    zmtp.send_some(peer, greetings[number % len(greetings)])


def never_reads(peer: socket.socket, number: int) -> None:  # noqa: ARG001 - as all behaviours
    """Answer the Hello, then read nothing until the engine leaves."""
    answered(peer)
    peer.settimeout(2.0)
    with contextlib.suppress(TimeoutError):
        peer.recv(1, socket.MSG_PEEK)
        threading.Event().wait(0.5)


BEHAVIOURS: Mapping[str, Behaviour] = {
    behaviour.__name__: behaviour
    for behaviour in (
        tiny_frames_with_pings,
        parts_without_end,
        acknowledgements_without_end,
        pings_without_end,
        long_frames,
        refuses_each_hello,
        a_new_process_each_time,
        noise,
        bad_greetings,
        never_reads,
    )
}


class HostileExporter:
    """Listener in place of an exporter.

    Args:
        address: Address to listen at; port 0 of a host takes a free port.
        behaviour: Behaviour on each connection.

    Attributes:
        connections: Number of accepted connections.
    """

    def __init__(self, address: Address, behaviour: Behaviour) -> None:
        self.connections = 0
        self._behaviour = behaviour
        self._door = zmtp.listen(address)
        self._address = address
        self._threads: list[threading.Thread] = []
        self._peers: list[socket.socket] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Endpoint for engines."""
        if isinstance(self._address, tuple):
            host, port = self._door.getsockname()
            return f"tcp://{host}:{port}"
        return f"ipc://{self._address}"

    def close(self) -> None:
        """Stop, and reset all connections."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._thread.join()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stopped:
            try:
                peer, _ = self._door.accept()
            except OSError:
                return
            self.connections += 1
            self._peers.append(peer)
            thread = threading.Thread(target=self._serve, args=(peer, self.connections))
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            self._behaviour(peer, number)
        zmtp.reset(peer)


@contextlib.contextmanager
def hostile_exporter(address: Address, behaviour: Behaviour) -> Iterator[HostileExporter]:
    """Run a hostile exporter, and close it at the end."""
    made = HostileExporter(address, behaviour)
    try:
        yield made
    finally:
        made.close()
