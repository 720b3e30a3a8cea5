"""The state of a libzmq socket that connects: whether it is connected, and why it is not."""

from __future__ import annotations

import contextlib
import errno
import socket as sockets
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from sidestep.transport.addresses import IPC
from sidestep.transport.connect_problems import HANDSHAKE_FAILED, KEYS, describe_number

Socket = zmq.Socket[bytes]

_FAILED = frozenset(
    {
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    }
)
_UNKNOWN_HOST = "the host's name is not known: check it"
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_DELAYED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ConnectionMonitor:
    """Monitor of a socket with one endpoint; make it before the socket connects, to see all events.

    Args:
        socket: The socket.
        endpoint: Where it connects to.
        remedy: What to check where the peer ends the handshake.

    Attributes:
        socket: The monitor's own socket.
        connected: Whether the handshake with the peer is complete.
        problem: Reason for which there is no connection; empty if none is known.
        descriptor: Of the connection that libzmq has or makes; -1 without one.
    """

    def __init__(self, socket: Socket, endpoint: str, remedy: str = KEYS) -> None:
        self.connected = False
        self.problem = ""
        self.descriptor = -1
        self._monitored = socket
        self._endpoint = endpoint
        self._remedy = remedy
        self._has_tried = False
        """True if libzmq has had an address to connect to since it last decided to wait."""
        self.socket: Socket = socket.get_monitor_socket(_EVENTS)

    def events(self) -> Iterator[int]:
        """Yield the events since the last call; each has updated the attributes when it is yielded."""
        while True:
            try:
                message = recv_monitor_message(self.socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._update(int(message["event"]), int(message["value"]))
            yield int(message["event"])

    def read(self) -> None:
        """Update the attributes."""
        for _ in self.events():
            pass

    def close(self) -> None:
        """End monitoring; call it before the socket is closed."""
        self._monitored.disable_monitor()
        self.socket.close(linger=0)

    def _update(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECT_RETRIED:
            if not self._has_tried:
                self.problem = _UNKNOWN_HOST
            self._has_tried = False
            return
        self._has_tried = True
        self.descriptor = value if event == zmq.EVENT_CONNECTED else self.descriptor
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected, self.problem = True, ""
        elif event in _FAILED or (event == zmq.EVENT_DISCONNECTED and not self.connected):
            # Not every failure of a handshake has an event of its own before the end.
            self.problem = f"{HANDSHAKE_FAILED}: {self._remedy}"
        if event == zmq.EVENT_DISCONNECTED:
            self.connected, self.descriptor = False, -1
        elif event == zmq.EVENT_CLOSED:
            self.problem = describe_number(_connect_error(self._endpoint))


def _connect_error(endpoint: str) -> int:
    """Return the error of a connection that libzmq could not make, which it does not name."""
    if not endpoint.startswith(IPC):
        return errno.ECONNREFUSED
    with contextlib.closing(sockets.socket(sockets.AF_UNIX)) as probe:
        probe.setblocking(False)
        try:
            return probe.connect_ex(endpoint.removeprefix(IPC)) or errno.ECONNREFUSED
        except OSError as error:
            # The path is too long.
            return error.errno or errno.EINVAL
