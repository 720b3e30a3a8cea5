"""Lives of KV blocks against models written from the definitions."""

from __future__ import annotations

import gc
import gzip
import json
import math
import statistics
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import DATA
from kv_blocks import (
    CACHED,
    PHYSICAL,
    Change,
    Event,
    NaiveBlocks,
    NaiveCache,
    Step,
    any_blocks,
    any_changes,
    block_item,
    cache_item,
    cached,
    chunks,
    cleared,
    crowd,
    legal_blocks,
    physical,
    removed,
    stored,
    total,
    values,
)
from sidestep.errors import WireError
from sidestep.protocol.block_events import (
    ALLOCATED,
    EVICTED,
    MAX_HASHES,
    RESET,
    TOUCHED,
    BlockEvents,
    CacheEvents,
)
from sidestep.protocol.limits import MAX_LABELS
from sidestep.tracking.kv_blocks import capacity as room
from sidestep.tracking.kv_blocks.sampling import ALL, mix
from sidestep.tracking.kv_blocks.tracker import CachedLives, Lives, Observation, Residency

UNBOUNDED = 1 << 40


def residency(rate: float = 1.0, capacity: int = UNBOUNDED, scale: bool = True) -> Residency:
    """One that follows all, unless told otherwise."""
    return Residency(rate=rate, scale=scale, capacity=capacity)


def chunked(events: list[Any], sizes: list[int]) -> Iterator[list[Any]]:
    """``events`` in pieces of these sizes, and the rest."""
    start = 0
    for size in sizes:
        yield events[start : start + size]
        start += size
    yield events[start:]


def merged(outs: list[Lives]) -> Lives:
    """All of them as one."""
    whole = Lives(resets=sum(out.resets for out in outs))
    for out in outs:
        for kind in PHYSICAL:
            getattr(whole, kind).extend(getattr(out, kind))
        for name, lives in out.cached.items():
            into = whole.cached.setdefault(name, CachedLives())
            for kind in CACHED:
                getattr(into, kind).extend(getattr(lives, kind))
    return whole


@given(legal_blocks())
def test_an_engines_blocks_equal_the_definitions(events: list[Event]) -> None:
    """Where everything is seen, everything is known."""
    ours, naive = residency(), NaiveBlocks(events)

    out = ours.blocks(block_item(events))

    assert physical(out) == naive.out
    assert ours.tracked == len(naive.open)
    assert (ours.unknown, ours.abandoned) == (0, 0)


@given(any_blocks)
def test_events_that_no_engine_sends_leave_out_what_is_not_known(events: list[Event]) -> None:
    """Lost events and stamps out of order cost their intervals, none is negative or told twice."""
    ours, naive = residency(), NaiveBlocks(events)

    out = ours.blocks(block_item(events))

    assert physical(out) == naive.out
    assert (ours.unknown, ours.abandoned) == (naive.unknown, naive.abandoned)
    assert ours.tracked == len(naive.open)
    assert all(value >= 0 for kind in PHYSICAL for value, _ in getattr(out, kind))


@given(any_changes)
def test_cached_hashes_equal_the_definitions(changes: list[Change]) -> None:
    """In every medium on its own, in whatever order events come."""
    ours, naive = residency(), NaiveCache(changes)

    out = ours.cache(cache_item(changes))

    assert cached(out) == naive.out
    assert (ours.tracked, ours.unknown) == (naive.tracked, naive.unknown)
    assert all(
        value >= 0
        for lives in out.cached.values()
        for kind in CACHED
        for value, _ in getattr(lives, kind)
    )


@given(any_blocks, any_changes, chunks, st.integers(1, 8), st.sampled_from([1.0, 0.6, 0.03]))
def test_how_events_are_packed_changes_nothing(
    events: list[Event], changes: list[Change], sizes: list[int], capacity: int, rate: float
) -> None:
    """One item or many: the same observations in the same order, also over the cap."""
    whole, parts = (residency(rate, capacity) for _ in range(2))

    at_once = [whole.blocks(block_item(events, rate)), whole.cache(cache_item(changes))]
    piecewise = [
        *(parts.blocks(block_item(piece, rate)) for piece in chunked(events, sizes)),
        *(parts.cache(cache_item(piece)) for piece in chunked(changes, sizes)),
    ]

    assert merged(piecewise) == merged(at_once)
    assert parts.tracked == whole.tracked <= capacity
    assert (parts.ratio, parts.halvings) == (whole.ratio, whole.halvings)
    assert (parts.unknown, parts.abandoned) == (whole.unknown, whole.abandoned)


