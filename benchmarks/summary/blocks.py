"""Tracking of cached KV blocks by hash: what sampling saves.

The peer is the same tracker that samples every block. Blocks are stored and, once the cache is
full, removed in the same order, as in an engine whose cache turns over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from random import Random

from benchmarks.summary.rows import Figure, Row, Topic
from sidestep.protocol.block_events import CacheChange, CacheEvents
from sidestep.tracking.kv_blocks.cached import CachedBlocks
from sidestep.tracking.kv_blocks.sampling import Sampling

CACHE = 50_000
"""Blocks in the cache: within the tracker's capacity at either rate."""
HASHES = 64
"""Hashes that an item stores, and removes."""
RATE = Sampling().rate
NAME = f"KV blocks by hash, {100 * RATE:g} % sampled"
PEER = "the same with every block sampled"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return million hashes per second of CPU time, medians of the rounds."""
    items = events(1_000 if quick else 8_000)
    found: dict[float, list[float]] = {RATE: [], 1.0: []}
    for _ in range(3 if quick else 9):
        for rate, rates in found.items():
            rates.append(run(items, rate) / 1e6)
    return {NAME: Figure(statistics.median(found[RATE]), statistics.median(found[1.0]))}


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


BLOCKS = Topic(
    "The exporter: sampled KV blocks", (Row(NAME, "M hashes/s", PEER, more=True),), measure
)
