"""Sockets of libzmq that connect, and the state of their connection."""

from __future__ import annotations

import contextlib
import errno
import socket as sockets
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from sidestep.transport.addresses import IPC
from sidestep.transport.connect_problems import HANDSHAKE_FAILED, KEYS, describe_number
from sidestep.transport.keys import Keys
from sidestep.transport.peer_limits import MAX_ANSWER_BYTES, options_for

Socket = zmq.Socket[bytes]

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_UNKNOWN_HOST = "the host's name is not known: check it"


def dealer(context: zmq.Context[Socket], keys: Keys | None) -> Socket:
    """Return a DEALER for a connection to an exporter, with CURVE if there are ``keys``."""
    socket = context.socket(zmq.DEALER)
    for option, value in options_for(MAX_ANSWER_BYTES):
        socket.setsockopt(option, value)
    if keys is not None:
        socket.curve_serverkey = keys.server
        socket.curve_publickey = keys.public
        socket.curve_secretkey = keys.secret
    return socket


class ConnectionMonitor:
    """Monitor of a socket with one endpoint; make it before the socket connects, to see all events.

    Args:
        remedy: Advice for the operator where the peer ends the handshake.

    Attributes:
        problem: Reason why there is no connection; empty if none is known.
        descriptor: File descriptor of libzmq's connection; -1 without a connection.
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
        self.socket: Socket = socket.get_monitor_socket()

    def events(self) -> Iterator[int]:
        """Update the attributes by each event since the last call, and yield the event."""
        while True:
            try:
                message = recv_monitor_message(self.socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._update(int(message["event"]), int(message["value"]))
            yield int(message["event"])

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
        elif event & _FAILED or (event == zmq.EVENT_DISCONNECTED and not self.connected):
            # Some failures of a handshake have no event of their own.
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
