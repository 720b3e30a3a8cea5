"""Tracking of cached KV blocks by hash, and of lookups in the prefix cache: what sampling saves.

The peer is the same tracker that samples every block. Blocks are stored and, once the cache is
full, removed in the same order, as in an engine whose cache turns over. Prompts of ``HASHES`` blocks
are looked up, each by one request in ten.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from random import Random

from benchmarks.summary.rows import Figure, Row, Topic
from sidestep.protocol.block_events import CacheChange, CacheEvents
from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.tracking.kv_blocks.cached import CachedBlocks
from sidestep.tracking.kv_blocks.lookups import LookupSettings, LookupTracker
from sidestep.tracking.kv_blocks.tracker import Sampling
from sidestep_adapters.publisher.cache_lookups import LookupEvents

CACHE = 50_000
"""Blocks in the cache: within the tracker's capacity at either rate."""
HASHES = 64
"""Number of hashes that an item stores and removes."""
RATE = Sampling().rate
NAME = f"KV blocks by hash, {100 * RATE:g} % sampled"
LOOKED_UP = f"lookups of KV blocks, {100 * RATE:g} % sampled"
PROMPTS = 5_000
"""Different prompts that are looked up."""
BLOCK_TOKENS = 16
PEER = "the same with every block sampled"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return million hashes per second of CPU time, medians of the rounds."""
    items = events(1_000 if quick else 8_000)
    found: dict[float, list[float]] = {RATE: [], 1.0: []}
    for _ in range(3 if quick else 9):
        for rate, rates in found.items():
            rates.append(run(items, rate) / 1e6)
    count = 2_000 if quick else 10_000
    requests = {rate: lookups(count, rate) for rate in found}
    looked_up: dict[float, list[float]] = {RATE: [], 1.0: []}
    for _ in range(3):
        for rate, rates in looked_up.items():
            rates.append(count * HASHES / run_lookups(requests[rate]) / 1e6)
    return {
        name: Figure(statistics.median(rates[RATE]), statistics.median(rates[1.0]))
        for name, rates in ((NAME, found), (LOOKED_UP, looked_up))
    }


def run(items: Sequence[CacheEvents], rate: float) -> float:
    """Return hashes per second of CPU time, of a cache that is full."""
    blocks = CachedBlocks(Sampling(rate))
    full = CACHE // HASHES
    for item in items[:full]:
        blocks.apply(item)
    observed = 0
    begin = time.thread_time()
    for item in items[full:]:
        observed += sum(len(each.lifetimes) for each in blocks.apply(item).cached.values())
    spent = time.thread_time() - begin
    removed = HASHES * (len(items) - full)
    if not 0.8 * rate <= observed / removed <= 1.2 * rate:
        raise SystemExit(f"{observed} of {removed} lifetimes at a rate of {rate}")
    return 2 * removed / spent


def events(count: int) -> Sequence[CacheEvents]:
    """Return items that fill the cache, and ``count`` in which it turns over."""
    random = Random(1)
    stored: list[list[int]] = []
    items = []
    for number in range(CACHE // HASHES + count):
        stamp = number * 0.01
        stored.append([random.getrandbits(64) for _ in range(HASHES)])
        changes = [CacheChange("stored", stamp, stored[-1], "GPU")]
        if number >= CACHE // HASHES:
            oldest = stored[number - CACHE // HASHES]
            changes.append(CacheChange("removed", stamp, oldest, "GPU"))
        items.append(CacheEvents(0, stamp, 1, changes))
    return items


def run_lookups(items: Sequence[CacheLookups]) -> float:
    """Return seconds of CPU time that a tracker takes for the items."""
    tracker = LookupTracker(LookupSettings())
    begin = time.thread_time()
    for item in items:
        tracker.apply(item)
    return time.thread_time() - begin


def lookups(count: int, rate: float) -> Sequence[CacheLookups]:
    """Return the items of ``count`` requests, of which each ends before the next begins."""
    random, known = Random(1), set[int]()
    made = LookupEvents(BLOCK_TOKENS, 0, 0, lambda: (b"key", rate))
    prompts = [[random.randbytes(32) for _ in range(HASHES)] for _ in range(PROMPTS)]
    items: list[CacheLookups] = []
    for number in range(count):
        index = random.randrange(PROMPTS)
        tokens = HASHES * BLOCK_TOKENS + 1
        found = tokens if index in known else 0
        known.add(index)
        made.looked_up(number, number * 0.01, prompts[index], tokens, found)
        made.released(number, number * 0.01, prompts[index])
        items += made.items(number * 0.01)
    return items


BLOCKS = Topic(
    "The exporter: sampled KV blocks",
    (
        Row(NAME, "M hashes/s", PEER, more=True),
        Row(LOOKED_UP, "M lookups/s", PEER, more=True),
    ),
    measure,
)
