"""The message between exporters: a source's cumulative record of one engine."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.errors import WireError
from sidestep.protocol.limits import (
    MAX_FRAME_BYTES,
    Identifier,
    Labels,
    Number,
    Seconds,
    Seq,
    Text,
    is_printable,
)
from sidestep.protocol.messages import DECODE_ERRORS

FORWARD_VERSION = 1
PIECE_BYTES = MAX_FRAME_BYTES - (64 << 10)
"""Maximum bytes of a record in one frame; the other fields fit the remaining 64 KiB easily."""
MAX_PIECES = 16
MAX_RECORD_BYTES = 2 << 20
"""Maximum bytes of a record; an engine with all allowed series needs half of it."""
TAG = "F"
EPOCH_BITS = 20
"""Random bits of an epoch; those above are the Unix milliseconds of its start."""
Order = tuple[int, int, int]
"""Epoch, run and seq of a record: of two records from one source, the higher one is newer."""
_MARK = bytes([0xA0 | len(TAG)]) + TAG.encode()
_LONG = 0xDC
"""First byte of an array of more than 15 fields; two more have its length."""


class EngineStatus(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Status of an engine in the exporter that counts it.

    Attributes:
        up: Whether a stream feeds the engine.
        live: Whether its gauges are current.
        absent: Whether its server currently does not have it.
        retired: Whether it is no longer exposed, though its counters are kept.
        computed: Gauges that only the counting exporter can compute, by name.
    """

    up: bool = False
    live: bool = False
    absent: bool = False
    retired: bool = False
    computed: Annotated[dict[Text, Number], Meta(max_length=32)] = {}


class Forward(msgspec.Struct, array_like=True, gc=False, tag=TAG):
    """An engine's current record, or a piece of one that is too large for a frame.

    Attributes:
        source: Stable name of the exporter that counts.
        engine: Id of the engine there.
        epoch: Number of the epoch, of counters that started at 0 together; see ``new_epoch``.
        run: Number of the process, larger for each process that continues the epoch.
        seq: Grows with every record of a run.
        piece: Index of ``data`` among ``pieces``.
        data: Encoded record (``records.Record``), or a piece of it.
        age: Seconds since the source sent it.
        labels: Labels that exporters on the way have added.
    """

    version: int
    source: Identifier
    engine: Identifier
    epoch: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    run: Seq
    seq: Seq
    piece: Annotated[int, Meta(ge=0, lt=MAX_PIECES)]
    pieces: Annotated[int, Meta(ge=1, le=MAX_PIECES)]
    data: Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]
    status: EngineStatus
    age: Seconds = 0.0
    labels: Labels = {}


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Forward] = msgspec.msgpack.Decoder(Forward)


def new_epoch(wall: float, chance: int) -> int:
    """Return the epoch of a process that starts with empty counters at the Unix time ``wall``.

    It is larger than that of any process that started earlier, unless the clock was set back.
    """
    return int(wall * 1000) << EPOCH_BITS | chance % (1 << EPOCH_BITS)


def order_of(message: Forward) -> Order:
    """Return the position of ``message`` among all of its source and engine."""
    return message.epoch, message.run, message.seq


def is_forward(frame: bytes) -> bool:
    """Return whether ``frame`` is from another exporter, by its tag and without decoding it."""
    start = 3 if frame[:1] == bytes([_LONG]) else 1
    return frame[start : start + len(_MARK)] == _MARK


def encode_forward(message: Forward) -> bytes:
    """Encode ``message`` as a frame."""
    return _encoder.encode(message)


def decode_forward(frame: bytes) -> Forward:
    """Decode and check a frame from another exporter.

    Raises:
        WireError: The frame is too large, malformed, or of another version.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError("too_big", f"frame of {len(frame)} bytes")
    try:
        message = _decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise WireError("bad_schema", str(error)) from None
    if message.version != FORWARD_VERSION:
        raise WireError(
            "version", f"forwards in version {message.version}, this exporter in {FORWARD_VERSION}"
        )
    if message.piece >= message.pieces:
        raise WireError("bad_schema", "a piece beyond the last")
    if not all(map(is_printable, (message.source, message.engine, *message.labels.values()))):
        raise WireError("bad_label", "a name or label value is not printable")
    return message


def split(record: bytes) -> list[bytes]:
    """Split ``record`` into pieces that each fit a frame.

    Raises:
        WireError: The record is too large to forward.
    """
    check_size(len(record))
    return [record[at : at + PIECE_BYTES] for at in range(0, len(record), PIECE_BYTES)]


def check_size(size: int) -> None:
    """Check the size of a record in bytes.

    Raises:
        WireError: The record is too large.
    """
    if size > MAX_RECORD_BYTES:
        raise WireError("too_big", f"a record of {size} bytes; the limit is {MAX_RECORD_BYTES}")