def follow(ours: Residency, played: list[Step]) -> list[Lives]:
    """What ``ours`` tells; it never holds more than it may."""
    outs = []
    for what, content, source in played:
        if what == "rate":
            ours.rate = content
        elif what == "blocks":
            outs.append(ours.blocks(block_item(content, 0.5, source)))
        else:
            outs.append(ours.cache(cache_item(content, source)))
        assert ours.tracked <= ours._room.capacity
    return outs


@pytest.mark.parametrize("few", [0, 1, 3])
@pytest.mark.parametrize("capacity", [4, 12, 30])
def test_lives_that_go_late_are_as_if_they_had_gone_at_once(
    few: int, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few are looked at after a call, the same is told, and nothing else is known."""
    at_a_time = room.SLICE
    rest: Step = ("cache", [], 1)
    halvings = 0
    for seed in range(40):
        played = list(crowd(Random(seed)))
        at_once, late = (residency(0.8, capacity) for _ in range(2))

        monkeypatch.setattr(room, "SLICE", few)
        outs = follow(late, played)
        monkeypatch.setattr(room, "SLICE", at_a_time)
        outs += follow(late, [rest])

        assert merged(outs) == merged(follow(at_once, [*played, rest]))
        assert late.tracked == at_once.tracked
        assert (late.ratio, late.halvings) == (at_once.ratio, at_once.halvings)
        assert (late.unknown, late.abandoned) == (at_once.unknown, at_once.abandoned)
        halvings += late.halvings

    assert halvings >= 40


def test_a_reset_is_told_in_slices() -> None:
    """No call takes time for a whole cache: the rest is told by those that follow, of any kind."""
    ours = residency()
    blocks = range(4 * room.SLICE)
    ours.blocks(block_item([(ALLOCATED, block, 1.0) for block in blocks]))

    outs = [ours.blocks(block_item([(RESET, 0, 3.0)]))]
    left = ours.tracked
    outs += [ours.cache(cache_item([])) for _ in range(4)]

    assert [len(out.reset_ages) for out in outs] == [*[room.SLICE] * 4, 0]
    assert [out.resets for out in outs] == [1, 0, 0, 0, 0]
    assert (left, ours.tracked) == (3 * room.SLICE, 0)


def test_hashes_outside_of_a_lower_rate_go_in_slices() -> None:
    """Setting it costs nothing; each call that follows looks at some."""
    ours, fresh = residency(), residency(0.5)
    hashes = list(range(4 * room.SLICE))
    for each in (ours, fresh):
        each.cache(stored(hashes, 1.0))

    ours.rate = 0.5
    tracked = [ours.tracked]
    for _ in range(5):
        ours.cache(cache_item([]))
        tracked.append(ours.tracked)

    assert tracked[0] == len(hashes)
    assert all(0 < before - after < room.SLICE for before, after in pairwise(tracked[:5]))
    assert tracked[4] == tracked[5] == fresh.tracked


def test_a_life_that_needs_the_place_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reset took makes room for what comes; the sample is not halved for it."""
    monkeypatch.setattr(room, "SLICE", 0)
    ours = residency(capacity=100)
    ours.blocks(block_item([(ALLOCATED, block, 1.0) for block in range(100)]))

    at_reset = ours.blocks(block_item([(RESET, 0, 3.0)]))
    held = ours.tracked
    after = ours.blocks(block_item([(ALLOCATED, block, 4.0) for block in range(60)]))

    assert (len(at_reset.reset_ages), held) == (0, 100)
    assert (len(after.reset_ages), ours.tracked, ours.halvings) == (60, 100, 0)


def test_the_last_four_hits_as_the_engine_has_them() -> None:
    """Three gaps at eviction of however many hits, the first hit's distance from birth never."""
    hits: list[Event] = [(TOUCHED, 7, float(stamp)) for stamp in (10, 11, 13, 17, 25)]
    life = [(ALLOCATED, 7, 1.0), *hits, (EVICTED, 7, 30.0)]

    out = residency().blocks(block_item(life))

    assert out == Lives(
        lifetimes=[(29.0, 1)],
        idles=[(5.0, 1)],
        last_gaps=[(2.0, 1), (4.0, 1), (8.0, 1)],
        gaps=[(1.0, 1), (2.0, 1), (4.0, 1), (8.0, 1)],
        reuses=[(5, 1)],
    )


def test_hits_of_one_moment_are_a_gap_of_nothing() -> None:
    """Two requests of one step hit a block together; that is a reuse like any other."""
    life = [(ALLOCATED, 7, 1.0), (TOUCHED, 7, 1.0), (TOUCHED, 7, 1.0), (EVICTED, 7, 1.0)]

    out = residency().blocks(block_item(life))

    assert out.gaps == out.last_gaps == [(0.0, 1)]
    assert out.lifetimes == out.idles == [(0.0, 1)]


def test_a_life_weighs_what_the_sender_sampled_at_its_birth() -> None:
    """Whatever it samples later, also within the same second."""
    ours = residency()
    ours.blocks(block_item([(ALLOCATED, 1, 1.0)], 0.5))
    ours.blocks(block_item([(ALLOCATED, 2, 1.0)], 0.125))
    ours.blocks(block_item([(ALLOCATED, 3, 1.0)], 1.0))

    out = ours.blocks(block_item([(EVICTED, block, 2.0) for block in (1, 2, 3)], 0.25))

    assert [count for _, count in out.lifetimes] == [2, 8, 1]


def test_a_reset_ends_lives_apart_from_evictions() -> None:
    """Ages and idles of what it took, nothing among lifetimes; later evictions are unknown."""
    ours = residency()
    ours.blocks(block_item([(ALLOCATED, 1, 1.0), (ALLOCATED, 2, 2.0), (TOUCHED, 1, 5.0)]))

    out = ours.blocks(block_item([(RESET, 0, 9.0), (EVICTED, 1, 10.0)]))

    assert out == Lives(
        reset_ages=[(8.0, 1), (7.0, 1)], reset_idles=[(4.0, 1), (7.0, 1)], resets=1, unknown=1
    )
    assert (ours.tracked, ours.unknown, ours.abandoned) == (0, 1, 0)


def test_a_hit_before_the_last_one_has_no_time() -> None:
    """It counts as a hit; gaps and idle are taken between the others."""
    ours = residency()
    life = [(ALLOCATED, 1, 10.0), (TOUCHED, 1, 20.0), (TOUCHED, 1, 15.0), (TOUCHED, 1, 26.0)]

    out = ours.blocks(block_item([*life, (EVICTED, 1, 30.0)]))

    assert values(out.gaps) == values(out.last_gaps) == [6.0]
    assert values(out.reuses) == [3]
    assert (values(out.lifetimes), values(out.idles)) == ([20.0], [4.0])
    assert ours.unknown == 1


def test_a_restarted_sender_begins_anew() -> None:
    """Lives of the process before are abandoned: its clock and its blocks are gone."""
    ours = residency()
    ours.blocks(block_item([(ALLOCATED, 1, 1.0), (ALLOCATED, 2, 1.0)]))
    ours.cache(stored([1, 2, 3], 1.0))

    out = ours.blocks(block_item([(EVICTED, 1, 50.0)], source=2))
    left = ours.tracked
    of_cache = ours.cache(cache_item([("removed", [1], "GPU", 50.0)], source=9))

    assert out == Lives(abandoned=2, unknown=1)
    assert of_cache == Lives(abandoned=3)
    assert (left, ours.tracked) == (3, 0)
    assert (ours.abandoned, ours.unknown) == (5, 1)


def test_clearing_a_medium_leaves_the_others() -> None:
    """No medium is all of them; neither is observed."""
    ours = residency()
    for medium in ("GPU", "CPU", "STORAGE"):
        ours.cache(stored([1, 2], 1.0, medium))

    ours.cache(cleared("GPU", 2.0))
    of_gpu, of_cpu = ours.cache(removed([1], 3.0)), ours.cache(removed([1], 3.0, "CPU"))
    ours.cache(cleared("", 4.0))

    assert of_gpu == Lives()
    assert values(of_cpu.cached["CPU"].lifetimes) == [2.0]
    assert ours.tracked == 0


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
def test_an_item_that_contradicts_itself_changes_nothing(item: BlockEvents) -> None:
    """It is refused before its first event, or its new source, is looked at."""
    ours = residency()
    ours.blocks(block_item([(ALLOCATED, 5, 1.0)]))

    with pytest.raises(WireError, match="bad_item"):
        ours.blocks(item)

    assert (ours.tracked, ours.unknown, ours.abandoned) == (1, 0, 0)
    assert values(ours.blocks(block_item([(EVICTED, 5, 3.0)])).lifetimes) == [2.0]


def test_media_are_as_few_as_labels_may_be() -> None:
    """One more than a page may have is refused with its whole item."""
    ours = residency()
    ours.cache(cache_item([("stored", [1], str(n), 1.0) for n in range(MAX_LABELS)]))

    for item in (stored([2], 2.0, "more"), cache_item([("sold", [1], "0", 2.0)])):
        with pytest.raises(WireError, match="bad_item"):
            ours.cache(item)

    assert ours.tracked == MAX_LABELS
    assert "0" in ours.cache(removed([1], 2.0, "0")).cached
    assert ours.cache(removed([1], 2.0, "more")) == Lives()


def test_settings_that_cannot_work_are_refused() -> None:
    """A rate is a share, and nothing is followed without room for it."""
    ours = residency()

    for rate in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="within 0 and 1"):
            ours.rate = rate
    with pytest.raises(ValueError, match="at least 1"):
        residency(capacity=0)

    assert (ours.rate, ours.ratio) == (1.0, 1.0)


