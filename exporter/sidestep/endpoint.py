"""Binding a ROUTER socket where engines find it, and nobody else already is."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
from pathlib import Path

import zmq

from sidestep.errors import ConfigError
from sidestep.wire.limits import MAX_FRAME_BYTES

IPC = "ipc://"
IPC_PATH_CHARS = 107
"""Of a Unix socket's address, less its closing NUL."""


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A bound endpoint; of an ipc one also the lock that keeps others off its path."""

    endpoint: str
    lock: int | None = None

    def release(self) -> None:
        """Give the path free, once the socket is closed."""
        if self.lock is not None:
            Path(self.endpoint.removeprefix(IPC)).unlink(missing_ok=True)
            os.close(self.lock)


def router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """A ROUTER with limits on what a peer can make it hold."""
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    # A little more than a frame may have: the refusal of a larger one is ours to count.
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + 4096)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
    socket.setsockopt(zmq.RCVHWM, 1000)
    return socket


def claim(socket: zmq.Socket[bytes], endpoint: str) -> Claim:
    """Bind ``socket`` to ``endpoint``.

    Raises:
        ConfigError: Malformed, taken, or not ours to bind; one line that says which.
    """
    lock: int | None = None
    if endpoint.startswith(IPC):
        lock = _lock(Path(endpoint.removeprefix(IPC)), endpoint)
    elif not endpoint.startswith("tcp://"):
        raise ConfigError(f"ingest endpoint {endpoint!r}: must begin with ipc:// or tcp://")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if lock is not None:
            os.close(lock)
        raise ConfigError(f"cannot bind ingest endpoint {endpoint}: {error.strerror}") from None
    bound = endpoint if lock is not None else socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return Claim(bound, lock)


def _lock(path: Path, endpoint: str) -> int:
    """Lock the socket's path: a second bind to it would steal it without a word."""
    if len(os.fsencode(path)) > IPC_PATH_CHARS:
        raise ConfigError(f"{endpoint}: the path is longer than {IPC_PATH_CHARS} bytes")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.parent.stat().st_uid
        if owner not in (0, os.getuid()):
            raise PermissionError(errno.EPERM, "the directory belongs to somebody else")
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        reason = f"{path.parent}: {error.strerror}"
        raise ConfigError(f"cannot bind ingest endpoint {endpoint}: {reason}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"cannot bind ingest endpoint {endpoint}: another exporter has it"
        ) from None
    return lock
