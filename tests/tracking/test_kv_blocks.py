"""Block lifetimes compared with models written from the definitions."""

from __future__ import annotations

import gc
import gzip
import json
import math
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import DATA
from kv_blocks import (
    CACHED,
    PHYSICAL,
    Change,
    Event,
    NaiveBlocks,
    NaiveCache,
    any_blocks,
    any_changes,
    block_item,
    cache_item,
    cached,
    chunks,
    legal_blocks,
    physical,
    removed,
    stored,
    values,
)
from sidestep.errors import WireError
from sidestep.protocol.block_events import (
    ALLOCATED,
    EVICTED,
    RESET,
    TOUCHED,
    BlockEvents,
    CacheEvents,
)
from sidestep.protocol.limits import MAX_LABELS
from sidestep.tracking.kv_blocks.cached import CachedBlocks
from sidestep.tracking.kv_blocks.physical import SLICE, PhysicalBlocks
from sidestep.tracking.kv_blocks.tracker import (
    BlockObservations,
    CachedObservations,
    Sampling,
)

UNBOUNDED = 1 << 40


def sampling(rate: float = 1.0, capacity: int = UNBOUNDED, *, scale: bool = True) -> Sampling:
    """Return settings that by default track every block."""
    return Sampling(rate, scale, capacity)


def physical_blocks(capacity: int = UNBOUNDED, *, scale: bool = True) -> PhysicalBlocks:
    """Return a new tracker."""
    return PhysicalBlocks(sampling(capacity=capacity, scale=scale))


def cached_blocks(rate: float = 1.0, capacity: int = UNBOUNDED) -> CachedBlocks:
    """Return a new tracker."""
    return CachedBlocks(sampling(rate, capacity))


def chunked(events: list[Any], sizes: list[int]) -> Iterator[list[Any]]:
    """Yield ``events`` in pieces of these sizes, and the rest."""
    start = 0
    for size in sizes:
        yield events[start : start + size]
        start += size
    yield events[start:]


def merged(outs: list[BlockObservations]) -> BlockObservations:
    """Return all observations as one."""
    counts = ("resets", "refused", "abandoned", "unknown")
    whole = BlockObservations(**{name: sum(getattr(out, name) for out in outs) for name in counts})
    for out in outs:
        for kind in (*PHYSICAL, "stores", "absences"):
            getattr(whole, kind).extend(getattr(out, kind))
        for name, observed in out.cached.items():
            into = whole.cached.setdefault(name, CachedObservations())
            for kind in CACHED:
                getattr(into, kind).extend(getattr(observed, kind))
    return whole


@given(legal_blocks())
def test_an_engines_blocks_equal_the_definitions(events: list[Event]) -> None:
    """If every event arrives, every interval is observed."""
    ours, naive = physical_blocks(), NaiveBlocks(events)

    out = ours.apply(block_item(events))

    assert physical(out) == naive.out
    assert ours.tracked == len(naive.open)
    assert (out.unknown, out.abandoned, out.refused) == (0, 0, 0)


@given(any_blocks)
def test_intervals_of_lost_and_disordered_events_are_omitted(events: list[Event]) -> None:
    """No interval is negative or observed twice."""
    ours, naive = physical_blocks(), NaiveBlocks(events)

    out = ours.apply(block_item(events))

    assert physical(out) == naive.out
    assert (out.unknown, out.abandoned) == (naive.unknown, naive.abandoned)
    assert ours.tracked == len(naive.open)
    assert all(value >= 0 for kind in PHYSICAL for value, _ in getattr(out, kind))


@given(any_changes)
def test_cached_hashes_equal_the_definitions(changes: list[Change]) -> None:
    """Each medium is tracked by itself, whatever the order of events."""
    ours, naive = cached_blocks(), NaiveCache(changes)

    out = ours.apply(cache_item(changes))

    assert cached(out) == naive.out
    assert [value for value, _ in out.stores] == naive.stores
    assert [value for value, _ in out.absences] == naive.absences
    assert (ours.tracked, out.unknown) == (naive.tracked, naive.unknown)
    assert all(
        value >= 0
        for observed in out.cached.values()
        for kind in CACHED
        for value, _ in getattr(observed, kind)
    )


