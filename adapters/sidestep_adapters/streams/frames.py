"""Bounded reading of multipart messages from untrusted peers: few frames, of limited size."""

from __future__ import annotations

import zmq

from sidestep.transport.peer_limits import options_for

MAX_FRAMES = 5
"""Maximum frames of a message; a replay response has four."""
SKIP_FRAMES = 1000
"""Frames of a message with too many that are skipped in one call."""
MAX_BYTES = 16 << 20
"""Maximum bytes of a frame; a peer that sends a longer one loses its connection."""

_OPTIONS = (
    *options_for(MAX_BYTES),
    (zmq.RECONNECT_IVL, 100),
    (zmq.RECONNECT_IVL_MAX, 2000),
)

Socket = zmq.Socket[bytes]


class SharedContext:
    """The ZeroMQ context of several sockets, which ends with the last of its users.

    libzmq frees what waits in a closed socket some time later, but before the context ends. The watchdog
    must not take it for the exporter's own state.
    """

    def __init__(self) -> None:
        self._users = 0

    def acquire(self) -> zmq.Context[Socket]:
        """Return the context for a further user; a new one for the first."""
        if not self._users:
            self.current: zmq.Context[Socket] = zmq.Context()
        self._users += 1
        return self.current

    def release(self) -> None:
        """End the context if this user, whose sockets are closed, was the last one."""
        self._users -= 1
        if not self._users:
            self.current.term()


def make_socket(context: zmq.Context[Socket], kind: int, endpoint: str, *, ipv6: bool) -> Socket:
    """Return a socket of ``kind`` that connects to an engine.

    Of a name libzmq tries a single address: without ``ipv6`` one of IPv4, with it one of IPv6 if there is any.
    """
    socket = context.socket(kind)
    for option, value in (*_OPTIONS, (zmq.IPV6, int(ipv6 or "[" in endpoint))):
        socket.setsockopt(option, value)
    return socket


class Frames:
    """Reads messages from one socket.

    Attributes:
        skipping: Whether the next frame belongs to a message with too many frames.
    """

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        self.skipping = False

    def receive(self) -> list[bytes] | None:
        """Return the next message, or None; an empty list is a part of a message with too many frames."""
        frames: list[bytes] = []
        limit = SKIP_FRAMES if self.skipping else MAX_FRAMES
        try:
            for _ in range(limit):
                frame = self.socket.recv(zmq.NOBLOCK)
                if not self.skipping:
                    frames.append(frame)
                if not self.socket.getsockopt(zmq.RCVMORE):
                    self.skipping = False
                    return frames
        except zmq.Again:
            # ZeroMQ delivers a message as a whole or not at all.
            return None
        self.skipping = True
        return []
