"""DEALER sockets of libzmq, connected to an exporter."""

from __future__ import annotations

import zmq

from sidestep.transport.client_keys import Keys, keys_for
from sidestep.transport.peer_limits import MAX_ANSWER_BYTES
from sidestep.transport.socket_options import options_for

Socket = zmq.Socket[bytes]

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
    keys = keys or keys_for(endpoint)
    socket = context.socket(zmq.DEALER)
    try:
        for option, value in (*options_for(MAX_ANSWER_BYTES), *options):
            socket.setsockopt(option, value)
        if keys is not None:
            socket.curve_serverkey = keys.server
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.secret
        socket.connect(endpoint)
    except Exception:
        socket.close()
        raise
    return socket


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
