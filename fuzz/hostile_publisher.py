"""A hostile publisher of KV events: it accepts subscribers, and then misbehaves."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping

import msgspec

from fuzz import zmtp_peer as zmtp
from fuzz.hostile_exporter import Behaviour

BYTES = 15 << 20
"""Size of large parts, below the largest frame that a subscriber reads."""
BURST = 100


def message(seq: int, payload: bytes) -> bytes:
    """Return a published message."""
    number = seq.to_bytes(8, "big")
    parts = (zmtp.frame(b"kv", zmtp.MORE), zmtp.frame(number, zmtp.MORE), zmtp.frame(payload))
    return b"".join(parts)


def events(stamp: float) -> bytes:
    """Return a payload without events."""
    return msgspec.msgpack.encode([stamp, [], 0])


def restarts_without_end(peer: socket.socket, number: int) -> None:
    """Number messages as if each came from another process."""
    zmtp.welcome(peer, b"PUB")
    for start in itertools.count(number, BURST):
        stamps = range(start, start + BURST)
        peer.sendall(b"".join(message(3 + 2 * (stamp % 2), events(stamp)) for stamp in stamps))


def gaps_without_end(peer: socket.socket, number: int) -> None:
    """Leave out most sequence numbers."""
    zmtp.welcome(peer, b"PUB")
    for start in itertools.count(number, BURST):
        stamps = range(start, start + BURST)
        peer.sendall(b"".join(message(stamp * 7919, events(stamp)) for stamp in stamps))


def parts_without_end(peer: socket.socket, _: int) -> None:
    """Send a message of large parts that is never finished."""
    zmtp.welcome(peer, b"PUB")
    part = zmtp.frame(os.urandom(BYTES), zmtp.MORE)
    while True:
        peer.sendall(part)


def large_messages(peer: socket.socket, _: int) -> None:
    """Send messages that are larger than any engine's."""
    zmtp.welcome(peer, b"PUB")
    whole = message(5, os.urandom(BYTES))
    while True:
        peer.sendall(whole)


PUBLISHERS: Mapping[str, Behaviour] = {
    behaviour.__name__: behaviour
    for behaviour in (restarts_without_end, gaps_without_end, parts_without_end, large_messages)
}
