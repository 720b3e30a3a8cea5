"""CURVE keys of a sender, from its environment, for an exporter that requires them on ``tcp://``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sidestep.errors import ConfigError
from sidestep.transport.keys import is_key, public_of, read_public, read_secret, require_curve

SERVER_KEY, CLIENT_KEY = "SIDESTEP_SERVER_KEY", "SIDESTEP_CLIENT_KEY"


class Keys(NamedTuple):
    """The exporter's public key and the sender's own key pair."""

    server: bytes
    public: bytes
    secret: bytes


def keys_for(endpoint: str, environ: Mapping[str, str] = os.environ) -> Keys | None:
    """Return the keys that a connection to ``endpoint`` needs; ``None``: no keys.

    An ipc path needs none: file permissions protect it. Over tcp, configured keys are used or
    an error is raised; there is never a fallback to a plain connection.

    Raises:
        ConfigError: One of the two variables is missing, or a file is not a key.
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
    # A path can also have 40 characters: an existing file wins.
    if is_key(given) and not Path(given).is_file():
        return given.encode()
    try:
        return read_public(Path(given)).text.encode()
    except ConfigError as error:
        raise ConfigError(f"{SERVER_KEY} is neither a key nor a key file: {error}") from None
