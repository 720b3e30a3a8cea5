"""Decoding of KV events of vLLM and SGLang into changes of a prefix cache.

A payload is ``[ts, events, rank]``, or the same as a map. An event is a map with its kind under
``type``, or an array that begins with it (SGLang before 0.5.23). Only the hashes, the medium and
the group of an event are decoded; token ids are skipped.

A hash is reduced to its last 64 bits, as vLLM does for integers. Each group of layers has a cache of
its own, and several may hold the same hash, so the number of the group is added to the hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from sidestep.errors import WireError
from sidestep.protocol.block_events import FIRST_MEDIUM, CacheChange
from sidestep.protocol.limits import MAX_OBSERVATIONS, Seconds, Text, is_printable
from sidestep.protocol.messages import DECODE_ERRORS

MAX_EVENTS = 16384
"""Maximum events of one payload."""
MAX_EVENT_HASHES = 16384
"""Maximum hashes of one event that cannot be split."""
PIECE_EVENTS = 64
PIECE_BYTES = 16 << 10
PIECE_HASHES = 2048
"""Limits of a piece that is decoded at once, in a fraction of a millisecond, or in two if it is invalid."""

KINDS = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
_MASK = (1 << 64) - 1
_GROUP = 0xD1B54A32D192ED03
"""Multiplier of the group number; odd and without a pattern."""
_ARRAYS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
"""First bytes of msgpack's arrays."""

Rank = Annotated[int, Meta(ge=0, le=1 << 16)] | None
Group = Annotated[int, Meta(ge=0, le=1 << 16)] | None
Digest = Annotated[bytes, Meta(max_length=64)]
Hex = Annotated[str, Meta(pattern=r"^(0x)?[0-9a-fA-F]{1,128}\Z")]
Hashes = Annotated[list[int | Digest], Meta(max_length=MAX_EVENT_HASHES)]
HexHashes = Annotated[list[int | Hex], Meta(max_length=MAX_EVENT_HASHES)]
Medium = Text | None
Skipped = msgspec.Raw
H = TypeVar("H")


class Batch(msgspec.Struct, array_like=True, gc=False):
    """The events of a payload, not decoded yet."""

    stamp: Seconds
    events: Annotated[list[msgspec.Raw], Meta(max_length=MAX_EVENTS)]
    rank: Rank = None


class _BatchMap(msgspec.Struct, gc=False):
    ts: Seconds
    events: Annotated[list[msgspec.Raw], Meta(max_length=MAX_EVENTS)]
    data_parallel_rank: Rank = None
    attn_dp_rank: Rank = None


class _Removed(msgspec.Struct, Generic[H], gc=False, tag_field="type", tag="BlockRemoved"):
    block_hashes: H
    medium: Medium = None
    group_idx: Group = None


class _Stored(msgspec.Struct, Generic[H], gc=False, tag_field="type", tag="BlockStored"):
    block_hashes: H
    medium: Medium = None
    group_idx: Group = None


class _Cleared(msgspec.Struct, gc=False, tag_field="type", tag="AllBlocksCleared"):
    medium: Medium = None


class _RemovedArray(msgspec.Struct, Generic[H], array_like=True, gc=False, tag="BlockRemoved"):
    block_hashes: H
    medium: Medium = None
    group_idx: Group = None


class _StoredArray(msgspec.Struct, Generic[H], array_like=True, gc=False, tag="BlockStored"):
    block_hashes: H
    parent_block_hash: Skipped = Skipped()
    token_ids: Skipped = Skipped()
    block_size: Skipped = Skipped()
    lora_id: Skipped = Skipped()
    medium: Medium = None
    lora_name: Skipped = Skipped()
    extra_keys: Skipped = Skipped()
    group_idx: Group = None


class _ClearedArray(msgspec.Struct, array_like=True, gc=False, tag="AllBlocksCleared"):
    medium: Medium = None


class _Kind(msgspec.Struct, gc=False):
    type: Text


class _KindArray(msgspec.Struct, array_like=True, gc=False):
    type: Text


_Event = (
    _Stored[Any] | _Removed[Any] | _Cleared | _StoredArray[Any] | _RemovedArray[Any] | _ClearedArray
)
_Decode = Callable[[msgspec.Raw], _Event]


def _decoder(form: Any) -> Any:
    return msgspec.msgpack.Decoder(form).decode


_batch: Callable[[bytes], Batch] = _decoder(Batch)
_batch_map: Callable[[bytes], _BatchMap] = _decoder(_BatchMap)
_map: _Decode = _decoder(_Stored[Hashes] | _Removed[Hashes] | _Cleared)
_array: _Decode = _decoder(_StoredArray[Hashes] | _RemovedArray[Hashes] | _ClearedArray)
_hex: Sequence[_Decode] = (
    _decoder(_Stored[HexHashes] | _Removed[HexHashes]),
    _decoder(_StoredArray[HexHashes] | _RemovedArray[HexHashes]),
)
"""Both forms with hexadecimal hashes: msgspec has no type for text or bytes."""
_long: Sequence[_Decode] = (
    _decoder(_Stored[msgspec.Raw] | _Removed[msgspec.Raw] | _Cleared),
    _decoder(_StoredArray[msgspec.Raw] | _RemovedArray[msgspec.Raw] | _ClearedArray),
)
"""Both forms without decoding the hashes, to split long events."""
_encode = msgspec.msgpack.Encoder().encode
_kinds: Sequence[Callable[[msgspec.Raw], _Kind | _KindArray]] = (
    _decoder(_Kind),
    _decoder(_KindArray),
)


