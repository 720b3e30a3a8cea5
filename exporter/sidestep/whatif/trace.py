"""Lookups of blocks in files: request traces, and captures of KV events."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sidestep.errors import ConfigError

_GZIP = b"\x1f\x8b"
_RECORDING = b"sidestep recording"
Blocks = list[int]


class _Request(msgspec.Struct):
    """A request of a trace: ids of the blocks of its prompt, equal for equal prefixes."""

    hash_ids: list[int | str]


_request = msgspec.json.Decoder(_Request)
_capture = msgspec.json.Decoder(tuple[float, list[tuple[str, list[int], str]]])


class Trace:
    """The lookups in a file.

    Raises:
        ConfigError: The file cannot be read, or has no lookups.

    Attributes:
        has_hits: False for a capture of KV events: engines publish the blocks that they store, which
            are those that missed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._open: Any = gzip.open if file.read(2) == _GZIP else open
            with self._open(path, "rb") as file:
                head = file.readline(1 << 20).lstrip()
        except (EOFError, zlib.error):
            raise ConfigError(f"{path}: the gzip data is cut short or damaged") from None
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
        if head.startswith(_RECORDING):
            raise ConfigError(f"{path}: a recording has no lookups of blocks by hash")
        self.has_hits = not head.startswith(b"[")

    def __iter__(self) -> Iterator[Blocks]:
        """Yield the blocks of each request.

        Raises:
            ConfigError: The file is damaged; names the line.
        """
        read = _read_request if self.has_hits else _read_stored
        number = 0
        try:
            with self._open(self._path, "rb") as lines:
                for number, line in enumerate(lines, start=1):  # noqa: B007 - for the message
                    if line.strip():
                        yield read(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            form = "a request with hash_ids" if self.has_hits else "a batch of KV events"
            raise ConfigError(f"{self._path}: line {number} is not {form}: {error}") from None
        except (EOFError, zlib.error):
            raise ConfigError(f"{self._path}: the gzip data is cut short or damaged") from None
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error.strerror or error}") from None


def _read_request(line: bytes) -> Blocks:
    return [one if isinstance(one, int) else hash(one) for one in _request.decode(line).hash_ids]


def _read_stored(line: bytes) -> Blocks:
    _, changes = _capture.decode(line)
    return [one for kind, hashes, _ in changes if kind == "stored" for one in hashes]