HASHES: dict[str, Callable[[Random, int], int]] = {
    "random": lambda random, _: random.getrandbits(64),
    "counting": lambda _, number: number,
    "aligned": lambda _, number: number << 40,
    "small": lambda random, _: random.getrandbits(32),
}


def sample(hashes: list[int], ours: Residency) -> set[int]:
    """Those that ``ours`` follows."""
    ours.cache(stored(hashes, 1.0))
    found = set()
    for number, value in enumerate(hashes):
        if ours.cache(removed([value], 2.0 + number)).cached:
            found.add(value)
    return found


@pytest.mark.parametrize("kind", HASHES)
def test_a_sample_is_part_of_every_larger_one(kind: str) -> None:
    """By hash alone, whatever the hashes look like: nested, and of the size that was asked for."""
    random = Random(7)
    hashes = list({HASHES[kind](random, number) for number in range(MAX_HASHES)})
    rates = (0.0, 0.003, 0.03, 0.1, 0.5, 0.9, 1.0)

    samples = [sample(hashes, residency(rate)) for rate in rates]

    for smaller, larger in pairwise(samples):
        assert smaller <= larger
    for rate, found in zip(rates, samples, strict=True):
        spread = math.sqrt(len(hashes) * rate * (1 - rate))
        assert abs(len(found) - rate * len(hashes)) <= 4 * spread