@given(any_blocks, chunks, st.integers(1, 8), st.sampled_from([1.0, 0.6, 0.03]))
def test_any_division_of_block_events_into_items_is_equal(
    events: list[Event], sizes: list[int], capacity: int, rate: float
) -> None:
    """The observations and their order are the same, also at the capacity."""
    whole, parts = physical_blocks(capacity), physical_blocks(capacity)

    at_once = whole.apply(block_item(events, rate))
    piecewise = [parts.apply(block_item(piece, rate)) for piece in chunked(events, sizes)]

    assert merged(piecewise) == at_once
    assert parts.tracked == whole.tracked <= capacity


@given(any_changes, chunks, st.integers(1, 8), st.sampled_from([1.0, 0.6, 0.03]))
def test_any_division_of_cache_events_into_items_is_equal(
    changes: list[Change], sizes: list[int], capacity: int, rate: float
) -> None:
    """The observations and their order are the same, also at the capacity."""
    whole, parts = cached_blocks(rate, capacity), cached_blocks(rate, capacity)

    at_once = whole.apply(cache_item(changes))
    piecewise = [parts.apply(cache_item(piece)) for piece in chunked(changes, sizes)]
    # A clear makes up for what was stored twice before it, in the item or in an earlier one.
    at_once.surplus = {}

    assert merged(piecewise) == at_once
    assert parts.tracked == whole.tracked <= capacity


def test_a_reset_is_observed_in_slices() -> None:
    """No call observes a whole cache; the remaining blocks stay tracked."""
    ours = physical_blocks()
    ours.apply(block_item([(ALLOCATED, block, 1.0) for block in range(3 * SLICE + 1)]))

    outs = [ours.apply(block_item([(RESET, 0, 3.0)]))]
    left = ours.tracked
    while ours.waiting:
        outs.append(ours.drain())

    assert [len(out.reset_ages) for out in outs] == [SLICE, SLICE, SLICE, 1]
    assert [out.resets for out in outs] == [1, 0, 0, 0]
    assert (left, ours.tracked) == (2 * SLICE + 1, 0)


def test_a_block_has_the_weight_of_the_rate_at_its_birth() -> None:
    """Later rates do not change it, even within the same second."""
    ours = physical_blocks()
    ours.apply(block_item([(ALLOCATED, 1, 1.0)], 0.5))
    ours.apply(block_item([(ALLOCATED, 2, 1.0)], 0.125))
    ours.apply(block_item([(ALLOCATED, 3, 1.0)], 1.0))

    out = ours.apply(block_item([(EVICTED, block, 2.0) for block in (1, 2, 3)], 0.25))

    assert [count for _, count in out.lifetimes] == [2, 8, 1]


@pytest.mark.parametrize(
    "item",
    [
        BlockEvents(0, 0.0, 2, 1.0, bytes([ALLOCATED]), [1, 2], [1.0]),
        BlockEvents(0, 0.0, 2, 1.0, bytes([ALLOCATED]), [1], []),
        BlockEvents(0, 0.0, 2, 1.0, bytes([ALLOCATED, RESET + 1]), [1, 2], [1.0, 1.0]),
        BlockEvents(0, 0.0, 2, 0.0, bytes([EVICTED, ALLOCATED]), [5, 1], [9.0, 9.0]),
        BlockEvents(0, 0.0, 2, 5e-324, bytes([ALLOCATED]), [1], [1.0]),
    ],
)
def test_a_contradictory_item_changes_nothing(item: BlockEvents) -> None:
    """A contradictory item is refused before its first event and its source are applied."""
    ours = physical_blocks()
    ours.apply(block_item([(ALLOCATED, 5, 1.0)]))

    with pytest.raises(WireError, match="bad_item"):
        ours.apply(item)

    assert ours.tracked == 1
    assert ours.apply(block_item([(EVICTED, 5, 3.0)])) == BlockObservations(
        lifetimes=[(2.0, 1)], idles=[(2.0, 1)], reuses=[(0, 1)]
    )


def test_the_number_of_media_is_limited() -> None:
    """An item with one more is refused whole."""
    ours = cached_blocks()
    ours.apply(cache_item([("stored", [1], str(n), 1.0) for n in range(MAX_LABELS)]))

    with pytest.raises(WireError, match="bad_item"):
        ours.apply(stored([2], 2.0, "more"))

    assert ours.tracked == MAX_LABELS
    assert "0" in ours.apply(removed([1], 2.0, "0")).cached
    assert ours.apply(removed([1], 2.0, "more")) == BlockObservations()


