"""A ZMTP 3 peer over raw sockets: it shakes hands correctly, then sends any bytes."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

MORE, LONG, COMMAND = 1, 2, 4
TIMEOUT = 10.0

Address = Path | tuple[str, int]
"""A Unix socket's path, or host and port."""


def greeting(mechanism: bytes = b"NULL", version: bytes = b"\x03\x00", *, server: int = 0) -> bytes:
    """Return the 64 bytes that open a connection."""
    return (
        b"\xff"
        + bytes(8)
        + b"\x7f"
        + version
        + mechanism.ljust(20, b"\0")
        + bytes([server])
        + bytes(31)
    )


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return a message frame, or a command with ``COMMAND`` in ``flags``."""
    if len(body) > 255 or flags & LONG:
        return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


def command(name: bytes, data: bytes = b"") -> bytes:
    """Return a command frame."""
    return frame(bytes([len(name)]) + name + data, COMMAND)


def ping(context: bytes = b"", ttl: int = 0) -> bytes:
    """Return a heartbeat that requires an answer."""
    return command(b"PING", struct.pack(">H", ttl) + context)


def metadata(name: bytes, value: bytes) -> bytes:
    """Return a property of a READY command."""
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def ready(kind: bytes, identity: bytes | None = None) -> bytes:
    """Return the READY command of a socket type."""
    data = metadata(b"Socket-Type", kind)
    return command(b"READY", data if identity is None else data + metadata(b"Identity", identity))


def dial(address: Address) -> socket.socket:
    """Return a connection on which nothing was sent."""
    peer = socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET)
    peer.settimeout(TIMEOUT)
    try:
        peer.connect(str(address) if isinstance(address, Path) else address)
    except OSError:
        peer.close()
        raise
    return peer


def connect(
    address: Address, identity: bytes | None = b"", kind: bytes = b"DEALER"
) -> socket.socket:
    """Return a connection after its handshake.

    Raises:
        OSError: The other end refuses, or does not answer.
    """
    peer = dial(address)
    try:
        peer.sendall(greeting() + ready(kind, identity))
        _await_ready(peer)
    except OSError:
        peer.close()
        raise
    return peer


def listen(address: Address) -> socket.socket:
    """Return a listening socket in place of an exporter's."""
    door = socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET)
    if isinstance(address, Path):
        address.unlink(missing_ok=True)
        door.bind(str(address))
    else:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(address)
    door.listen(128)
    return door


def welcome(peer: socket.socket, kind: bytes = b"ROUTER") -> None:
    """Shake hands as a socket of ``kind``, by default an exporter's, over an accepted connection.

    Raises:
        OSError: The other end leaves, or does not answer.
    """
    peer.settimeout(TIMEOUT)
    peer.sendall(greeting())
    peer.sendall(ready(kind, b""))
    _await_ready(peer)


def read_message(peer: socket.socket) -> bytes:
    """Return the body of the next frame that is not a command.

    Raises:
        OSError: The other end leaves, or sends nothing in time.
    """
    while True:
        flags, size = _exactly(peer, 2)
        if flags & LONG:
            size = int.from_bytes(bytes([size]) + _exactly(peer, 7), "big")
        body = _exactly(peer, size)
        if not flags & COMMAND:
            return body


def reset(peer: socket.socket) -> None:
    """Close with a reset.

    A Unix socket resets if it is closed while bytes are unread.
    """
    if peer.family == socket.AF_INET:
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def send_some(peer: socket.socket, data: bytes, seconds: float = 1.0) -> None:
    """Send as much as the other end accepts within ``seconds``."""
    peer.settimeout(seconds)
    with contextlib.suppress(OSError):
        peer.sendall(data)
    with contextlib.suppress(OSError):
        peer.settimeout(TIMEOUT)


def noise(size: int) -> bytes:
    """Return random bytes."""
    return os.urandom(size)


def _await_ready(peer: socket.socket) -> None:
    # No more than that: a Hello may follow in the same packet.
    _exactly(peer, len(greeting()))
    body = b""
    while b"READY" not in body:
        _, size = _exactly(peer, 2)
        body = _exactly(peer, size)


def _exactly(peer: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        received += peer.recv(size - len(received)) or closed()
    return received


def closed() -> bytes:
    """Raise, because the other end has closed the connection."""
    raise ConnectionResetError
