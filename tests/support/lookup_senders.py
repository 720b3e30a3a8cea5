"""An engine that pushes the lookups of conversations in its prefix cache."""

from __future__ import annotations

import time

from prefix_caches import BLOCK_SIZE, PrefixCache, conversations
from sidestep.engines.vllm.wire import CacheStats, SchedulerStats, VllmStep
from sidestep.protocol.iteration_stats import FinishedRequestStats, IterationStats
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.cache_lookups import LookupEvents
from sidestep_adapters.publisher.publisher import Publisher

CAPACITY = 800
"""Blocks of the cache, of 1 MiB each."""

FEW = 300
"""Requests of an engine whose series need values, whatever these are."""
WALL = 1e9
PATIENCE = 60.0
"""Seconds until an exporter answers that shares its event loop with others."""


def serve_model(endpoint: str, model: str) -> None:
    """Serve conversations from two engines of a model, and end them."""
    for number in range(2):
        labels = {"engine": str(number), "model_name": model}
        info = EngineInfo(f"{model}/{number}", "vllm", labels)
        publisher = Publisher(endpoint, f"{model}/{number}/core", [info])
        deadline = time.monotonic() + PATIENCE
        while not publisher.lookup_key and time.monotonic() < deadline:
            time.sleep(0.05)
        serve(publisher, FEW)
        publisher.close(PATIENCE)


def serve(publisher: Publisher, requests: int = 1500) -> PrefixCache:
    """Serve conversations from a cache, and push their lookups; return the cache."""
    cache = PrefixCache(CAPACITY)
    events = LookupEvents(
        BLOCK_SIZE, CAPACITY, 1 << 20, lambda: (publisher.lookup_key, publisher.kv_sample_rate or 0)
    )
    for number, request in enumerate(conversations(requests, 1)):
        stamp = 1.0 + number / 1000
        found = cache.admit(request)
        events.looked_up(number, stamp, request.prompt, request.tokens, found)
        counted = SchedulerStats(prefix_cache_stats=CacheStats(False, 1, request.tokens, found))
        ended = IterationStats(
            time_to_first_tokens_iter=[0.1],
            finished_requests=[FinishedRequestStats(e2e_latency=0.2)],
        )
        publisher.push(VllmStep(0, stamp, WALL, counted, ended))
        cache.release(request)
        events.released(number, stamp, [*request.prompt, *request.output])
        for item in events.items(stamp):
            publisher.push(item)
    return cache
