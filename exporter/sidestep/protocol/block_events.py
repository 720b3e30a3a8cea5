"""Raw events of KV blocks: of sampled physical blocks, and of what a cache holds by hash."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sidestep.protocol.limits import MAX_OBSERVATIONS, Count, Seconds, Text

ALLOCATED, TOUCHED, EVICTED, RESET = range(4)
"""A block was handed out; was hit by another request's prefix; was handed out again or
evicted; the whole cache was emptied (of any block)."""

MAX_CHANGES = 1024
MAX_HASHES = 4 * MAX_OBSERVATIONS
"""Of all changes of one item; a sender makes several."""

FIRST_MEDIUM = "GPU"
"""The one of a cache that has no other, and of events that name none."""

Rate = Annotated[float, Meta(ge=0.0, le=1.0)]
Hash = Annotated[int, Meta(ge=0)]
"""64 bits: what msgpack's integers hold."""


class BlockEvents(msgspec.Struct, array_like=True, gc=False, tag="be"):
    """Events of physical blocks, in order.

    Attributes:
        source: Changes with the sending process.
        rate: Share of all blocks that the sender samples: at ``ALLOCATED``, and
            from then on all events of that block until it is evicted.
        kinds: One byte an event.
        stamps: Monotonic seconds of the sender, one an event.
    """

    engine: Count
    stamp: Seconds
    source: Count
    rate: Rate
    kinds: Annotated[bytes, Meta(max_length=MAX_OBSERVATIONS)] = b""
    blocks: Annotated[list[Count], Meta(max_length=MAX_OBSERVATIONS)] = []
    stamps: Annotated[list[Seconds], Meta(max_length=MAX_OBSERVATIONS)] = []


class CacheChange(msgspec.Struct, array_like=True, gc=False):
    """Blocks that a prefix cache stored or removed at ``stamp``; ``cleared``: all of them.

    ``begun``: whoever tells is new, and all that it does will be told; ``lost``: some of it was
    not. Both go with another ``source``.
    """

    kind: Literal["stored", "removed", "cleared", "begun", "lost"]
    stamp: Seconds
    hashes: Annotated[list[Hash], Meta(max_length=MAX_OBSERVATIONS)] = []
    medium: Text = ""


class CacheEvents(msgspec.Struct, array_like=True, gc=False, tag="ce"):
    """Changes of a prefix cache by block hash, in order, on the sender's one clock."""

    engine: Count
    stamp: Seconds
    source: Count
    changes: Annotated[list[CacheChange], Meta(max_length=MAX_CHANGES)] = []
