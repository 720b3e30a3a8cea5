"""Ingest endpoints: a ROUTER socket binds them, and no other process may use them meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import socket as unix
import stat
from pathlib import Path

import zmq

from sidestep.errors import ConfigError
from sidestep.protocol.limits import MAX_FRAME_BYTES
from sidestep.transport.addresses import IPC, TCP, check_bindable
from sidestep.transport.path_owners import prepare_directory
from sidestep.transport.peer_limits import options_for

ZAP_DOMAIN = "sidestep"
BACKLOG = 100
"""Connections waiting to be accepted; the same as libzmq's default."""

FileId = tuple[int, int]
"""Device and inode, which distinguish a file from another one with the same name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A bound endpoint and, for an ipc endpoint, the lock on its path.

    Attributes:
        lock: Descriptor of the lock file; None for a tcp endpoint.
        file_id: Identity of the socket file of an ipc path when it was bound.
    """

    endpoint: str
    lock: int | None = None
    group: int | None = None
    file_id: FileId | None = None

    @property
    def path(self) -> Path:
        """Path of an ipc endpoint."""
        return Path(self.endpoint.removeprefix(IPC))

    def lost(self) -> bool:
        """Return whether the path's socket file has been replaced or removed."""
        return self.file_id is not None and self.file_id != _file_id(self.path)

    def rebind(self, socket: zmq.Socket[bytes]) -> Claim:
        """Bind ``socket``, which replaces the previous one, to the same endpoint."""
        if self.lock is None or _file_id(_lock_path(self.path)) == _file_id(self.lock):
            return _bind(socket, self)
        # The lock file was deleted, so the old lock no longer protects the path.
        claimed = claim(socket, self.endpoint, self.group)
        os.close(self.lock)
        return claimed

    def release(self) -> None:
        """Remove the socket file if it is still this process's, and release the lock."""
        if self.lock is not None:
            if not self.lost():
                self.path.unlink(missing_ok=True)
            os.close(self.lock)


def router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a ROUTER that no peer can block or fill beyond the watchdog's limit."""
    socket = context.socket(zmq.ROUTER)
    # Slightly above the limit of a frame, so that the exporter itself rejects and counts larger ones.
    for option, value in options_for(MAX_FRAME_BYTES + 4096):
        socket.setsockopt(option, value)
    return socket


def require_keys(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Require CURVE on all endpoints that ``socket`` is bound to from now on.

    An endpoint keeps the options with which it was bound, so one socket can have plain ipc paths and
    encrypted ports. All endpoints bound later require keys, too: libzmq rejects an empty ZAP domain.
    """
    socket.curve_server = True
    socket.curve_secretkey = secret
    socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    # Without this, any key may connect while there is no ZAP handler.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def claim(socket: zmq.Socket[bytes], endpoint: str, group: int | None = None) -> Claim:
    """Bind ``socket`` to ``endpoint``.

    Raises:
        ConfigError: The endpoint is malformed, in use, or may not be bound.
    """
    try:
        check_bindable(endpoint)
    except ValueError as error:
        raise ConfigError(f"ingest endpoint {endpoint!r}: {error}") from None
    if endpoint.startswith(TCP):
        return _bind(socket, Claim(endpoint))
    lock = _lock(Path(endpoint.removeprefix(IPC)), endpoint, group)
    try:
        return _bind(socket, Claim(endpoint, lock, group))
    except ConfigError:
        os.close(lock)
        raise


def _bind(socket: zmq.Socket[bytes], claim: Claim) -> Claim:
    try:
        if claim.lock is None:
            socket.bind(claim.endpoint)
            bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            return dataclasses.replace(claim, endpoint=bound)
        _listen(socket, claim)
    except (OSError, zmq.ZMQError) as error:
        if error.errno == errno.EADDRINUSE:
            raise _in_use(claim.endpoint) from None
        raise ConfigError(
            f"cannot bind ingest endpoint {claim.endpoint}: {error.strerror}"
        ) from None
    return dataclasses.replace(claim, file_id=_file_id(claim.path))


def _listen(socket: zmq.Socket[bytes], claim: Claim) -> None:
    """Create the path's socket with its mode, and pass it to libzmq.

    libzmq itself would use the umask's mode. It would also remove any file at the path when it binds and
    when it closes, even the socket of another process.
    """
    path = claim.path
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "a file that is not a socket has this name")
        path.unlink()
    with unix.socket(unix.AF_UNIX) as listening:
        listening.bind(str(path))
        # Set before listen(), so that no peer can connect while the mode is still the default.
        if claim.group is not None:
            os.chown(path, -1, claim.group)
        path.chmod(0o600 if claim.group is None else 0o660)
        listening.listen(BACKLOG)
        listening.setblocking(False)
        socket.setsockopt(zmq.USE_FD, listening.fileno())
        try:
            socket.bind(claim.endpoint)
        finally:
            socket.setsockopt(zmq.USE_FD, -1)
        # libzmq owns the descriptor now.
        listening.detach()


def _lock(path: Path, endpoint: str, group: int | None) -> int:
    """Lock the socket's path, since a second process would silently replace the socket."""
    try:
        prepare_directory(path.parent, group)
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(_lock_path(path), flags, 0o600)
    except OSError as error:
        reason = f"{path.parent}: {error.strerror}"
        raise ConfigError(f"cannot bind ingest endpoint {endpoint}: {reason}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise _in_use(endpoint) from None
    return lock


def _in_use(endpoint: str) -> ConfigError:
    return ConfigError(
        f"ingest endpoint {endpoint} is in use by another process: choose another with"
        " --ingest.endpoint (sidestep record: --listen)"
    )


def _lock_path(path: Path) -> Path:
    return Path(f"{path}.lock")


def _file_id(of: Path | int) -> FileId | None:
    try:
        found = of.stat() if isinstance(of, Path) else os.fstat(of)
    except OSError:
        return None
    return found.st_dev, found.st_ino
