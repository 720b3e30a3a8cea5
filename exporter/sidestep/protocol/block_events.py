"""Raw KV block events: of sampled physical blocks, and of a prefix cache's blocks by hash."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sidestep.protocol.limits import MAX_OBSERVATIONS, Count, Seconds, Text

ALLOCATED, TOUCHED, EVICTED, RESET = range(4)
"""A block was allocated. It was hit by another request's prefix. It was reallocated or evicted. The whole
cache was reset, and ``blocks`` is ignored."""

MAX_CHANGES = 1024
MAX_HASHES = 4 * MAX_OBSERVATIONS
"""Maximum hashes in all changes of one item; a sender splits larger ones."""

FIRST_MEDIUM = "GPU"
"""Medium of a cache that has only one, and of events without a medium."""

Rate = Annotated[float, Meta(ge=0.0, le=1.0)]
Hash = Annotated[int, Meta(ge=0)]
"""64 bits: what msgpack's integers hold."""


class BlockEvents(msgspec.Struct, array_like=True, gc=False, tag="be"):
    """Events of physical blocks, in order.

    Attributes:
        source: Changes with the sending process.
        rate: Share of all blocks that the sender samples: at ``ALLOCATED``, and
            from then on all events of that block until it is evicted.
        kinds: One byte per event.
        blocks: Number of the block, one per event.
        stamps: Monotonic seconds of the sender, one per event.
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

    ``begun``: a new sender starts, whose events are complete from now on; ``lost``: some events
    were lost. Both come with a new ``source``.
    """

    kind: Literal["stored", "removed", "cleared", "begun", "lost"]
    stamp: Seconds
    hashes: Annotated[list[Hash], Meta(max_length=MAX_OBSERVATIONS)] = []
    medium: Text = ""


class CacheEvents(msgspec.Struct, array_like=True, gc=False, tag="ce"):
    """Changes of a prefix cache by block hash, in order, with stamps of the sender's clock."""

    engine: Count
    stamp: Seconds
    source: Count
    changes: Annotated[list[CacheChange], Meta(max_length=MAX_CHANGES)] = []