def decode(payload: bytes) -> Batch:
    """Decode a payload, except its events."""
    try:
        if payload[:1] and payload[0] in _ARRAYS:
            return _batch(payload)
        found = _batch_map(payload)
    except DECODE_ERRORS as error:
        raise WireError("bad_message", str(error)) from None
    rank = found.data_parallel_rank
    return Batch(found.ts, found.events, found.attn_dp_rank if rank is None else rank)


def pieces(events: Sequence[msgspec.Raw]) -> Iterator[Sequence[msgspec.Raw]]:
    """Yield ``events`` in parts that take little time each."""
    piece: list[msgspec.Raw] = []
    size = 0
    for raw in events:
        length = len(raw)
        if piece and (size + length > PIECE_BYTES or len(piece) == PIECE_EVENTS):
            yield piece
            piece, size = [], 0
        if length > PIECE_BYTES:
            yield from ([part] for part in _split(raw))
            continue
        piece.append(raw)
        size += length
    if piece:
        yield piece


class Changes:
    """The changes of some events, in order; adjacent ones of one kind and medium are merged.

    Attributes:
        found: The changes; each has at most the hashes that an item may have.
    """

    def __init__(self, events: Sequence[msgspec.Raw], stamp: float) -> None:
        self.found: list[CacheChange] = []
        self.rejected: Counter[str] = Counter()
        self._stamp = stamp
        decode_one = _map
        for raw in events:
            try:
                try:
                    event = decode_one(raw)
                except DECODE_ERRORS:
                    decode_one = _array if decode_one is _map else _map
                    event = _decode_other_form(raw, decode_one)
                self._add(event)
            except WireError as error:
                self.rejected[error.reason] += 1

    def _add(self, event: _Event) -> None:
        medium = event.medium or ""
        if not is_printable(medium):
            raise WireError("bad_event", "a medium's name is not printable")
        if isinstance(event, _Cleared | _ClearedArray):
            self.found.append(CacheChange("cleared", self._stamp, [], medium))
            return
        stored = isinstance(event, _Stored | _StoredArray)
        hashes = _numbers(event.block_hashes, event.group_idx)
        self._extend("stored" if stored else "removed", hashes, medium or FIRST_MEDIUM)

    def _extend(self, kind: Literal["stored", "removed"], hashes: list[int], medium: str) -> None:
        last = self.found[-1] if self.found else None
        if (
            last is not None
            and last.kind == kind
            and last.medium == medium
            and len(last.hashes) + len(hashes) <= MAX_OBSERVATIONS
        ):
            last.hashes += hashes
            return
        for begin in range(0, len(hashes), MAX_OBSERVATIONS):
            part = hashes[begin : begin + MAX_OBSERVATIONS]
            self.found.append(CacheChange(kind, self._stamp, part, medium))


def _decode_other_form(raw: msgspec.Raw, decode_one: _Decode) -> _Event:
    """Decode an event that has another form than the events before it."""
    for attempt in (decode_one, *_hex):
        try:
            return attempt(raw)
        except DECODE_ERRORS:
            continue
    for kind in _kinds:
        try:
            found = kind(raw).type
        except DECODE_ERRORS:
            continue
        if found not in KINDS:
            raise WireError("unknown_event", "a kind that is not known")
    raise WireError("bad_event", "malformed, or beyond a limit")


def _split(raw: msgspec.Raw) -> Iterator[msgspec.Raw]:
    """Split one event into several, if all its hashes have the same size in bytes.

    They nearly always have. If they only seem to, the parts are as invalid as the event.
    """
    for decode_one in _long:
        try:
            event = decode_one(raw)
        except DECODE_ERRORS:
            continue
        if isinstance(event, _Cleared | _ClearedArray):
            break
        data = bytes(event.block_hashes)
        count, begin = _header(data)
        stride, rest = divmod(len(data) - begin, max(count, 1))
        if rest or count <= PIECE_HASHES:
            break
        kind = "BlockStored" if isinstance(event, _Stored | _StoredArray) else "BlockRemoved"
        for first in range(0, count, PIECE_HASHES):
            here = min(PIECE_HASHES, count - first)
            at = begin + first * stride
            hashes = b"\xdd" + here.to_bytes(4, "big") + data[at : at + here * stride]
            part = {
                "type": kind,
                "block_hashes": msgspec.Raw(hashes),
                "medium": event.medium,
                "group_idx": event.group_idx,
            }
            yield msgspec.Raw(_encode(part))
        return
    yield raw


def _header(data: bytes) -> tuple[int, int]:
    """Return the length of a msgpack array and the offset of its first element; 0 for anything else."""
    kind = data[0]
    if kind in range(0x90, 0xA0):
        return kind & 0x0F, 1
    length = {0xDC: 2, 0xDD: 4}.get(kind, 0)
    return int.from_bytes(data[1 : 1 + length], "big"), 1 + length


def _numbers(hashes: list[int | bytes | str], group: int | None) -> list[int]:
    """Return ``hashes`` as unsigned 64-bit numbers that differ between groups."""
    numbers: list[int]
    try:
        # Nearly always they are numbers; for others the comparison raises TypeError.
        numbers = hashes  # type: ignore[assignment]
        if numbers and min(numbers) < 0:
            numbers = [number & _MASK for number in numbers]
    except TypeError:
        numbers = [_number(one) for one in hashes]
    if group:
        offset = group * _GROUP
        numbers = [number + offset & _MASK for number in numbers]
    return numbers


def _number(one: int | bytes | str) -> int:
    if isinstance(one, bytes):
        return int.from_bytes(one[-8:], "big")
    return (int(one, 16) if isinstance(one, str) else one) & _MASK
