"""Lookups of requests in a prefix cache, for a sample of the blocks.

A block's key is a number of 64 bits. Senders with the same salt make the same key of the same content.
The sample has the blocks whose keys lie in the top ``rate`` of all numbers. Hot blocks are those with which
many requests begin. One that is in the sample by chance, or is not, would distort the estimate. So
of the hot blocks at the beginning of a prompt, every ``HOT_STEP``-th is sent, whatever its key, and stands
for the blocks up to the next one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.protocol.block_events import Hash, Rate
from sidestep.protocol.limits import COUNT_LIMIT, Count, Seconds

HOT_STEP = 16
MAX_KEYS = 256
"""Maximum keys of one item that are looked up or released: to apply so many takes 2 ms."""
MAX_LOOKUPS = 256
"""Maximum events of one item."""

Keys = Annotated[list[Hash], Meta(max_length=MAX_KEYS)]
COUNTED, AGAIN, NOT_LOOKED_UP = range(3)
"""A lookup that the engine counts; one after a preemption, which it does not; a request that may
not read the cache, but whose blocks others can find."""


class Lookup(msgspec.Struct, array_like=True, gc=False, tag=1):
    """A request entered the batch, and holds its blocks from now on.

    A lookup with more than ``MAX_KEYS`` keys is followed by others of the same request that have
    the rest of ``sampled``, and 0 tokens and blocks.

    Attributes:
        tokens: Tokens that were looked up, with those in no full block.
        blocks: Full blocks that could be found. The block of the last token never is: an engine
            computes at least one token.
        found: Blocks that were found.
        hot_blocks: Blocks from the first on that are hot.
        hot: Every ``hot_step``-th of them, from the first on.
        sampled: Blocks of the sample that are not in ``hot``, in order.
        sampled_hot: How many of the first of ``sampled`` are hot, and have no weight.
        sampled_found: How many of the first of ``sampled`` were found.
        kind: ``COUNTED``, ``AGAIN`` or ``NOT_LOOKED_UP``.
    """

    request: Count
    stamp: Seconds
    tokens: Count = 0
    blocks: Count = 0
    found: Count = 0
    hot_blocks: Count = 0
    hot: Keys = []
    sampled: Keys = []
    sampled_hot: Count = 0
    sampled_found: Count = 0
    kind: Annotated[int, Meta(ge=COUNTED, le=NOT_LOOKED_UP)] = COUNTED
    hot_step: Annotated[int, Meta(ge=1, le=COUNT_LIMIT)] = HOT_STEP


class Released(msgspec.Struct, array_like=True, gc=False, tag=2):
    """A request ended or was preempted, and holds blocks no longer.

    One with more than ``MAX_KEYS`` keys releases them in several parts, the last ones first.

    Attributes:
        key_count: How many of the last keys of its lookup that it still holds are released.
        sampled: Blocks of the sample that it has filled since its lookup, in order; they are
            released as well.
    """

    request: Count
    stamp: Seconds
    key_count: Annotated[int, Meta(ge=0, le=MAX_KEYS)] = 0
    sampled: Keys = []


class Cleared(msgspec.Struct, array_like=True, gc=False, tag=3):
    """The cache was emptied."""

    stamp: Seconds


LookupEvent = Lookup | Released | Cleared


class CacheLookups(msgspec.Struct, array_like=True, gc=False, tag="cl"):
    """Uses of a prefix cache by requests, in order, with stamps of the sender's clock.

    Attributes:
        source: Changes with the sending process, the salt and the rate, and after events were lost.
        rate: Share of the blocks that is in the sample.
        block_size: Tokens of a block.
        before: Lookups before these since the cache was made: 0 means that these are all.
        capacity: Blocks that the cache can hold; 0: unknown.
        block_bytes: Bytes of a block on each of the engine's devices; 0: unknown.
    """

    engine: Count
    stamp: Seconds
    source: Count
    rate: Rate
    block_size: Annotated[int, Meta(ge=1, le=COUNT_LIMIT)]
    before: Count
    capacity: Count
    block_bytes: Count
    events: Annotated[list[LookupEvent], Meta(max_length=MAX_LOOKUPS)] = []