def test_a_rate_that_was_lowered_samples_as_if_it_always_was() -> None:
    """What stays is what a new one would follow, and weighs as much."""
    hashes = [Random(5).getrandbits(64) + number for number in range(5000)]
    ours = residency(0.5)
    ours.cache(stored(hashes, 1.0))

    ours.rate = 0.125
    out = ours.cache(removed(hashes, 3.0))

    fresh = residency(0.125)
    fresh.cache(stored(hashes, 1.0))
    assert out == fresh.cache(removed(hashes, 3.0))
    assert {count for _, count in out.cached["GPU"].lifetimes} == {8}


def test_lives_keep_their_weight_when_the_rate_is_raised() -> None:
    """Those begun before stand for as many as before, those begun later for fewer."""
    early, late = range(4000), range(10_000, 14_000)
    ours = residency(0.25)
    ours.cache(stored(list(early), 1.0))
    before = ours.tracked

    ours.rate = 0.5
    ours.cache(stored(list(late), 2.0))
    between = ours.tracked
    of_early = ours.cache(removed(list(early), 3.0)).cached["GPU"].lifetimes
    of_late = ours.cache(removed(list(late), 3.0)).cached["GPU"].lifetimes

    assert {count for _, count in of_early} == {4}
    assert {count for _, count in of_late} == {2}
    assert (len(of_early), len(of_late)) == (before, between - before)


def test_a_rate_of_nothing_follows_nothing() -> None:
    """Cached hashes are let go; physical blocks are the sender's to sample."""
    ours = residency(0.5)
    ours.cache(stored(list(range(100)), 1.0))
    ours.blocks(block_item([(ALLOCATED, 1, 1.0)], 0.5))

    ours.rate = 0.0
    ours.cache(stored(list(range(100)), 2.0))

    assert ours.tracked == 1
    assert ours.ratio == 0.0
    assert ours.blocks(block_item([(EVICTED, 1, 3.0)], 0.0)).lifetimes == [(2.0, 2)]


