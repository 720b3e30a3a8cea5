"""KV cache events of TensorRT-LLM, as one read of ``/kv_cache_events`` has taken them away.

They become changes of a prefix cache, as the events that engines publish over ZMQ do.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.errors import PollError
from sidestep.protocol.block_events import FIRST_MEDIUM, MAX_CHANGES, CacheChange, CacheEvents
from sidestep.protocol.limits import MAX_OBSERVATIONS, Count

MAX_EVENTS = 65536
MAX_LEVELS = 1 << 20
"""Most blocks whose level is remembered; further ones count as removed from the first."""
MEDIA: Mapping[int, str] = {0: FIRST_MEDIUM, 1: "CPU"}
"""Media by cache level, with the names that vLLM and SGLang use."""
_MASK = (1 << 64) - 1
_WINDOW = 0x9E6C63D0876A9A63
"""Multiplier of the window's size; odd and without a pattern."""
MAX_ITEM_HASHES = MAX_OBSERVATIONS
"""Hashes of one item: applying them takes about a millisecond."""

BlockHash = Annotated[int, Meta(ge=-(1 << 63))]


class _Block(msgspec.Struct, gc=False):
    block_hash: BlockHash
    cache_level: Count = 0


class _Level(msgspec.Struct, gc=False):
    old_value: Count = 0
    new_value: Count = 0


class _Created(msgspec.Struct, gc=False, tag_field="type", tag="created"):
    """The cache of a window is new."""


class _Stored(msgspec.Struct, gc=False, tag_field="type", tag="stored"):
    blocks: Annotated[list[_Block], Meta(max_length=MAX_OBSERVATIONS)] = []


class _Removed(msgspec.Struct, gc=False, tag_field="type", tag="removed"):
    block_hashes: Annotated[list[BlockHash], Meta(max_length=MAX_OBSERVATIONS)] = []


class _Updated(msgspec.Struct, gc=False, tag_field="type", tag="updated"):
    block_hash: BlockHash
    cache_level: _Level | None = None


class Event(msgspec.Struct, gc=False):
    """One event; token ids are not decoded."""

    event_id: Count
    data: _Created | _Stored | _Removed | _Updated
    window_size: Count = 0
    attention_dp_rank: Count = 0


_decoder = msgspec.json.Decoder(Annotated[list[Event], Meta(max_length=MAX_EVENTS)])


def decode(body: bytes) -> list[Event]:
    """Decode an answer.

    Raises:
        PollError: It has another form.
    """
    try:
        found: list[Event] = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise PollError("bad_answer", f"KV cache events: {error}") from None
    return found


class EventReader:
    """Turns events of one rank into items.

    A block's level is remembered, since a removal does not tell it.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._source = secrets.randbits(39)
        self._levels: dict[int, int] = {}
        """Levels of blocks that are not on the first one, by hash."""

    def items(self, events: Sequence[Event], now: float) -> list[CacheEvents]:
        """Return the items of ``events``, which have no time of their own."""
        packer = _Packer(self._source)
        for event in events:
            if self._last is None or event.event_id != self._last + 1:
                # The first one seen, a gap, or another process, whose first event is of a new cache.
                is_new = isinstance(event.data, _Created) and event.event_id == 0
                self._source += 1
                self._levels.clear()
                packer.start(self._source, CacheChange("begun" if is_new else "lost", now))
            self._last = event.event_id
            for change in self._changes(event, now):
                packer.add(change)
        return packer.items

    def _changes(self, event: Event, now: float) -> list[CacheChange]:
        data, window = event.data, event.window_size
        if isinstance(data, _Stored):
            found: dict[int, list[int]] = {}
            for block in data.blocks:
                key = _key(block.block_hash, window)
                self._move(key, block.cache_level)
                found.setdefault(block.cache_level, []).append(key)
            return [CacheChange("stored", now, keys, _medium(n)) for n, keys in found.items()]
        if isinstance(data, _Removed):
            gone: dict[int, list[int]] = {}
            for block_hash in data.block_hashes:
                key = _key(block_hash, window)
                gone.setdefault(self._levels.pop(key, 0), []).append(key)
            return [CacheChange("removed", now, keys, _medium(n)) for n, keys in gone.items()]
        if isinstance(data, _Updated) and data.cache_level is not None:
            key, level = _key(data.block_hash, window), data.cache_level
            self._move(key, level.new_value)
            return [
                CacheChange("removed", now, [key], _medium(level.old_value)),
                CacheChange("stored", now, [key], _medium(level.new_value)),
            ]
        return []

    def _move(self, key: int, level: int) -> None:
        if level and len(self._levels) < MAX_LEVELS:
            self._levels[key] = level
        else:
            self._levels.pop(key, None)


def _key(block_hash: int, window: int) -> int:
    """Return a hash that differs between the caches of several windows."""
    return (block_hash + window * _WINDOW) & _MASK


def _medium(level: int) -> str:
    return MEDIA.get(level, f"level {level}")


class _Packer:
    """Packs changes into items of limited size; adjacent ones of one kind and medium are merged."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._hashes = 0
        self.items: list[CacheEvents] = []

    def start(self, source: int, first: CacheChange) -> None:
        """Start a source."""
        self._source = source
        self._new_item(first.stamp).changes.append(first)

    def add(self, change: CacheChange) -> None:
        """Add a change."""
        item = self.items[-1] if self.items else self._new_item(change.stamp)
        if len(item.changes) == MAX_CHANGES or self._hashes + len(change.hashes) > MAX_ITEM_HASHES:
            item = self._new_item(change.stamp)
        self._hashes += len(change.hashes)
        last = item.changes[-1] if item.changes else None
        if last is not None and (last.kind, last.medium) == (change.kind, change.medium):
            last.hashes = [*last.hashes, *change.hashes]
        else:
            item.changes.append(change)

    def _new_item(self, now: float) -> CacheEvents:
        self._hashes = 0
        made = CacheEvents(0, now, self._source, [])
        self.items.append(made)
        return made
