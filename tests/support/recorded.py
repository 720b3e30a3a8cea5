"""Recorded streams, as their publishers sent them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from exporters import DATA


class Published(NamedTuple):
    """One message; ``payload`` is what was encoded."""

    topic: bytes
    seq: int
    payload: Any

    @property
    def encoded(self) -> bytes:
        """The last frame."""
        return msgspec.msgpack.encode(self.payload)

    @property
    def frames(self) -> list[bytes]:
        """The message."""
        return [self.topic, self.seq.to_bytes(8, "big"), self.encoded]


def read(name: str) -> Iterator[Published]:
    """The messages of a recording."""
    for line in gzip.decompress((DATA / f"{name}.jsonl.gz").read_bytes()).splitlines():
        topic, seq, payload = json.loads(line)
        yield Published(topic.encode(), seq, payload)