def test_without_scaling_every_observation_counts_once() -> None:
    """As the engine's own, which are of the sample."""
    ours = residency(0.1, scale=False)
    ours.blocks(block_item([(ALLOCATED, 1, 1.0)], 0.01))
    ours.cache(stored(list(range(1000)), 1.0))

    out = ours.blocks(block_item([(TOUCHED, 1, 2.0), (TOUCHED, 1, 3.0), (EVICTED, 1, 4.0)], 0.01))
    of_cache = ours.cache(removed(list(range(1000)), 2.0)).cached["GPU"]

    assert (out.lifetimes, out.gaps, out.reuses) == ([(3.0, 1)], [(1.0, 1)], [(2, 1)])
    assert {count for _, count in of_cache.lifetimes} == {1}


@pytest.mark.parametrize("rate", [0.03, 0.3, 0.7])
def test_scaled_counts_add_up_to_the_weight(rate: float) -> None:
    """Whole numbers that differ by one at most, and whose sum is never off by one."""
    ours = residency()
    counts: list[int] = []
    for number in range(500):
        out = ours.blocks(block_item([(ALLOCATED, 1, 1.0), (EVICTED, 1, 2.0 + number)], rate))
        counts += [count for _, count in out.lifetimes]
        assert abs(sum(counts) - len(counts) / rate) <= 0.5 + 1e-6

    assert len(counts) == 500
    assert set(counts) <= {math.floor(1 / rate), math.ceil(1 / rate)}


class Run:
    """Many lives in random order: what they were, and what was estimated from a sample.

    Attributes:
        errors: Estimate less truth of the number of lives and the sum of lifetimes, as shares.
    """

    def __init__(self, seed: int, rate: float, capacity: int, *, by_hash: bool) -> None:
        random = Random(seed)
        self.ours = residency(rate, capacity)
        self.capacity = capacity
        events: list[tuple[float, bool, int]] = []
        lifetimes: list[float] = []
        for _ in range(2000):
            begin, lifetime = random.uniform(0, 1000), random.expovariate(0.01)
            block = random.getrandbits(64 if by_hash else 40)
            events += [(begin, False, block), (begin + lifetime, True, block)]
            lifetimes.append(lifetime)
        events.sort()
        observed = self._cached(events) if by_hash else self._physical(events, random, rate)
        truth, estimate = sum(lifetimes), sum(value * count for value, count in observed)
        self.errors = total(observed) / len(lifetimes) - 1, estimate / truth - 1

    def _cached(self, events: list[tuple[float, bool, int]]) -> list[Observation]:
        observed: list[Observation] = []
        for stamp, end, block in events:
            out = self.ours.cache((removed if end else stored)([block], stamp))
            if "GPU" in out.cached:
                observed += out.cached["GPU"].lifetimes
            assert self.ours.tracked <= self.capacity
        return observed

    def _physical(
        self, events: list[tuple[float, bool, int]], random: Random, rate: float
    ) -> list[Observation]:
        observed: list[Observation] = []
        sent: set[int] = set()
        for stamp, end, block in events:
            if not end and random.random() < rate:
                sent.add(block)
            if block in sent:
                event = (EVICTED if end else ALLOCATED), block, stamp
                observed += self.ours.blocks(block_item([event], rate)).lifetimes
            assert self.ours.tracked <= self.capacity
        return observed


@pytest.mark.parametrize("by_hash", [True, False])
@pytest.mark.parametrize(
    ("rate", "capacity"),
    [(0.03, UNBOUNDED), (0.2, UNBOUNDED), (0.7, UNBOUNDED), (1.0, 100), (0.7, 50), (0.2, 20)],
)
def test_estimates_have_no_bias(rate: float, capacity: int, by_hash: bool) -> None:
    """Over many runs, errors lie around nothing: of a sample, and also of a thinned one."""
    runs = [Run(seed, rate, capacity, by_hash=by_hash) for seed in range(30)]

    assert all((run.ours.halvings > 0) == (capacity < UNBOUNDED) for run in runs)
    for errors in zip(*(run.errors for run in runs), strict=True):
        of_mean = statistics.stdev(errors) / math.sqrt(len(errors))
        assert abs(statistics.fmean(errors)) < 3.5 * of_mean
        assert of_mean < 0.05


