"""Lookups of blocks in files: request traces, and captures of KV events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from sidestep.errors import ConfigError
from sidestep.protocol.block_events import FIRST_MEDIUM
from sidestep_adapters.recording.format import lines, opened

_STORED = ("BlockStored", "stored")
_MEDIUM, _GROUP = 4, 7
"""Positions behind the hashes of ``BlockStored`` as an array."""


def read_batch(line: bytes) -> Iterator[list[int] | None]:
    """Yield the blocks that each event of a line stored; None for a cleared cache.

    Blocks in other media are left out: engines copy blocks there that were not looked up.
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
    """Return a hash as a number that differs between groups of layers, which share hashes."""
    if not isinstance(one, int | str | bytes) or not isinstance(group, int | None):
        raise msgspec.ValidationError("a hash is neither a number nor text")
    if group:
        return hash((one, group))
    return one if isinstance(one, int) else hash(one)


_RECORDING = b"sidestep recording"
Blocks = list[int]


class _Request(msgspec.Struct):
    """A request of a trace: ids of the blocks of its prompt, equal for equal prefixes."""

    hash_ids: list[int | str]


_request = msgspec.json.Decoder(_Request)


class Trace:
    """The lookups in a file.

    Attributes:
        has_hits: False for a capture of KV events: engines publish only the blocks that they store,
            which are those that missed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.has_hits = True

    def __iter__(self) -> Iterator[Blocks | None]:
        """Yield the blocks of each request, or of each change of a cache; None: it was cleared.

        Raises:
            ConfigError: The file cannot be read, is damaged, or has no lookups; names the line.
        """
        number = 0
        read: Callable[[bytes], Iterator[Blocks | None]] | None = None
        try:
            # It is opened only once, so that it may be a pipe.
            with opened(self._path) as file:
                for number, line in enumerate(lines(self._path, file), start=1):  # noqa: B007 - for the message
                    if not line.strip():
                        continue
                    if read is None:
                        self.has_hits = self._is_trace(line)
                        read = _read_request if self.has_hits else read_batch
                    yield from read(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            form = "a request with hash_ids" if self.has_hits else "a batch of KV events"
            raise ConfigError(f"{self._path}: line {number} is not {form}: {error}") from None

    def _is_trace(self, line: bytes) -> bool:
        """Return whether the first line is that of a trace, rather than of a capture."""
        if line.lstrip().startswith(_RECORDING):
            raise ConfigError(f"{self._path}: a recording must be a file")
        found = msgspec.json.decode(line)
        fields = found.keys() if isinstance(found, dict) else {}
        return not (isinstance(found, list) or "events" in fields or "payload" in fields)


def _read_request(line: bytes) -> Iterator[Blocks]:
    yield [one if isinstance(one, int) else hash(one) for one in _request.decode(line).hash_ids]
