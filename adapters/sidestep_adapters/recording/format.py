"""Recording formats: sidestep's own, made by ``sidestep record``, and stat-logger calls as JSON lines.

Sidestep's own format is a line of text, then records, each four bytes of length (big-endian) and
that many bytes of msgpack: which engines a stream feeds (``StreamStart``) and what it sent
(``Items``). The JSON-lines format has one object for each call of vLLM's stat logger: ``call``,
``t_mono``, its arguments, and ``instance`` if several front-end processes share the file. Both
may be compressed with gzip.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import msgspec

from sidestep.catalog.buckets import checked
from sidestep.errors import ConfigError
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.limits import MAX_FRAME_BYTES, printable
from sidestep.protocol.messages import DECODE_ERRORS, EngineInfo
from sidestep.transport.path_owners import open_file
from sidestep_adapters.vllm.description import Description, served_name

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


class Call(msgspec.Struct):
    """A call of a stat logger: in process ``instance``, ``at`` seconds after the start."""

    at: float
    instance: str
    name: str
    fields: dict[str, Any]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StreamStart | Items)


class Writer:
    """Writes a recording without buffering, so that a killed process loses no record."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: BinaryIO = open(path, "wb", buffering=0, opener=open_file)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        self._file.write(MAGIC)

    def write(self, record: StreamStart | Items) -> None:
        """Append ``record``.

        Raises:
            OSError: The disk is full; earlier records stay readable.
        """
        data = _encoder.encode(record)
        self._file.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> Iterator[StreamStart | Items] | Iterator[Call]:
    """Yield the records of a recording in either format.

    Raises:
        ConfigError: The file is unreadable or no recording; names the line or the offset.
    """
    with opened(path) as file:
        first = file.readline(MAX_LINE)
        if first == MAGIC:
            yield from _read_frames(path, file)
        elif first.lstrip()[:1] == b"{":
            yield from _calls(path, lines(path, file, first))
        else:
            raise ConfigError(
                f"{path}: neither a sidestep recording nor JSON lines of stat-logger calls"
            )


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


def _read_frames(path: Path, file: BinaryIO) -> Iterator[StreamStart | Items]:
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


def _calls(path: Path, found: Iterable[bytes]) -> Iterator[Call]:
    start: float | None = None
    for number, line in enumerate(found, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            at = float(fields.pop("t_mono"))
            name = str(fields.pop("call"))
        except (
            ArithmeticError,
            AttributeError,
            KeyError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ConfigError(f"{path}: line {number} is no stat-logger call: {error!r}") from None
        start = at if start is None else start
        since = max(at - start, 0.0)
        if not since <= MAX_SECONDS:
            raise ConfigError(f"{path}: line {number} is no stat-logger call: its time is {at}")
        yield Call(since, str(fields.pop("instance", "")), name, fields)


def description_of(fields: dict[str, Any], api_server: int, namespace: str) -> Description:
    """Return the description of the front end that a recorded ``__init__`` call made.

    The call does not have the environment, so it is unknown whether logits were checked for NaNs:
    their counter is exposed, as with the check on.

    Raises:
        ConfigError: The call lacks a required field.
    """
    try:
        observability = fields.get("observability") or {}
        options = {
            "nan_check": True,
            "kv_cache_metrics": observability.get("kv_cache_metrics"),
            "iteration_details": observability.get("enable_logging_iteration_details"),
            "cudagraph": observability.get("cudagraph_metrics"),
        }
        custom = observability.get("custom_histogram_buckets") or {}
        return Description(
            model=served_name(fields["model"]),
            max_model_len=int(fields["max_model_len"]),
            engines=tuple(int(index) for index in fields["engine_indexes"]),
            namespace=namespace,
            api_server=api_server,
            features=tuple(name for name, on in options.items() if on),
            custom_buckets={str(name): checked(name, bounds) for name, bounds in custom.items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"an __init__ call of the recording lacks a field: {error!r}") from None


def to_objects(value: Any) -> Any:
    """Convert recorded JSON to the objects that vLLM passes: attributes instead of members."""
    if isinstance(value, list):
        return [to_objects(element) for element in value]
    if not isinstance(value, dict):
        return value
    if "__type__" not in value:
        return {key: to_objects(member) for key, member in value.items()}
    members = {key: to_objects(member) for key, member in value.items() if key != "__type__"}
    reason = members.get("finish_reason")
    if isinstance(reason, str):
        # An IntEnum in the engine, recorded by its name; an unknown one gets the last index.
        known = reason.lower() in FINISH_REASONS
        index = FINISH_REASONS.index(reason.lower()) if known else len(FINISH_REASONS)
        members["finish_reason"] = index
    return SimpleNamespace(**members)


def engines_of(records: Sequence[StreamStart | Items]) -> dict[str, list[EngineInfo]]:
    """Return the engines that each stream of a recording feeds at its end."""
    return {record.stream: record.engines for record in records if isinstance(record, StreamStart)}
