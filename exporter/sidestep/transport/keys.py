"""CURVE keys: their files, and the variables with which a sender names them.

A key file has the key as Z85 text on its first line. A secret key must not be world-readable.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from sidestep.errors import ConfigError

KEY_CHARS = 40
MAX_FILE_BYTES = 64 << 10
SECRET, PUBLIC = ".key", ".pub"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class PublicKey(NamedTuple):
    """Content of a public key file.

    Attributes:
        text: The key as canonical Z85, so that equal keys have equal texts.
        engines: Patterns of the engine ids that its owner may feed; empty: all.
    """

    text: str
    engines: tuple[str, ...] = ()


def is_key(text: str) -> bool:
    """Return whether ``text`` is a key in Z85: 40 characters, each five of which fit 32 bits."""
    if len(text) != KEY_CHARS or not text.isascii():
        return False
    try:
        return z85.encode(z85.decode(text)) == text.encode()
    except (KeyError, ValueError, struct.error):
        return False


def require_curve() -> None:
    """Check that libzmq supports CURVE encryption."""
    if not zmq.has("curve"):
        raise ConfigError("this pyzmq's libzmq has no CURVE; install pyzmq from its wheels")


def read_secret(path: Path) -> bytes:
    """Return the secret key in ``path``.

    Raises:
        ConfigError: The file is not readable, not a key, a public key, or world-accessible.
    """
    require_curve()
    # A public key is a valid secret, too: handshakes would fail without a reason.
    if path.suffix == PUBLIC:
        raise ConfigError(f"{path} holds a public key; name the secret one, *{SECRET}")
    lines, mode = _read(path)
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{path}: this secret key is accessible to other users; chmod 600 it")
    return _key(path, lines).encode()


def read_public(path: Path) -> PublicKey:
    """Return the public key in ``path`` and the engine patterns on its further lines.

    Raises:
        ConfigError: The file is not readable, not a key, or a secret key.
    """
    if path.suffix == SECRET:
        raise ConfigError(f"{path} holds a secret key; name the public one, *{PUBLIC}")
    lines, _ = _read(path)
    patterns = (line.strip() for line in lines[1:])
    return PublicKey(_key(path, lines), tuple(p for p in patterns if p and p[0] != "#"))


def public_of(secret: bytes) -> bytes:
    """Return the public key of ``secret``."""
    return zmq.curve_public(secret)


def generate(directory: Path, name: str) -> tuple[Path, Path]:
    """Write a new pair, ``name.key`` and ``name.pub``, into ``directory``; return both paths.

    Raises:
        ConfigError: A file exists already or cannot be written, or the name is invalid.
    """
    require_curve()
    if not _NAME.fullmatch(name):
        raise ConfigError(f"key name {name!r}: must be letters, digits and ._-")
    secret, public = directory / f"{name}{SECRET}", directory / f"{name}{PUBLIC}"
    for path in (secret, public):
        # Path.exists raises where a directory cannot be entered.
        if os.path.lexists(path):
            raise ConfigError(f"{path} exists already; keys are never overwritten")
    public_key, secret_key = zmq.curve_keypair()
    _write(secret, secret_key, 0o600)
    try:
        _write(public, public_key, 0o644)
    except ConfigError:
        secret.unlink(missing_ok=True)
        raise
    return secret, public


def _write(path: Path, key: bytes, mode: int) -> None:
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(opened, "wb") as file:
                # Undo what the umask removes and what a default ACL adds.
                os.fchmod(opened, mode)
                file.write(key + b"\n")
        except OSError:
            # The next attempt would take an empty file for a key.
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _read(path: Path) -> tuple[list[str], int]:
    try:
        # Opening a pipe would block, and reading a device might never end.
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(opened, "rb") as file:
            mode = os.fstat(opened).st_mode
            data = file.read(MAX_FILE_BYTES) if stat.S_ISREG(mode) else b""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read key file {path}: {reason}") from None
    return data.decode("utf-8", "replace").splitlines(), mode


def _key(path: Path, lines: list[str]) -> str:
    key = lines[0].strip() if lines else ""
    if not is_key(key):
        raise ConfigError(f"{path}: the first line is not a key of {KEY_CHARS} Z85 characters")
    return key


SERVER_KEY, CLIENT_KEY = "SIDESTEP_SERVER_KEY", "SIDESTEP_CLIENT_KEY"


class Keys(NamedTuple):
    """The exporter's public key, and the sender's own key pair."""

    server: bytes
    public: bytes
    secret: bytes


def keys_for(endpoint: str, environ: Mapping[str, str] = os.environ) -> Keys | None:
    """Return the keys of a connection to ``endpoint``; ``None`` if it uses no keys.

    File permissions protect an ipc path, so it needs no keys. Over tcp, configured keys are used or
    an error is raised: a sender never falls back to a plain connection.

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
