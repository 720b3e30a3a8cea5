"""Recorded ZeroMQ streams of engines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from exporters import DATA


class Published(NamedTuple):
    """One message of a stream."""

    topic: bytes
    seq: int
    payload: Any

    @property
    def encoded(self) -> bytes:
        """Encoded payload, the last frame."""
        return msgspec.msgpack.encode(self.payload)

    @property
    def frames(self) -> list[bytes]:
        """All frames of the message."""
        return [self.topic, self.seq.to_bytes(8, "big"), self.encoded]


def read(name: str) -> Iterator[Published]:
    """Yield the messages of a recording."""
    for line in gzip.decompress((DATA / f"{name}.jsonl.gz").read_bytes()).splitlines():
        topic, seq, payload = json.loads(line)
        yield Published(topic.encode(), seq, payload)
