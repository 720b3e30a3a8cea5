"""Binding a ROUTER socket where engines find it, and nobody else already is."""

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
from sidestep.transport.options import reachable
from sidestep.transport.reach import IPC, TCP
from sidestep.transport.zap import DOMAIN

IPC_PATH_CHARS = 107
"""Of a Unix socket's address, less its closing NUL."""
BACKLOG = 100
"""Connections that wait to be accepted, as many as libzmq lets wait by itself."""

Place = tuple[int, int]
"""Device and inode: what tells a file from another one of its name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A bound endpoint; of an ipc one also the lock that keeps others off its path.

    Attributes:
        place: Of an ipc path's socket file, as it was bound.
    """

    endpoint: str
    lock: int | None = None
    group: int | None = None
    place: Place | None = None

    @property
    def path(self) -> Path:
        """Of an ipc endpoint."""
        return Path(self.endpoint.removeprefix(IPC))

    def lost(self) -> bool:
        """Whether engines that connect to the path no longer reach us."""
        return self.place is not None and self.place != _place(self.path)

    def rebind(self, socket: zmq.Socket[bytes]) -> Claim:
        """Bind ``socket``, the last one's successor, to the same endpoint.

        Raises:
            ConfigError: Somebody else has it by now.
        """
        lock = self.lock
        if lock is not None and _place(_lock_path(self.path)) != _place(lock):
            # Whoever cleaned the directory took the lock's file along: it locks nothing.
            lock = _lock(self.path, self.endpoint, self.group)
            os.close(self.lock or 0)
        return _bind(socket, dataclasses.replace(self, lock=lock))

    def release(self) -> None:
        """Give the path free, if it is ours, once the socket is closed."""
        if self.lock is not None:
            if not self.lost():
                self.path.unlink(missing_ok=True)
            os.close(self.lock)


def router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a ROUTER that no peer can block or make hold more than the watchdog allows."""
    socket = context.socket(zmq.ROUTER)
    # A little more than a frame may have: the refusal of a larger one is ours to count.
    for option, value in reachable(MAX_FRAME_BYTES + 4096):
        socket.setsockopt(option, value)
    return socket


def require_keys(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Demand CURVE of whoever connects to what ``socket`` is bound to from now on.

    An endpoint keeps the options of the moment it was bound, so one socket can have
    plain ipc paths and encrypted ports. The way back is closed: libzmq refuses an empty
    domain, so that later plain peers would have to be authenticated as well.
    """
    socket.curve_server = True
    socket.curve_secretkey = secret
    socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
    # Without it, no handler would mean that any key may connect.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def claim(socket: zmq.Socket[bytes], endpoint: str, group: int | None = None) -> Claim:
    """Bind ``socket`` to ``endpoint``.

    Args:
        socket: A ROUTER.
        endpoint: ``ipc://`` or ``tcp://``.
        group: Group that may connect to an ipc path, besides this user.

    Raises:
        ConfigError: Malformed, taken, or not ours to bind; one line that says which.
    """
    if endpoint.startswith(TCP):
        return _bind(socket, Claim(endpoint))
    if not endpoint.startswith(IPC):
        raise ConfigError(f"ingest endpoint {endpoint!r}: must begin with ipc:// or tcp://")
    if endpoint.removeprefix(IPC)[:1] in ("", "@", "*"):
        # An abstract name has no directory and no mode: everybody on the host may connect.
        raise ConfigError(f"ingest endpoint {endpoint!r}: must be the path of a file")
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
        raise ConfigError(
            f"cannot bind ingest endpoint {claim.endpoint}: {error.strerror}"
        ) from None
    return dataclasses.replace(claim, place=_place(claim.path))


def _listen(socket: zmq.Socket[bytes], claim: Claim) -> None:
    """Make the path's socket, and give it to libzmq.

    libzmq's own way asks the umask for the mode, and removes whatever has the path's name,
    when it binds and when it closes: somebody else's socket as well.
    """
    path = claim.path
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "there is a file of that name, and no socket")
        path.unlink()
    with unix.socket(unix.AF_UNIX) as listening:
        listening.bind(str(path))
        # Nobody can connect before it listens: no moment in which the mode is another.
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
        # libzmq closes it now.
        listening.detach()


def _lock(path: Path, endpoint: str, group: int | None) -> int:
    """Lock the socket's path: a second bind to it would steal it without a word."""
    if len(os.fsencode(path)) > IPC_PATH_CHARS:
        raise ConfigError(f"{endpoint}: the path is longer than {IPC_PATH_CHARS} bytes")
    try:
        _prepare(path.parent, group)
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(_lock_path(path), flags, 0o600)
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


def _lock_path(path: Path) -> Path:
    return Path(f"{path}.lock")


def _prepare(directory: Path, group: int | None) -> None:
    """Make ``directory`` for this user and ``group`` alone, or see that it is fit.

    Raises:
        OSError: It is not; the text says what to do.
    """
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        _inspect(directory.stat(), group)
        return
    if group is not None:
        os.chown(directory, -1, group)
        # The set-group bit is lost to whoever is not of the group, so after the owner.
        directory.chmod(0o2770)


def _inspect(found: os.stat_result, group: int | None) -> None:
    ours = found.st_uid == os.getuid()
    if not ours and found.st_uid != 0:
        raise PermissionError(errno.EPERM, "the directory belongs to somebody else")
    # In such a one anybody may put a socket of his own in this one's place.
    if found.st_mode & stat.S_IWOTH and not (ours and found.st_mode & stat.S_ISVTX):
        raise PermissionError(
            errno.EPERM, "everybody may write to the directory; use one of its own below it"
        )
    if group is None:
        return
    if found.st_gid != group or not found.st_mode & stat.S_IXGRP:
        raise PermissionError(
            errno.EPERM,
            f"the directory is not open to group {group}; chgrp it and chmod 2770, or remove it",
        )


def _place(of: Path | int) -> Place | None:
    try:
        found = of.stat() if isinstance(of, Path) else os.fstat(of)
    except OSError:
        return None
    return found.st_dev, found.st_ino
