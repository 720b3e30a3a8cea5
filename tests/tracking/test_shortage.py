"""What larger caches would have kept, from stores and removals of one, against exact LRU caches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_blocks import Change, cache_item, removed, stored, total
from reuse_streams import zipf
from sidestep.tracking.kv_blocks.cached import CachedBlocks
from sidestep.tracking.kv_blocks.tracker import Observation, Sampling

LRU = dict[int, None]


def access(cache: LRU, block: int, size: int) -> tuple[bool, list[int]]:
    """Use ``block``; return whether the cache had it, and what it evicts to make room."""
    if block in cache:
        del cache[block]
        cache[block] = None
        return True, []
    evicted = [next(iter(cache))] if len(cache) == size else []
    for each in evicted:
        del cache[each]
    cache[block] = None
    return False, evicted


def events(stream: Sequence[int], size: int) -> Iterator[Change]:
    """Yield the events of an LRU cache: as an engine it makes room before it stores."""
    cache: LRU = {}
    for now, block in enumerate(stream):
        hit, evicted = access(cache, block, size)
        if evicted:
            yield "removed", evicted, "GPU", float(now)
        if not hit:
            yield "stored", [block], "GPU", float(now)


def misses(stream: Sequence[int], size: int) -> int:
    """Return the misses of an LRU cache."""
    cache: LRU = {}
    return sum(not access(cache, block, size)[0] for block in stream)


def tracker(rate: float = 1.0, capacity: int = 100_000) -> CachedBlocks:
    """Return a new tracker."""
    return CachedBlocks(Sampling(rate, capacity=capacity))


def observe(ours: CachedBlocks, changes: Sequence[Change]) -> list[Observation]:
    """Return what is observed of stores."""
    found: list[Observation] = []
    for start in range(0, len(changes), 1000):
        found += ours.apply(cache_item([*changes[start : start + 1000]])).stores
    return found


def saved(found: Sequence[Observation], more: float) -> int:
    """Return the stores that a cache larger by ``more`` blocks would have saved."""
    return total([one for one in found if one[0] <= more])


@given(st.lists(st.integers(0, 12)), st.integers(1, 6))
def test_a_larger_cache_saves_exactly_these_stores(stream: list[int], size: int) -> None:
    """With all blocks sampled the share is that of an LRU cache of any larger size."""
    found = observe(tracker(), [*events(stream, size)])

    stores = misses(stream, size)
    assert total(found) == stores
    for more in range(14):
        assert saved(found, more) == stores - misses(stream, size + more)


def test_a_sample_tells_the_share() -> None:
    """It is that of exact caches within two points in the mean of several samples."""
    stream = zipf(25_000, 0.8, 10_000, 1)
    size = 1000
    changes = [*events(stream, size)]
    stores = misses(stream, size)
    for more in (250, 4000):
        truth = 1 - misses(stream, size + more) / stores
        shares = []
        for salt in range(3):
            moved = [
                (kind, [value * 2 + salt * 10**9 for value in hashes], medium, now)
                for kind, hashes, medium, now in changes
            ]
            found = observe(CachedBlocks(Sampling(0.1, scale=True)), moved)
            assert total(found) == pytest.approx(stores, rel=0.15)
            shares.append(saved(found, more) / total(found))
        assert abs(sum(shares) / len(shares) - truth) < 0.03


def test_lost_events_end_what_is_known() -> None:
    """The next source begins with no removals."""
    ours = tracker()
    for item in (stored([1], 1.0), removed([1], 2.0)):
        ours.apply(item)

    out = ours.apply(cache_item([("lost", [], "", 3.0), ("stored", [1], "GPU", 3.0)], source=2))

    assert out.stores == [(math.inf, 1)]


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.1), (0.1, 1.0)])
def test_a_new_rate_begins_a_new_sample(before: float, after: float) -> None:
    """Removals at the old rate are forgotten, and blocks of the old sample do not count in the new."""
    settings = Sampling(before)
    ours = CachedBlocks(settings)
    blocks = [*range(2000)]
    ours.apply(stored(blocks, 1.0))
    ours.apply(removed(blocks[:1000], 2.0))
    settings.rate = after
    ours.apply(removed(blocks[1000:], 3.0))

    again = observe(ours, [("stored", [block], "GPU", 4.0) for block in reversed(blocks)])

    known = [value for value, _ in again if math.isfinite(value)]
    assert len(known) == pytest.approx(1000 * min(before, after), rel=0.4)
    # They come in the order in which the latest was removed last, so none lies below another.
    assert set(known) == {0.0}
    assert len(again) == pytest.approx(2000 * after, rel=0.4)


def test_removed_blocks_share_the_capacity() -> None:
    """Those that were removed first are forgotten where there is no room."""
    ours = tracker(capacity=6000)
    for start in range(0, 30_000, 100):
        ours.apply(stored([*range(start, start + 100)], float(start)))
        if start >= 3000:
            ours.apply(removed([*range(start - 3000, start - 2900)], float(start)))
        assert ours.tracked + ours._removed.counted <= 6000

    assert ours._removed.counted > 500
    assert ours.apply(stored([*range(100)], 1e6)).stores == [(math.inf, 1)] * 100
    assert ours.apply(stored([26_899], 1e6)).stores == [(100.0, 1)]

    ours.resize(2000)
    assert (ours.tracked, ours._removed.counted) == (2000, 0)
