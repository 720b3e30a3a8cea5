"""The keys that a sender reads from its environment, for a ``tcp://`` exporter that asks for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sidestep.errors import ConfigError
from sidestep.transport.keys import is_key, public_of, read_public, read_secret, require_curve

SERVER_KEY, CLIENT_KEY = "SIDESTEP_SERVER_KEY", "SIDESTEP_CLIENT_KEY"


class Keys(NamedTuple):
    """The exporter's public key, and a pair of one's own."""

    server: bytes
    public: bytes
    secret: bytes


def keys_for(endpoint: str, environ: Mapping[str, str] = os.environ) -> Keys | None:
    """Return the keys that a connection to ``endpoint`` needs; ``None``: no keys.

    An ipc path needs none: its directory decides who may connect. Over tcp keys that are
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
