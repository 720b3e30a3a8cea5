"""Lookups of requests in a prefix cache as wire items; runs in the publisher thread."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from itertools import takewhile

from sidestep.protocol.cache_lookups import (
    AGAIN,
    COUNTED,
    HOT_STEP,
    MAX_KEYS,
    MAX_LOOKUPS,
    CacheLookups,
    Cleared,
    Lookup,
    LookupEvent,
    Released,
)
from sidestep.tracking.kv_blocks.hot_blocks import HotBlocks

HASH_BYTES = 8
ALL = 1 << 8 * HASH_BYTES
MAX_HOT = 4096
"""Approximate limit of hot blocks, and limit of a prompt's blocks that may be hot."""
LEAST_SAMPLED = 1024
"""Least blocks of the cache in the sample: with fewer, the curve is a guess."""
STEP = 4
"""Ratio of two neighbouring rates; few rates, so that replicas with nearly equal caches share one."""


class LookupEvents:
    """Maker of one prefix cache's items.

    Blocks are named by the engine's own hashes, of which each includes those before it.

    Args:
        capacity: Blocks that the cache can hold; 0: unknown.
        block_bytes: Bytes of a block; 0: unknown.
        sampling: Returns the exporter's key and the share of blocks that it wants. Nothing is sent
            without a key, or for a share of 0.
    """

    def __init__(
        self,
        block_size: int,
        capacity: int,
        block_bytes: int,
        sampling: Callable[[], tuple[bytes, float]],
        *,
        engine: int = 0,
    ) -> None:
        self.block_size = block_size
        self._engine = engine
        self._capacity = capacity
        self._block_bytes = block_bytes
        self._sampling = sampling
        self._least_rate = least_rate(capacity) if capacity else 0.0
        self._key, self._rate = b"", 0.0
        self._floor = ALL
        self._below = bytes(HASH_BYTES)
        self._before = self._lookups = 0
        self._events: list[LookupEvent] = []
        self._sent: dict[int, tuple[int, int]] = {}
        """Blocks and keys of the lookup, by running request."""
        self.restart()

    def restart(self) -> None:
        """Begin a new source, since events were lost."""
        self._source = secrets.randbits(40)
        self._hot = HotBlocks(MAX_HOT)
        self._events.clear()
        self._sent.clear()
        self._before = self._lookups

    def looked_up(
        self,
        request: int,
        stamp: float,
        hashes: Sequence[bytes],
        tokens: int,
        found: int,
        *,
        kind: int = COUNTED,
    ) -> None:
        """Add a lookup of ``tokens`` tokens in full blocks with ``hashes``; ``found`` were found."""
        is_on = self.is_on()
        self._lookups += 1
        if not is_on:
            return
        if request in self._sent:
            # A session continues: the engine looks nothing up.
            self.released(request, stamp, hashes)
            kind = AGAIN
        size = self.block_size
        # The block of the last token is never found.
        hashes = hashes[: max(tokens - 1, 0) // size]
        found_blocks = min(found // size, len(hashes))
        head = hashes[:MAX_HOT]
        self._hot.note(head)
        hot = sum(1 for _ in takewhile(self._hot.hot.__contains__, head))
        keys = [self._key_of(one) for one in hashes[:hot:HOT_STEP]]
        # Tokens found in a part of a block do not count, unless they are in a full block.
        tokens = max(tokens - max(found - found_blocks * size, 0), len(hashes) * size)
        event = Lookup(request, stamp, tokens, len(hashes), found_blocks, hot, keys, kind=kind)
        places = self._places(hashes)
        sampled = [place for place in places if place >= hot or place % HOT_STEP]
        self._sent[request] = len(hashes), len(keys) + len(sampled)
        self._events.append(event)
        for part, start in enumerate(range(-len(keys), len(sampled), MAX_KEYS)):
            if part:
                event = Lookup(request, stamp, kind=kind)
                self._events.append(event)
            places = sampled[max(start, 0) : start + MAX_KEYS]
            event.sampled = [self._key_of(hashes[place]) for place in places]
            event.sampled_hot = sum(place < hot for place in places)
            event.sampled_found = sum(place < found_blocks for place in places)

    def released(self, request: int, stamp: float, hashes: Sequence[bytes]) -> None:
        """Add the end of a request, or its preemption; ``hashes`` are those of its full blocks.

        Of the blocks added since its lookup, at most as many as an item holds are sent.
        """
        sent = self._sent.pop(request, None)
        if sent is None:
            return
        blocks, keys = sent
        new = hashes[blocks:]
        more = [self._key_of(new[place]) for place in self._places(new)][:MAX_KEYS]
        while keys or more:
            part = min(keys, MAX_KEYS - len(more))
            self._events.append(Released(request, stamp, part, more))
            keys -= part
            more = []

    def cleared(self, stamp: float) -> None:
        """Add that the cache was emptied."""
        if self.is_on():
            self._events.append(Cleared(stamp))

    def items(self, stamp: float) -> list[CacheLookups]:
        """Return the items of what was added since the last call."""
        events, self._events = self._events, []
        batches: list[list[LookupEvent]] = []
        free = 0
        for event in events:
            keys = _keys(event)
            if not batches or keys > free or len(batches[-1]) == MAX_LOOKUPS:
                batches.append([])
                free = MAX_KEYS
            batches[-1].append(event)
            free -= keys
        return [self._item(stamp, batch) for batch in batches]

    def _item(self, stamp: float, events: list[LookupEvent]) -> CacheLookups:
        before = self._before
        # Those with the rest of a long lookup have no tokens.
        self._before += sum(isinstance(event, Lookup) and event.tokens > 0 for event in events)
        return CacheLookups(
            self._engine,
            stamp,
            self._source,
            self._rate,
            self.block_size,
            before,
            self._capacity,
            self._block_bytes,
            events,
        )

    def is_on(self) -> bool:
        """Return whether the exporter wants lookups, at the rate that it wants now."""
        key, rate = self._sampling()
        rate = max(rate, self._least_rate) if rate else 0.0
        if (key, rate) != (self._key, self._rate):
            self._key, self._rate = key, rate
            self._floor = floor = ALL - int(rate * ALL)
            # At a rate of 1 every hash is below.
            self._below = (ALL - floor).to_bytes(HASH_BYTES, "big") if floor else b"\xff" * 64
            self.restart()
        return bool(key and rate)

    def _places(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the places of those of ``hashes`` that are in the sample."""
        below = self._below
        return [place for place, one in enumerate(hashes) if one < below]

    def _key_of(self, one: bytes) -> int:
        """Return the key of a block, from which its content cannot be recognized without the exporter's key."""
        digest = hashlib.blake2b(one, digest_size=HASH_BYTES, key=self._key).digest()
        number = int.from_bytes(digest, "big")
        if one < self._below:
            return self._floor + number % (ALL - self._floor)
        return number % self._floor


def least_rate(capacity: int) -> float:
    """Return the least share of the blocks to sample, of a cache that can hold ``capacity`` blocks."""
    rate = 1.0
    while rate * capacity >= STEP * LEAST_SAMPLED:
        rate /= STEP
    return rate


def _keys(event: LookupEvent) -> int:
    if isinstance(event, Lookup):
        return len(event.hot) + len(event.sampled)
    return event.key_count + len(event.sampled) if isinstance(event, Released) else 0