def test_over_the_cap_the_ratio_halves_until_it_fits() -> None:
    """Both kinds share the room and the halving; nothing is ever over."""
    ours = residency(0.5, capacity=64)
    ratios = [ours.ratio]
    for number in range(2000):
        ours.cache(stored([number], 1.0))
        ours.blocks(block_item([(ALLOCATED, number, 1.0)]))
        assert ours.tracked <= 64
        if ours.ratio != ratios[-1]:
            ratios.append(ours.ratio)

    assert ratios == [0.5 / 2**halving for halving in range(ours.halvings + 1)]
    assert ours.halvings >= 5


def test_a_full_house_is_thinned_within_an_item() -> None:
    """Hashes that were sampled before the ratio fell are weighed as those after it."""
    ours = residency(capacity=100)
    hashes = list(range(4000))
    ours.cache(stored(hashes, 1.0))

    fresh = residency(ours.ratio)
    fresh.cache(stored(hashes, 1.0))

    assert ours.tracked == fresh.tracked
    assert ours.cache(removed(hashes, 2.0)) == fresh.cache(removed(hashes, 2.0))


def test_blocks_that_were_let_go_are_not_unknown() -> None:
    """Thinning explains them, also after it has ended; after a reset nothing does."""
    ours = residency(capacity=10)
    ours.blocks(block_item([(ALLOCATED, block, 1.0) for block in range(100)]))
    halvings = ours.halvings

    ours.blocks(block_item([(EVICTED, block, 2.0) for block in range(50)]))
    ours.rate = 1.0
    ours.blocks(block_item([(TOUCHED, block, 3.0) for block in range(50, 100)]))
    explained = ours.unknown
    ours.blocks(block_item([(RESET, 0, 4.0), (EVICTED, 1, 5.0)]))

    assert halvings >= 3
    assert explained == 0
    assert ours.unknown == 1


def test_a_reset_does_not_end_thinning() -> None:
    """Blocks that begin after it are let go as before, and are not unknown for that."""
    ours = residency(capacity=10)
    ours.blocks(block_item([(ALLOCATED, block, 1.0) for block in range(100)]))
    ratio = ours.ratio

    ours.blocks(block_item([(RESET, 0, 2.0)]))
    ours.blocks(block_item([(ALLOCATED, block, 3.0) for block in range(40)]))
    out = ours.blocks(block_item([(EVICTED, block, 4.0) for block in range(40)]))

    assert 0 < len(out.lifetimes) < 40
    assert (ours.ratio, ours.unknown, ours.tracked) == (ratio, 0, 0)


