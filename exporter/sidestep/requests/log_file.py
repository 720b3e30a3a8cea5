"""The file of ``--requests.log``: lines are appended; a full file is renamed, the oldest deleted."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from sidestep.errors import ConfigError
from sidestep.protocol.limits import escape
from sidestep.transport.path_owners import open_file

STANDARD_OUTPUT = "-"


class LogFile:
    """A file with a limit on its size, and as many former ones as ``files`` allows.

    Args:
        path: The file; former ones have ``.1``, ``.2`` and so on appended, the youngest first.
    """

    def __init__(self, path: Path, size: int, files: int) -> None:
        self._path = path
        self._size = size
        self._files = files
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"--requests.log {path}: {error.strerror}") from None

    def write(self, lines: bytes) -> None:
        """Append whole lines; they are in the file, or nothing is."""
        if not os.fstat(self._file).st_nlink:
            # It was deleted, perhaps since the disk is full; its blocks are freed once it is closed.
            self._replace()
        if self._written and self._written + len(lines) > self._size:
            self._rotate()
        begin = self._written
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            # A line that was cut would be taken for a whole one.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, begin)
            raise
        self._written += len(lines)

    def _open(self) -> int:
        file = open_file(self._path, os.O_RDWR | os.O_APPEND, 0o600)
        self._written = os.fstat(file).st_size
        if self._written and os.pread(file, 1, self._written - 1) != b"\n":
            # The process was killed while it wrote; its successor writes the record again.
            self._written += os.write(file, b"\n")
        return file

    def _rotate(self) -> None:
        # After an attempt that could not open a new file, all have been renamed.
        for number in range(self._files - 1, 0, -1) if self._path.exists() else ():
            older = self._former(number)
            younger = self._former(number - 1) if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                younger.replace(older)
        if self._files == 1:
            self._path.unlink(missing_ok=True)
        self._replace()

    def _replace(self) -> None:
        former, self._file = self._file, self._open()
        os.close(former)

    def _former(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def line_sink(path: str, size: int, files: int) -> Callable[[bytes], None]:
    """Return what writes whole lines to ``--requests.log PATH``, may block, and raises OSError."""
    return _print if path == STANDARD_OUTPUT else LogFile(Path(path), size, files).write


def _print(lines: bytes) -> None:
    if not lines.isascii():
        lines = "\n".join(map(escape, lines.decode().split("\n"))).encode()
    sys.stdout.buffer.write(lines)
    sys.stdout.buffer.flush()
