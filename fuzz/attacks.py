"""Hostile connections to an exporter, one function each."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Mapping

from fuzz import zmtp_peer as zmtp
from fuzz.zmtp_peer import Address

Attack = Callable[[Address, int], None]
"""Makes one hostile connection; the number tells attacks of one kind apart."""

RECEIVE_MARK = 1000
"""libzmq's default limit on waiting messages, at which it stops reading."""
HELD: list[socket.socket] = []
"""Connections that attacks leave open."""
MAX_HELD = 100


def tiny_frames_with_pings(address: Address, number: int) -> None:
    """Send more tiny messages than libzmq queues, with heartbeats among them, and reset."""
    with contextlib.closing(zmtp.connect(address)) as peer:
        burst = zmtp.frame(b"xyz") * (20 + number % 7) + zmtp.ping(b"1234", ttl=number % 3)
        zmtp.send_some(peer, burst * (RECEIVE_MARK // 4))
        zmtp.reset(peer)


def tiny_frames(address: Address, number: int) -> None:
    """Send more tiny messages than libzmq queues, and reset."""
    with contextlib.closing(zmtp.connect(address)) as peer:
        zmtp.send_some(peer, zmtp.frame(b"\xc0" * (number % 4)) * (3 * RECEIVE_MARK))
        zmtp.reset(peer)


def never_reads(address: Address, number: int) -> None:
    """Send messages that require answers, read no answer, and keep the connection open."""
    peer = zmtp.connect(address)
    zmtp.send_some(peer, (zmtp.ping(b"x" * 16) + zmtp.frame(b"\x93\xa1B\x01\x01")) * 300)
    HELD.append(peer)
    if len(HELD) > MAX_HELD:
        zmtp.reset(HELD.pop(number % len(HELD)))


def parts_without_end(address: Address, number: int) -> None:
    """Send a message of many frames that is never finished, and reset."""
    with contextlib.closing(zmtp.connect(address)) as peer:
        part = zmtp.frame(bytes(1 << (number % 14)), zmtp.MORE)
        zmtp.send_some(peer, part * 500)
        zmtp.reset(peer)


def half_a_handshake(address: Address, number: int) -> None:
    """Reset in the middle of the greeting or of the READY command."""
    whole = zmtp.greeting() + zmtp.ready(b"DEALER", b"")
    with contextlib.closing(zmtp.dial(address)) as peer:
        zmtp.send_some(peer, whole[: number * 7 % len(whole)])
        zmtp.reset(peer)


def old_versions(address: Address, number: int) -> None:
    """Shake hands as ZMTP 1.0, 2.0 or an unknown version does, with a routing id, and reset."""
    identity = b"i" * (number % 5)
    v1 = bytes([len(identity) + 1, 0]) + identity
    v2 = b"\xff" + bytes(8) + b"\x7f\x01\x05\x00" + bytes([len(identity)]) + identity
    v9 = zmtp.greeting(version=b"\x09\x00") + zmtp.ready(b"DEALER")
    opening = (v1, v2, v9)[number % 3]
    with contextlib.closing(zmtp.dial(address)) as peer:
        zmtp.send_some(peer, opening[: len(opening) - number % 2])
        zmtp.send_some(peer, zmtp.frame(b"xyz") * RECEIVE_MARK)
        zmtp.reset(peer)


def bad_metadata(address: Address, number: int) -> None:
    """Send a READY command with invalid properties, or of a socket type that cannot connect."""
    bodies = (
        b"",
        b"\xff",
        b"\x00" * 40,
        b"\x0bSocket-Type\xff\xff\xff\xff",
        zmtp.metadata(b"Socket-Type", b"x" * 300),
        zmtp.metadata(b"Socket-Type", b"PUB"),
        zmtp.metadata(b"Socket-Type", b"DEALER") + zmtp.metadata(b"Identity", b"i" * 300),
        zmtp.metadata(b"Socket-Type", b"DEALER") * 20,
        zmtp.noise(number % 200),
    )
    with contextlib.closing(zmtp.dial(address)) as peer:
        zmtp.send_some(peer, zmtp.greeting() + zmtp.command(b"READY", bodies[number % len(bodies)]))
        zmtp.send_some(peer, zmtp.frame(b"xyz") * 100)
        zmtp.reset(peer)


def bad_commands(address: Address, number: int) -> None:
    """Send commands that are cut short, too long, unknown or out of place."""
    commands = (
        zmtp.frame(b"", zmtp.COMMAND),
        zmtp.frame(b"\xff", zmtp.COMMAND),
        zmtp.command(b"PING"),
        zmtp.command(b"PING", b"\x00"),
        zmtp.ping(b"c" * 60_000, ttl=1),
        zmtp.command(b"PONG", b"x" * 100),
        zmtp.command(b"ERROR", b"\xff"),
        zmtp.command(b"SUBSCRIBE", b"topic") * 10,
        zmtp.command(b"CANCEL"),
        zmtp.command(b"READY"),
        zmtp.frame(b"\x04PING\x00\x01", zmtp.COMMAND | zmtp.MORE),
        zmtp.frame(b"x", 0xF8),
        zmtp.frame(zmtp.noise(50), zmtp.COMMAND),
    )
    with contextlib.closing(zmtp.connect(address)) as peer:
        sent = commands[number % len(commands)] + zmtp.frame(b"xyz") * 10
        zmtp.send_some(peer, sent * (RECEIVE_MARK // 5))
        zmtp.reset(peer)


def taken_routing_ids(address: Address, number: int) -> None:
    """Choose a routing id that another connection has, or that looks like one of libzmq's own."""
    ids = (b"same", b"\0" + struct.pack(">I", number), b"\0" * 5, b"\0", b"i" * 255)
    identity = ids[number % len(ids)]
    peers = []
    try:
        for _ in range(3):
            peer = zmtp.connect(address, identity)
            peers.append(peer)
            zmtp.send_some(peer, zmtp.frame(b"") * 3 + zmtp.frame(b"xyz") * 50)
    finally:
        for peer in peers:
            zmtp.reset(peer)


def announced_lengths(address: Address, number: int) -> None:
    """Announce a frame that is too long, or longer than there is memory."""
    lengths = (1 << 21, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
    with contextlib.closing(zmtp.connect(address)) as peer:
        size = struct.pack(">Q", lengths[number % len(lengths)])
        zmtp.send_some(peer, bytes([zmtp.LONG | number % 2]) + size + bytes(100))
        zmtp.reset(peer)


def noise_with_keys(address: Address, number: int) -> None:
    """Begin a handshake as a peer with a CURVE key does, and continue with random bytes."""
    size = (0, 8, 199, 200, 257, 300)[number % 6]
    name = (b"HELLO", b"INITIATE", b"WELCOME", b"READY", b"MESSAGE", b"ERROR")[number // 6 % 6]
    # A HELLO as it should be, but for a key that nobody has.
    hello = bytes([1, 0]) + bytes(72) + zmtp.noise(32) + struct.pack(">Q", 1) + zmtp.noise(80)
    with contextlib.closing(zmtp.dial(address)) as peer:
        zmtp.send_some(peer, zmtp.greeting(b"CURVE"))
        zmtp.send_some(peer, zmtp.command(b"HELLO", hello) if number % 2 else b"")
        zmtp.send_some(peer, zmtp.command(name, zmtp.noise(size)) * 3)
        zmtp.reset(peer)


def connect_and_leave(address: Address, number: int) -> None:
    """Connect, and close or reset at once."""
    peer = zmtp.dial(address)
    if number % 2:
        peer.sendall(b"\xff")
        zmtp.reset(peer)
    peer.close()


ATTACKS: Mapping[str, Attack] = {
    attack.__name__: attack
    for attack in (
        tiny_frames_with_pings,
        tiny_frames,
        never_reads,
        parts_without_end,
        half_a_handshake,
        old_versions,
        bad_metadata,
        bad_commands,
        taken_routing_ids,
        announced_lengths,
        noise_with_keys,
        connect_and_leave,
    )
}


def attack(name: str, address: Address, connections: int) -> int:
    """Make ``connections`` hostile connections of the kind ``name``; return how many succeeded.

    An exporter under attack may refuse connections for a second, since it binds again.
    """
    made = 0
    deadline = time.monotonic() + 0.5 * connections + 10
    for number in range(connections):
        while time.monotonic() < deadline:
            try:
                ATTACKS[name](address, number)
            except (ConnectionRefusedError, FileNotFoundError):
                time.sleep(0.05)
            except OSError:
                # The exporter cut it off, which is an end that it may have.
                made += 1
                break
            else:
                made += 1
                break
    while HELD:
        zmtp.reset(HELD.pop())
    return made