def test_a_hash_that_was_let_go_is_not_followed_anew_in_the_same_change() -> None:
    """It was in the sample when the change was looked at, and is not since another halved it."""
    outside = [value for value in range(100) if mix(value) >= ALL // 2]
    within = next(value for value in range(100) if mix(value) < ALL // 2)
    ours = residency(capacity=2)
    ours.cache(stored(outside[:2], 1.0))

    ours.cache(stored([within, *outside[:2]], 2.0))

    assert (ours.halvings, ours.tracked) == (1, 1)
    assert ours.cache(removed(outside, 3.0)) == Lives()


def test_setting_the_rate_ends_thinning() -> None:
    """Lives begun since are all followed; those begun before keep what they stand for."""
    ours = residency(capacity=8)
    ours.blocks(block_item([(ALLOCATED, block, 1.0) for block in range(9)]))
    thinned, before = ours.ratio, ours.tracked

    ours.rate = ours.rate
    ours.blocks(block_item([(ALLOCATED, 50, 1.0)]))
    out = ours.blocks(block_item([(EVICTED, block, 2.0) for block in (*range(9), 50)]))

    assert (thinned, ours.ratio) == (1 / 2**ours.halvings, 1.0)
    assert out.lifetimes == [(1.0, round(1 / thinned))] * before + [(1.0, 1)]


def test_a_second_thinning_leaves_earlier_lives_their_weight() -> None:
    """A life stands for the inverse of the least ratio of its time, not of their product."""
    ours = residency(capacity=64)
    early = list(range(1000))
    ours.cache(stored(early, 1.0))
    first = ours.ratio
    ours.rate = 1.0

    late = list(range(5000, 5000 + 65 - ours.tracked))
    ours.cache(stored(late, 2.0))
    second = ours.ratio
    of_early = ours.cache(removed(early, 3.0)).cached["GPU"].lifetimes
    of_late = ours.cache(removed(late, 3.0)).cached["GPU"].lifetimes

    assert first < second < 1.0
    assert {count for _, count in of_early} == {round(1 / first)}
    assert {count for _, count in of_late} == {round(1 / second)}


def physical_life(count: int, hits: int) -> Iterator[BlockEvents]:
    """Items of blocks that are allocated, then hit."""
    for kind, stamp in [(ALLOCATED, 1.0), *((TOUCHED, 2.0 + hit) for hit in range(hits))]:
        for start in range(0, count, 1000):
            blocks = range(start, start + 1000)
            yield block_item([(kind, block + 1000, stamp + block / 1e6) for block in blocks], 0.3)


def physical_turnover(count: int, hits: int) -> Iterator[BlockEvents]:
    """The same, then all are evicted, allocated and hit again, twice."""
    yield from physical_life(count, hits)
    for turn in range(1, 3):
        for start in range(0, count, 1000):
            yield block_item(
                [
                    (kind, block + 1000, 100.0 * turn + block / 1e6)
                    for block in range(start, start + 1000)
                    for kind in (EVICTED, ALLOCATED, *[TOUCHED] * hits)
                ],
                0.3,
            )


def cached_life(count: int, hits: int) -> Iterator[CacheEvents]:
    """Items of hashes that are stored, then stored again."""
    for hit in range(hits + 1):
        random = Random(3)
        for start in range(0, count, 1000):
            yield cache_item(
                [
                    ("stored", [random.getrandbits(64)], "GPU", hit + each / 1e6)
                    for each in range(start, start + 1000)
                ]
            )


@pytest.mark.parametrize(
    ("items", "count", "hits"),
    [
        (physical_life, 200_000, 0),
        (physical_life, 200_000, 1),
        (cached_life, 200_000, 0),
        (cached_life, 200_000, 1),
        # A table that blocks come to and go from is larger; an eighth of the size is as full.
        (physical_turnover, 25_000, 4),
    ],
)
def test_a_life_takes_less_than_300_bytes(
    items: Callable[[int, int], Iterator[BlockEvents | CacheEvents]], count: int, hits: int
) -> None:
    """With its share of the table, however often it was hit."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        ours = residency(capacity=count)
        for item in items(count, hits):
            if isinstance(item, BlockEvents):
                ours.blocks(item)
            else:
                ours.cache(item)
            del item
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert ours.tracked == count
    assert ours.halvings == 0
    assert (after - before) / ours.tracked < 300


def test_what_is_not_sampled_takes_no_memory() -> None:
    """A hundred thousand hashes leave as little as none."""
    ours = residency(1e-9)
    items = [stored(list(range(start, start + 1000)), 1.0) for start in range(0, 100_000, 1000)]
    ours.cache(items[0])
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for item in items:
            ours.cache(item)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert ours.tracked == 0
    # Other threads of the tests' process allocate a little meanwhile.
    assert after - before < 10_000


def test_a_recorded_stream_gives_what_the_definitions_give() -> None:
    """All of a real engine's KV events: every block that it removed, it had stored."""
    lines = gzip.decompress((DATA / "kv_events_main.jsonl.gz").read_bytes()).splitlines()
    batches = [json.loads(line) for line in lines]
    changes: list[Change] = [
        (kind, hashes, medium, stamp)
        for stamp, events in batches
        for kind, hashes, medium in events
    ]
    ours, naive = residency(), NaiveCache(changes)

    outs = [
        ours.cache(cache_item([(kind, hashes, medium, stamp) for kind, hashes, medium in events]))
        for stamp, events in batches
    ]

    found = cached(merged(outs))
    events_of = [kind for kind, *_ in changes]
    hashes_of = [kind for kind, hashes, *_ in changes for _ in hashes]
    assert found == naive.out
    assert len(found["GPU"]["lifetimes"]) == 355
    assert (events_of.count("stored"), events_of.count("removed")) == (250, 355)
    assert (hashes_of.count("stored"), hashes_of.count("removed")) == (432, 355)
    assert (ours.tracked, ours.unknown, naive.unknown_removals) == (77, 0, 0)