HASHES: dict[str, Callable[[Random, int], int]] = {
    "random": lambda random, _: random.getrandbits(64),
    "counting": lambda _, number: number,
    "aligned": lambda _, number: number << 40,
}


def sample(hashes: list[int], ours: CachedBlocks) -> set[int]:
    """Return the hashes that ``ours`` tracks."""
    ours.apply(stored(hashes, 1.0))
    found = set()
    for number, value in enumerate(hashes):
        if ours.apply(removed([value], 2.0 + number)).cached:
            found.add(value)
    return found


@pytest.mark.parametrize("kind", HASHES)
def test_a_sample_is_a_subset_of_every_larger_one(kind: str) -> None:
    """Whatever the hashes look like, it has the size of its rate."""
    random = Random(7)
    hashes = list({HASHES[kind](random, number) for number in range(3000)})
    rates = (0.0, 0.03, 0.1, 0.5, 1.0)

    samples = [sample(hashes, cached_blocks(rate)) for rate in rates]

    for smaller, larger in pairwise(samples):
        assert smaller <= larger
    for rate, found in zip(rates, samples, strict=True):
        spread = math.sqrt(len(hashes) * rate * (1 - rate))
        assert abs(len(found) - rate * len(hashes)) <= 4 * spread


@pytest.mark.parametrize("rate", [0.5, 0.0625])
def test_a_new_rate_applies_to_new_blocks(rate: float) -> None:
    """Tracked blocks are observed to their end, with the weight of their birth."""
    early, late = list(range(4000)), list(range(10_000, 14_000))
    settings = sampling(0.25)
    ours, fresh = CachedBlocks(settings), cached_blocks(rate)
    ours.apply(stored(early, 1.0))
    before = ours.tracked

    settings.rate = rate
    ours.apply(stored(late, 2.0))
    fresh.apply(stored(late, 2.0))
    hits = [ours.apply(stored(early, stamp)).cached.get("GPU") for stamp in (3.0, 5.0)]
    of_early = ours.apply(removed(early, 6.0)).cached["GPU"]
    # A hit of a hash that is sampled at the higher rate only has begun a life.
    of_late = ours.apply(removed(late, 6.0)).cached["GPU"].lifetimes

    known = [(value, count) for value, count in of_early.lifetimes if value == 5.0]
    assert hits[0] is None
    assert hits[1] is not None
    assert hits[1].gaps[:1] == [(2.0, 4)]
    assert known == [(5.0, 4)] * before
    assert of_late == fresh.apply(removed(late, 6.0)).cached["GPU"].lifetimes
    assert {count for _, count in of_late} == {round(1 / rate)}


def test_a_restarted_sender_abandons_its_blocks() -> None:
    """The clock and the cache of the previous process are gone."""
    blocks, hashes = physical_blocks(), cached_blocks()
    blocks.apply(block_item([(ALLOCATED, 1, 1.0), (ALLOCATED, 2, 1.0)]))
    hashes.apply(stored([1, 2, 3], 1.0))

    out = blocks.apply(block_item([(EVICTED, 1, 50.0)], source=2))
    of_cache = hashes.apply(cache_item([("removed", [1], "GPU", 50.0)], source=9))

    assert out == BlockObservations(abandoned=2, unknown=1)
    assert of_cache == BlockObservations(abandoned=3)
    assert (blocks.tracked, hashes.tracked) == (0, 0)


def test_blocks_over_the_capacity_are_refused_and_counted() -> None:
    """Their later events are not unknown; tracked blocks are observed in full."""
    ours = physical_blocks(capacity=10)

    out = ours.apply(block_item([(ALLOCATED, block, 1.0) for block in range(15)]))
    full = ours.tracked
    ended = [(kind, block, 3.0) for block in range(15) for kind in (TOUCHED, EVICTED)]
    after = ours.apply(block_item(ended))
    reset = ours.apply(block_item([(RESET, 0, 4.0), (EVICTED, 1, 5.0)]))

    assert (out.refused, full, ours.tracked) == (5, 10, 0)
    assert after.lifetimes == [(2.0, 1)] * 10
    assert (after.refused, after.unknown) == (0, 0)
    assert reset.unknown == 1


