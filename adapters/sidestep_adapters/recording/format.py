"""The format of recordings that ``sidestep record`` makes.

A line of text, then records, each four bytes of length (big-endian) and that many bytes of msgpack:
which engines a stream feeds (``StreamStart``) and what it sent (``Items``). A file may be compressed
with gzip.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from sidestep.errors import ConfigError
from sidestep.protocol.limits import MAX_FRAME_BYTES, printable
from sidestep.protocol.messages import DECODE_ERRORS, EngineInfo
from sidestep.transport.path_owners import open_file

MAGIC = b"sidestep recording 1\n"
_LENGTH = struct.Struct(">I")
_GZIP = b"\x1f\x8b"
MAX_LINE = 8 << 20
"""Longest line that is read."""
MAX_SECONDS = 1e9
"""Longest recording that can be replayed."""


class StreamStart(msgspec.Struct, array_like=True, gc=False, tag="G"):
    """Record: from ``at`` seconds after the start, ``stream`` feeds ``engines``."""

    at: float
    stream: str
    engines: list[EngineInfo]


class Items(msgspec.Struct, array_like=True, gc=False, tag="I"):
    """Record: ``stream`` sent ``items`` at ``at`` seconds after the start."""

    at: float
    stream: str
    items: list[msgspec.Raw]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StreamStart | Items)


class Writer:
    """Writes a recording without buffering, so that a killed process loses no record."""

    def __init__(self, path: Path) -> None:
        self._end = 0
        try:
            self._file: BinaryIO = open(path, "wb", buffering=0, opener=open_file)  # noqa: SIM115
            self._write(MAGIC)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def write(self, record: StreamStart | Items) -> None:
        """Append ``record``.

        Raises:
            OSError: The disk is full; earlier records stay readable.
        """
        data = _encoder.encode(record)
        self._write(_LENGTH.pack(len(data)) + data)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                # A disk that becomes full takes a part without an error.
                left = left[self._file.write(left) :]
        except OSError:
            # A file with a part of a record at its end is refused as a whole.
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
                self._file.seek(self._end)
            raise
        self._end += len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> Iterator[StreamStart | Items]:
    """Yield the records of a recording.

    Raises:
        ConfigError: The file is unreadable or no recording; names the offset.
    """
    with opened(path) as file:
        if file.readline(MAX_LINE) != MAGIC:
            raise ConfigError(f"{path}: this is no recording of sidestep record")
        yield from _records(path, file)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, which may be a pipe, and decompress what is compressed with gzip.

    Raises:
        ConfigError: It cannot be read, or not decompressed, now or in the block.
    """
    try:
        with path.open("rb") as plain:
            is_gzip = plain.peek(2).startswith(_GZIP)
            yield io.BufferedReader(gzip.GzipFile(fileobj=plain)) if is_gzip else plain
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ConfigError(f"{path}: the gzip data is cut short or damaged") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def lines(path: Path, file: BinaryIO, first: bytes = b"") -> Iterator[bytes]:
    """Yield the lines of an open file, behind ``first``, which was read from it.

    Raises:
        ConfigError: A line is longer than ``MAX_LINE``.
    """
    line, number = first or file.readline(MAX_LINE), 1
    while line:
        if len(line) == MAX_LINE:
            raise ConfigError(f"{path}: line {number} is longer than {MAX_LINE >> 20} MiB")
        yield line
        line, number = file.readline(MAX_LINE), number + 1


def _records(path: Path, file: BinaryIO) -> Iterator[StreamStart | Items]:
    offset = len(MAGIC)
    while length := file.read(_LENGTH.size):
        size = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else -1
        body = file.read(size) if 0 <= size <= 2 * MAX_FRAME_BYTES else b""
        if len(body) != size:
            raise ConfigError(f"{path}: cut short at byte {offset}")
        try:
            record = _decoder.decode(body)
        except DECODE_ERRORS as error:
            raise ConfigError(f"{path}: damaged at byte {offset}: {printable(error)}") from None
        if not 0.0 <= record.at <= MAX_SECONDS:
            raise ConfigError(f"{path}: damaged at byte {offset}: its time is {record.at}")
        yield record
        offset += _LENGTH.size + size
