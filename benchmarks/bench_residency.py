"""Cost of tracking KV blocks in the exporter: events a second of CPU time, bytes a block.

Events go into ``sidestep.tracking.kv_blocks`` as the structs that decoding makes of an item.
Cached hashes are stored, and removed three items later, as many a change as one step's prefill
fills, or one. Physical blocks are all followed: allocated, hit twice, and evicted. The lifetimes
that come out must be those of the sample, or the benchmark ends with an error.

Bytes are what tracemalloc counts, with the block's share of the table.

The longest call is the CPU time of one item, for which the event loop waits, where as many blocks are
tracked as may be: small items whose blocks are refused, then one that empties the cache, and
those that follow it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count, islice
from random import Random
from typing import Literal

from benchmarks.table import show
from sidestep.protocol.block_events import (
    ALLOCATED,
    EVICTED,
    RESET,
    TOUCHED,
    BlockEvents,
    CacheChange,
    CacheEvents,
)
from sidestep.tracking.kv_blocks.cached import CachedBlocks
from sidestep.tracking.kv_blocks.physical import PhysicalBlocks
from sidestep.tracking.kv_blocks.sampling import Sampling
from sidestep.tracking.kv_blocks.tracker import BlockObservations, BlockTracker

EVENTS = 4096
"""Of one item."""
CALL = 64
"""Events of an item whose call is timed: of one step."""
BEHIND = 3
"""Items between a block's first event and its last."""
UNBOUNDED = 1 << 40


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=256, help=f"of {EVENTS} events, a round")
    parser.add_argument("--hashes", type=int, default=16, help="of one change")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tracked", type=int, default=200_000, help="where bytes are counted")
    parser.add_argument("--capacity", type=int, default=100_000, help="where calls are timed")
    args = parser.parse_args()
    rows: list[list[str]] = []
    for size in (args.hashes, 1):
        changes = list(islice(cache_items(size), args.items))
        for rate in (0.01, 0.1, 1.0):
            speed = statistics.median(cached(changes, rate) for _ in range(args.rounds))
            what = f"cached hashes, {size} a change, rate {rate:g}"
            rows.append([what, f"{speed / 1e6:.2f}", "", "", "" if rows else "> 1"])
    events = list(islice(block_items(), args.items))
    speed = statistics.median(physical(events) for _ in range(args.rounds))
    rows.append(["physical blocks, all tracked", f"{speed / 1e6:.2f}", "", "", ""])
    for what, fill in (("cached hash", fill_hashes), ("physical block", fill_blocks)):
        for hits in (0, 4):
            size = bytes_of(fill, args.tracked, hits)
            rows.append([f"a {what} with {hits} hits", "", f"{size:.0f}", "", "< 300"])
    calls: dict[str, list[list[float]]] = {}
    for _ in range(args.rounds):
        for what, spent_by in timed_calls(args.capacity):
            calls.setdefault(what, []).append(spent_by)
    for what, rounds in calls.items():
        longest = statistics.median(max(each) for each in rounds)
        rows.append([f"an item while {what}", "", "", f"{longest * 1e3:.1f}", ""])
    show(
        f"CPU time over {args.items * EVENTS} events; bytes where {args.tracked} are tracked,"
        f" calls where {args.capacity} may be",
        ("what", "Mevents/s a core", "bytes", "longest call ms", "target"),
        rows,
    )
    print("\nEvery lifetime of a tracked block was observed.")


def cached(items: list[CacheEvents], rate: float) -> float:
    """Hashes stored or removed per second of CPU time."""
    tracker = CachedBlocks(Sampling(rate, True, UNBOUNDED))
    told = 0
    cpu, outs = 0.0, map(tracker.apply, items)
    while (timed := spent(outs)) is not None:
        took, out = timed
        cpu += took
        told += sum(count for found in out.cached.values() for _, count in found.lifetimes)
    removed = sum(
        len(change.hashes) for item in items for change in item.changes if change.kind == "removed"
    )
    # Five standard deviations of a sample of that size, and the rounding.
    if abs(told - removed) > 5 * (removed * (1 - rate) / rate) ** 0.5 + 0.5:
        raise SystemExit(f"{removed} hashes were removed, {told} lifetimes were told")
    return len(items) * EVENTS / cpu


def physical(items: list[BlockEvents]) -> float:
    """Events per second of CPU time."""
    tracker = PhysicalBlocks(Sampling(1.0, True, UNBOUNDED))
    told = 0
    cpu, outs = 0.0, map(tracker.apply, items)
    while (timed := spent(outs)) is not None:
        took, out = timed
        cpu += took
        told += len(out.lifetimes)
    evicted = sum(item.kinds.count(EVICTED) for item in items)
    if told != evicted:
        raise SystemExit(f"{evicted} blocks were evicted, {told} lifetimes were told")
    return sum(len(item.kinds) for item in items) / cpu


