"""DEALER sockets of libzmq, connected to an exporter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import zmq

from sidestep.transport.client_keys import Keys, keys_for
from sidestep.transport.connection_monitor import ConnectionMonitor, Socket
from sidestep.transport.peer_limits import MAX_ANSWER_BYTES
from sidestep.transport.socket_options import options_for

RESENDING = (
    # Without it frames would queue for, and die with, a connection never made; or be old there.
    (zmq.IMMEDIATE, 1),
    (zmq.SNDHWM, 64),
    (zmq.RECONNECT_IVL, 50),
    (zmq.RECONNECT_IVL_MAX, 1000),
)
"""Options of senders that send again what was not acknowledged."""


def connect(
    context: zmq.Context[Socket], endpoint: str, *options: tuple[int, int], keys: Keys | None = None
) -> Socket:
    """Return a DEALER to ``endpoint``, by default with the keys that the environment names.

    Raises:
        ConfigError: They cannot be used.
    """
    socket = _configured(context, options, keys or keys_for(endpoint))
    with _closed_on_error(socket):
        socket.connect(endpoint)
    return socket


def connect_monitored(
    context: zmq.Context[Socket], endpoint: str, *options: tuple[int, int], keys: Keys | None = None
) -> tuple[Socket, ConnectionMonitor]:
    """Return the same, and its monitor.

    Raises:
        ConfigError: The keys cannot be used.
    """
    socket = _configured(context, options, keys or keys_for(endpoint))
    with _closed_on_error(socket):
        monitor = ConnectionMonitor(socket, endpoint)
        with _closed_on_error(monitor):
            socket.connect(endpoint)
    return socket, monitor


def _configured(
    context: zmq.Context[Socket], options: Iterable[tuple[int, int]], keys: Keys | None
) -> Socket:
    socket = context.socket(zmq.DEALER)
    with _closed_on_error(socket):
        for option, value in (*options_for(MAX_ANSWER_BYTES), *options):
            socket.setsockopt(option, value)
        if keys is not None:
            socket.curve_serverkey = keys.server
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.secret
    return socket


@contextlib.contextmanager
def _closed_on_error(opened: Socket | ConnectionMonitor) -> Iterator[None]:
    try:
        yield
    except Exception:
        opened.close()
        raise


def receive(socket: Socket) -> bytes | None:
    """Return the next message, if there is one; messages of several frames are dropped."""
    # Asked first: there is rarely one, and an exception costs more than the question.
    while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        try:
            frame = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if not socket.getsockopt(zmq.RCVMORE):
            return frame
        socket.recv_multipart(zmq.NOBLOCK)
    return None
