"""The files of the state directory, which are replaced and read atomically.

They survive a killed process, not a power loss: nothing is synced to disk. A memory-backed
directory is sufficient, and takes only microseconds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from sidestep.errors import ConfigError, WireError
from sidestep.transport.path_owners import open_directory, prepare_directory

MAGIC = b"sidestep"
FORMAT = 1
HEADER = struct.Struct("<8sIQI")
"""Magic, format, length of the payload and its CRC-32. Without the checksum the decoder missed 4,229
of 5,000 flipped bits."""
LENGTH = struct.Struct("<I")
SNAPSHOT = "snapshot"
DAMAGED = "snapshot.damaged"
MAX_DAMAGED = 9
"""Most names of damaged snapshots."""


class StateDirectory:
    """A state directory, locked by one exporter while it runs.

    Raises:
        ConfigError: The directory cannot be created or written, or another exporter uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            prepare_directory(path)
            with open_directory(path) as directory:
                self._lock = _open("lock", os.O_CREAT | os.O_RDWR, directory)
        except OSError as error:
            raise ConfigError(f"--state.dir {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"--state.dir {path}: another exporter uses it; give each one its own"
            ) from None

    def write(self, pieces: Sequence[bytes], name: str = SNAPSHOT) -> int:
        """Replace the snapshot, or another file, and return its size in bytes.

        Raises:
            OSError: Writing failed; the previous file is unchanged.
        """
        temporary = f"{name}.new"
        payload = b"".join(part for piece in pieces for part in (LENGTH.pack(len(piece)), piece))
        data = HEADER.pack(MAGIC, FORMAT, len(payload), zlib.crc32(payload)) + payload
        with open_directory(self.path) as directory:
            _remove(temporary, directory)
            try:
                _write(temporary, data, directory)
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                _remove(temporary, directory)
                raise
        return len(data)

    def read(self, name: str = SNAPSHOT) -> list[bytes] | None:
        """Return the pieces of the snapshot, or of another file, or None if there is none.

        Raises:
            WireError: The file is damaged or cannot be read.
        """
        try:
            with open_directory(self.path) as directory:
                data = _read(name, directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WireError("unreadable", str(error.strerror)) from None
        return verified(data)

    def set_aside(self) -> str:
        """Rename a damaged snapshot, so that it is not read again; return its name, empty if it cannot be renamed."""
        names = (DAMAGED, *(f"{DAMAGED}.{number}" for number in range(2, MAX_DAMAGED + 1)))
        with contextlib.suppress(OSError), open_directory(self.path) as directory:
            for name in names:
                # A directory cannot replace a file, nor a file a directory.
                with contextlib.suppress(OSError):
                    os.replace(SNAPSHOT, name, src_dir_fd=directory, dst_dir_fd=directory)
                    return name
        return ""

    def release(self) -> None:
        """Release the lock, so that another exporter can use the directory."""
        os.close(self._lock)


def verified(data: bytes) -> list[bytes]:
    """Verify the header and checksum of ``data`` and return its pieces.

    Raises:
        WireError: The data differs from what was written, or has another format.
    """
    if len(data) < HEADER.size:
        raise WireError("torn", f"{len(data)} bytes are not a snapshot")
    magic, form, length, checksum = HEADER.unpack_from(data)
    payload = memoryview(data)[HEADER.size :]
    if magic != MAGIC:
        raise WireError("damaged", "not a sidestep snapshot")
    if form != FORMAT:
        raise WireError("version", f"format {form}; this release reads {FORMAT}")
    if len(payload) != length:
        raise WireError("torn", f"{len(payload)} of {length} bytes")
    if zlib.crc32(payload) != checksum:
        raise WireError("damaged", "the checksum differs")
    pieces: list[bytes] = []
    at = 0
    while at < len(payload):
        (size,) = LENGTH.unpack_from(payload, at)
        at += LENGTH.size
        pieces.append(bytes(payload[at : at + size]))
        at += size
    return pieces


def _open(name: str, flags: int, directory: int) -> int:
    """Open a file of the directory; a link would be to where another user wants it."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)


def _read(name: str, directory: int) -> bytes:
    def opener(name: str, flags: int) -> int:
        # Opening a pipe that has no writer would block.
        return _open(name, flags | os.O_NONBLOCK, directory)

    with open(name, "rb", opener=opener) as file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "the snapshot belongs to another user")
        return file.read()


def _remove(name: str, directory: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)


def _write(name: str, data: bytes, directory: int) -> None:
    """Write all of ``data``: on a full disk, ``os.write`` may write a part of it without an error."""
    handle = _open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, directory)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
        if os.fstat(handle).st_size != len(data):
            raise OSError(0, "written short")
    finally:
        os.close(handle)
