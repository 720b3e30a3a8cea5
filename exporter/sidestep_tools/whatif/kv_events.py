"""Captures of KV events: the messages of an engine as lines of JSON.

A line is a batch ``[time, events, ...]`` or the same as a map, a message ``[topic, number, batch]``,
or a map whose ``payload`` is the batch as the engine sent it, in hexadecimal digits. An event is a
map or an array, as engines send it, or ``[kind, hashes, medium]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from sidestep.protocol.block_events import FIRST_MEDIUM

_STORED = ("BlockStored", "stored")
_MEDIUM, _GROUP = 4, 7
"""Places behind the hashes of ``BlockStored`` as an array."""


def read_batch(line: bytes) -> Iterator[list[int] | None]:
    """Yield the blocks that each event of a line stored; None for a cleared cache.

    Blocks in other media are left out: engines copy blocks there that were not looked up.

    Raises:
        MsgspecError: The line has another form.
    """
    for event in _events(msgspec.json.decode(line)):
        group: Any = None
        match event:
            case {"type": "BlockStored", "block_hashes": list(hashes)}:
                medium, group = event.get("medium"), event.get("group_idx")
            case ["BlockStored", list(hashes), *rest]:
                rest += [None] * (_GROUP + 1)
                medium, group = rest[_MEDIUM], rest[_GROUP]
            case ["stored", list(hashes), medium]:
                pass
            case {"type": "AllBlocksCleared"} | ["AllBlocksCleared" | "cleared", *_]:
                yield None
                continue
            case {"type": str(kind)} | [str(kind), *_] if kind not in _STORED:
                continue
            case _:
                raise msgspec.ValidationError("an event has neither a kind nor hashes")
        if medium in (None, "", FIRST_MEDIUM):
            yield [_number(one, group) for one in hashes]


def _events(batch: Any) -> list[Any]:
    match batch:
        case {"payload": str(payload)}:
            try:
                batch = msgspec.msgpack.decode(bytes.fromhex(payload))
            except ValueError as error:
                raise msgspec.ValidationError(str(error)) from None
        case [str(), _, payload, *_]:
            batch = payload
    match batch:
        case {"events": list(events)} | [_, list(events), *_]:
            return events
    raise msgspec.ValidationError("no list of events")


def _number(one: Any, group: Any) -> int:
    """Return a hash as a number; caches of several groups of layers have each hash once in each."""
    if not isinstance(one, int | str | bytes) or not isinstance(group, int | None):
        raise msgspec.ValidationError("a hash is neither a number nor text")
    if group:
        return hash((one, group))
    return one if isinstance(one, int) else hash(one)