def test_a_smaller_capacity_abandons_the_newest_blocks() -> None:
    """The next call counts them; their later events are not unknown."""
    blocks, hashes = physical_blocks(), cached_blocks()
    blocks.apply(block_item([(ALLOCATED, block, float(block)) for block in range(10)]))
    hashes.apply(stored(list(range(5)), 1.0))
    hashes.apply(stored(list(range(5)), 1.0, "CPU"))

    for tracker in (blocks, hashes):
        tracker.resize(4)
        assert tracker.tracked == 4
    out = blocks.apply(block_item([(EVICTED, block, 20.0) for block in range(10)]))

    assert values(out.lifetimes) == [17.0, 18.0, 19.0, 20.0]
    assert (out.abandoned, out.unknown) == (6, 0)
    assert hashes.drain().abandoned == 6


@pytest.mark.parametrize("rate", [0.03, 0.7])
def test_scaled_counts_add_up_to_the_weight(rate: float) -> None:
    """They are whole numbers that differ by at most one, and their sum is exact."""
    ours = physical_blocks()
    counts: list[int] = []
    for number in range(500):
        out = ours.apply(block_item([(ALLOCATED, 1, 1.0), (EVICTED, 1, 2.0 + number)], rate))
        counts += [count for _, count in out.lifetimes]
        assert abs(sum(counts) - len(counts) / rate) <= 0.5 + 1e-6

    assert len(counts) == 500
    assert set(counts) <= {math.floor(1 / rate), math.ceil(1 / rate)}


def physical_turnover(count: int) -> Iterator[BlockEvents]:
    """Return items of blocks that are allocated, then evicted, allocated and hit again, twice."""
    for turn in range(3):
        kinds = (EVICTED, ALLOCATED, *[TOUCHED] * 4) if turn else (ALLOCATED,)
        for start in range(0, count, 250):
            blocks = range(start, start + 250)
            yield block_item(
                [(kind, b + 1000, 100.0 * turn + b / 1e6) for b in blocks for kind in kinds], 0.3
            )


def cached_twice(count: int) -> Iterator[CacheEvents]:
    """Return items of hashes that are stored twice."""
    for turn in range(2):
        random = Random(3)
        for start in range(0, count, 250):
            yield stored([random.getrandbits(64) for _ in range(250)], turn + start / 1e6)


@pytest.mark.parametrize("items", [physical_turnover, cached_twice])
def test_a_tracked_block_takes_less_than_300_bytes(
    items: Callable[[int], Iterator[BlockEvents | CacheEvents]],
) -> None:
    """This includes its share of the table, however often it was hit or replaced."""
    count = 6_250
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        blocks, hashes = physical_blocks(count), cached_blocks(capacity=count)
        refused = 0
        for item in items(count):
            ours: Any = blocks if isinstance(item, BlockEvents) else hashes
            refused += ours.apply(item).refused
            del item
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (blocks.tracked + hashes.tracked, refused) == (count, 0)
    assert (after - before) / count < 300


def test_a_recorded_stream_equals_the_definitions() -> None:
    """A real engine's events: each removed block was stored before."""
    lines = gzip.decompress((DATA / "kv_events_main.jsonl.gz").read_bytes()).splitlines()
    batches = [json.loads(line) for line in lines]
    changes: list[Change] = [
        (kind, hashes, medium, stamp)
        for stamp, events in batches
        for kind, hashes, medium in events
    ]
    ours, naive = cached_blocks(), NaiveCache(changes)

    outs = [
        ours.apply(cache_item([(kind, hashes, medium, stamp) for kind, hashes, medium in events]))
        for stamp, events in batches
    ]

    found = cached(merged(outs))
    events_of = [kind for kind, *_ in changes]
    hashes_of = [kind for kind, hashes, *_ in changes for _ in hashes]
    assert found == naive.out
    assert len(found["GPU"]["lifetimes"]) == 355
    assert (events_of.count("stored"), events_of.count("removed")) == (250, 355)
    assert (hashes_of.count("stored"), hashes_of.count("removed")) == (432, 355)
    assert (ours.tracked, naive.unknown_removals) == (77, 0)
    assert sum(out.unknown for out in outs) == 0
