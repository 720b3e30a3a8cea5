"""A sender's socket, and the keys from the environment that a ``tcp://`` exporter may ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import zmq

from sidestep.errors import ConfigError
from sidestep.transport.keys import is_key, public_of, read_public, read_secret, require_curve

SERVER_KEY, CLIENT_KEY = "SIDESTEP_SERVER_KEY", "SIDESTEP_CLIENT_KEY"

Socket = zmq.Socket[bytes]

RESENDING = (
    # Without it frames would queue for, and die with, a connection never made; or be old there.
    (zmq.IMMEDIATE, 1),
    (zmq.SNDHWM, 64),
    (zmq.RECONNECT_IVL, 50),
    (zmq.RECONNECT_IVL_MAX, 1000),
    (zmq.HEARTBEAT_IVL, 5000),
    (zmq.HEARTBEAT_TIMEOUT, 15000),
)
"""Options of senders that say again what was not taken."""


class Keys(NamedTuple):
    """The exporter's public key, and a pair of one's own."""

    server: bytes
    public: bytes
    secret: bytes


def keys_for(endpoint: str, environ: Mapping[str, str] = os.environ) -> Keys | None:
    """What a connection to ``endpoint`` needs; ``None``: no keys.

    An ipc path needs none: its directory says who may enter. Over tcp keys that are
    named are used or it is an error, never a plain connection.

    Raises:
        ConfigError: One of two is missing, or a file is no key.
    """
    server, client = environ.get(SERVER_KEY, ""), environ.get(CLIENT_KEY, "")
    if not endpoint.startswith("tcp://") or not (server or client):
        return None
    if not (server and client):
        missing = CLIENT_KEY if server else SERVER_KEY
        raise ConfigError(f"{SERVER_KEY} and {CLIENT_KEY} go together: {missing} is not set")
    require_curve()
    secret = _of(CLIENT_KEY, client)
    return Keys(_server_key(server), public_of(secret), secret)


def connect(context: zmq.Context[Socket], endpoint: str, *options: tuple[int, int]) -> Socket:
    """A DEALER to ``endpoint``, with the keys that the environment names.

    Raises:
        ConfigError: They cannot be used.
    """
    keys = keys_for(endpoint)
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    try:
        for option, value in options:
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
    """The next frame, if there is one."""
    # Asked first: there is rarely one, and an exception costs more than the question.
    if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        return None
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _of(variable: str, file: str) -> bytes:
    try:
        return read_secret(Path(file))
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error}") from None


def _server_key(given: str) -> bytes:
    # A path may have 40 letters, too, and then its file decides.
    if is_key(given) and not Path(given).is_file():
        return given.encode()
    try:
        return read_public(Path(given)).text.encode()
    except ConfigError as error:
        raise ConfigError(f"{SERVER_KEY} is no key and names no key file: {error}") from None
