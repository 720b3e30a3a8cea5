"""Recording formats: sidestep's own, made by ``sidestep record``, and stat-logger calls as JSON lines.

Sidestep's own format is a line of text, then records, each four bytes of length (big-endian) and
that many bytes of msgpack: which engines a stream feeds (``StreamStart``) and what it sent
(``Items``). The JSON-lines format has one object for each call of vLLM's stat logger: ``call``,
``t_mono``, its arguments, and ``instance`` if several front-end processes share the file. Both
may be compressed with gzip.
"""

from __future__ import annotations

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
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP):
            data = gzip.decompress(data)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (EOFError, zlib.error):
        raise ConfigError(f"{path}: the gzip data is cut short or damaged") from None
    if data.startswith(MAGIC):
        return _read_frames(path, memoryview(data)[len(MAGIC) :])
    if data.lstrip()[:1] == b"{":
        return _calls(path, io.BytesIO(data))
    raise ConfigError(f"{path}: neither a sidestep recording nor JSON lines of stat-logger calls")


def _read_frames(path: Path, data: memoryview) -> Iterator[StreamStart | Items]:
    offset = 0
    while offset < len(data):
        length = data[offset : offset + _LENGTH.size]
        size = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else -1
        body = data[offset + _LENGTH.size : offset + _LENGTH.size + max(size, 0)]
        if not 0 <= size <= 2 * MAX_FRAME_BYTES or len(body) != size:
            raise ConfigError(f"{path}: cut short at byte {len(MAGIC) + offset}")
        try:
            yield _decoder.decode(body)
        except DECODE_ERRORS as error:
            at = len(MAGIC) + offset
            raise ConfigError(f"{path}: damaged at byte {at}: {printable(error)}") from None
        offset += _LENGTH.size + size


def _calls(path: Path, lines: Iterable[bytes]) -> Iterator[Call]:
    start: float | None = None
    for number, line in enumerate(lines, start=1):
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
        yield Call(max(at - start, 0.0), str(fields.pop("instance", "")), name, fields)


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
