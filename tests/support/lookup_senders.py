"""An engine that pushes the lookups of conversations in its prefix cache."""

from __future__ import annotations

from prefix_caches import BLOCK_SIZE, PrefixCache, conversations
from sidestep_adapters.publisher.cache_lookups import LookupEvents
from sidestep_adapters.publisher.publisher import Publisher

CAPACITY = 800
"""Blocks of the cache, of 1 MiB each."""


def serve(publisher: Publisher) -> PrefixCache:
    """Serve conversations from a cache, and push their lookups; return the cache."""
    cache = PrefixCache(CAPACITY)
    events = LookupEvents(
        BLOCK_SIZE, CAPACITY, 1 << 20, lambda: (publisher.lookup_key, publisher.kv_sample_rate or 0)
    )
    for number, request in enumerate(conversations(1500, 1)):
        stamp = 1.0 + number / 1000
        events.looked_up(number, stamp, request.prompt, request.tokens, cache.admit(request))
        cache.release(request)
        events.released(number, stamp, [*request.prompt, *request.output])
        for item in events.items(stamp):
            publisher.push(item)
    return cache
