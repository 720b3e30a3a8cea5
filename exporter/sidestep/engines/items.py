"""Items: the updates of an engine that a stream carries. ``Dialects`` decodes them."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Item(Protocol):
    """A wire struct of a dialect, or ``Samples``, which all dialects share.

    Attributes:
        engine: Index into the ``engines`` of the stream's last Hello.
        stamp: The sender's host-monotonic clock in seconds, which orders gauges.
    """

    engine: int
    stamp: float


_encoder = msgspec.msgpack.Encoder()


def encode_item(item: Item) -> bytes:
    """Encode ``item`` for a Batch."""
    return _encoder.encode(item)