def spent(outs: Iterator[BlockObservations]) -> tuple[float, BlockObservations] | None:
    """The next item's CPU time, and what it told."""
    started = time.process_time()
    out = next(outs, None)
    return None if out is None else (time.process_time() - started, out)


def cache_items(size: int) -> Iterator[CacheEvents]:
    """Items of ``EVENTS`` hashes; each other one removes what an earlier one stored."""
    random = Random(1)
    stored: list[list[list[int]]] = []
    stamp = 0.0
    while True:
        stamp += 1.0
        hashes = [[random.getrandbits(64) for _ in range(size)] for _ in range(EVENTS // size)]
        stored.append(hashes)
        yield changes("stored", stamp, hashes)
        if len(stored) > BEHIND:
            yield changes("removed", stamp, stored.pop(0))


def block_items() -> Iterator[BlockEvents]:
    """Items in which some blocks begin and are hit, others are hit again, others end."""
    part = EVENTS // 4
    number = 0
    while True:
        number += 1
        first = number * part
        events = [
            (kind, block)
            for new in range(first, first + part)
            for kind, block in (
                (ALLOCATED, new),
                (TOUCHED, new),
                (TOUCHED, new - part),
                (EVICTED, new - BEHIND * part),
            )
            # Only what has begun.
            if block >= part
        ]
        kinds = bytes(kind for kind, _ in events)
        stamps = [number + event / EVENTS for event in range(len(events))]
        yield BlockEvents(0, float(number), 1, 1.0, kinds, [block for _, block in events], stamps)


def changes(
    kind: Literal["stored", "removed"], stamp: float, hashes: list[list[int]]
) -> CacheEvents:
    """One item."""
    return CacheEvents(0, stamp, 1, [CacheChange(kind, stamp, each, "GPU") for each in hashes])


def fill_hashes(count: int, hits: int) -> BlockTracker:
    """Track ``count`` hashes that are stored again so often, each at a time of its own."""
    tracker = CachedBlocks(Sampling(1.0, True, count))
    for hit in range(hits + 1):
        random = Random(1)
        for number in range(count):
            stored = changes("stored", hit + number / count, [[random.getrandbits(64)]])
            tracker.apply(stored)
    return tracker


def fill_blocks(count: int, hits: int) -> BlockTracker:
    """Track ``count`` blocks that are hit so often."""
    tracker = PhysicalBlocks(Sampling(1.0, True, count))
    for hit in range(hits + 1):
        kind = TOUCHED if hit else ALLOCATED
        for start in range(0, count, EVENTS):
            blocks = list(range(start, min(start + EVENTS, count)))
            stamps = [hit + block / count for block in blocks]
            tracker.apply(BlockEvents(0, 0.0, 1, 1.0, bytes([kind]) * len(blocks), blocks, stamps))
    return tracker


def bytes_of(fill: Callable[[int, int], BlockTracker], count: int, hits: int) -> float:
    """Memory of one tracked block."""
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracker = fill(count, hits)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if tracker.tracked != count:
        raise SystemExit(f"{tracker.tracked} of {count} blocks are tracked")
    return (after - before) / count


def timed_calls(capacity: int) -> Iterator[tuple[str, list[float]]]:
    """Seconds of each call while a tracker is full, is emptied, and observes what it held."""
    tracker = PhysicalBlocks(Sampling(1.0, True, capacity))
    numbers = count()

    def allocate() -> BlockEvents:
        blocks = list(islice(numbers, CALL))
        stamps = [float(block) for block in blocks]
        return BlockEvents(0, stamps[0], 1, 1.0, bytes([ALLOCATED]) * CALL, blocks, stamps)

    while tracker.tracked < capacity:
        tracker.apply(allocate())
    items = [allocate() for _ in range(capacity // CALL)]
    yield "blocks are refused", [call(tracker, item) for item in items]
    now = float(next(numbers))
    yield (
        "a cache is emptied",
        [call(tracker, BlockEvents(0, now, 1, 1.0, bytes([RESET]), [0], [now]))],
    )
    spent_after = []
    while tracker.tracked:
        spent_after.append(call(tracker, BlockEvents(0, now, 1, 1.0)))
    yield "what it held is told", spent_after


def call(tracker: PhysicalBlocks, item: BlockEvents) -> float:
    """Seconds of CPU time that applying one item takes."""
    started = time.process_time()
    tracker.apply(item)
    return time.process_time() - started


if __name__ == "__main__":
    main()
