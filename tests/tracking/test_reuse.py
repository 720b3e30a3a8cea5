"""Reuse distances of sampled lookups, against exact LRU caches and a naive model."""

from __future__ import annotations

import gc
import json
import statistics
import time
import tracemalloc
from functools import cache
from gzip import decompress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naive_reuse import CAPACITIES, compare, compare_stack
from reuse_streams import LOADS, exact, zipf
from sidestep.protocol.cache_lookups import Lookup
from sidestep.tracking.kv_blocks import lru_stack
from sidestep.tracking.kv_blocks.hit_ratio_curve import FINE, HitRatioCurve, bucket
from sidestep.tracking.kv_blocks.hot_blocks import HotBlocks
from sidestep.tracking.kv_blocks.reuse import ALL, ReuseTracker
from sidestep_tools.whatif.estimate import TraceCurve

TRACE = Path(__file__).parents[3] / "shared" / "reference" / "traces" / "conversation.jsonl.gz"
FRACTIONS = [64, 32, 16, 8, 4, 2, 1]
SPREAD_OUT = [
    "conversation",
    *sorted(LOADS.keys() - {"scan", "loop", "loops", "tools", "zipf 1.5"}),
]
"""Loads with many blocks and many distances. Of others a small sample alone has too little: near the
only distance a small error moves the curve by a step."""


def conversation() -> list[int]:
    """Return the lookups of the public trace."""
    if not TRACE.exists():
        pytest.skip("the public trace is not here")
    lines = decompress(TRACE.read_bytes()).splitlines()
    return [block for line in lines for block in json.loads(line)["hash_ids"]]


def long(*loads: str) -> list[Any]:
    """Return loads that only the long form of a test compares."""
    return [pytest.param(load, marks=pytest.mark.long) for load in loads]


@cache
def case(load: str) -> tuple[list[int], list[int], list[float]]:
    """Return a load, the capacities that it is compared at, and its exact curve."""
    stream = conversation() if load == "conversation" else LOADS[load]()
    capacities = [len({*stream}) // part for part in FRACTIONS]
    return stream, capacities, exact(stream, capacities)


@pytest.mark.parametrize(
    "load", ["loops", *long("conversation", *sorted(LOADS.keys() - {"loops"}))]
)
def test_the_curve_is_that_of_exact_caches(load: str) -> None:
    """The largest error over capacities is small in the mean of samples and in each."""
    check(load, [TraceCurve(0.01, Random(salt).getrandbits(64)) for salt in range(5)], 0.01)


@pytest.mark.parametrize(
    "load", ["conversations", *long(*(load for load in SPREAD_OUT if load != "conversations"))]
)
@pytest.mark.parametrize(
    ("rate", "limit"), [(0.01, 0.02), pytest.param(0.1, 0.01, marks=pytest.mark.long)]
)
def test_the_rate_alone_is_enough_for_most_loads(load: str, rate: float, limit: float) -> None:
    """So it is without the blocks that are in the sample however small the rate is."""
    curves = [TraceCurve(rate, Random(salt).getrandbits(64)) for salt in range(10)]
    for curve in curves:
        curve._tracker.sample(rate)

    check(load, curves, limit)


def check(load: str, curves: list[TraceCurve], limit: float) -> None:
    """Compare curves with the exact one: the mean of their largest errors, and their bounds."""
    stream, capacities, truth = case(load)
    errors, covered = [], 0
    for curve in curves:
        curve.add(stream)
        points = curve.points(capacities)
        assert (curve.accesses, curve.distinct) == (len(stream), capacities[-1])
        pairs = [*zip(points, truth, strict=True)]
        errors.append(max(abs(point.hit_ratio - ratio) for point, ratio in pairs))
        covered += sum(point.low - 1e-9 <= ratio <= point.high + 1e-9 for point, ratio in pairs)

    assert statistics.fmean(errors) <= limit
    assert max(errors) <= 0.03
    assert covered >= 0.9 * len(curves) * len(capacities)


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks so small that they merge all the time."""
    monkeypatch.setattr(lru_stack, "CHUNK", 8)
    monkeypatch.setattr(lru_stack, "_SHIFT", 3)
    monkeypatch.setattr(lru_stack, "_OFFSET", 7)


@pytest.mark.usefixtures("_small_chunks")
def test_every_distance_is_that_of_a_naive_cache() -> None:
    """Blocks that requests hold, share and release, and their output, are as in a plain list."""

    @given(st.integers(0, 1 << 32))
    def check(seed: int) -> None:
        compare(seed)

    check()


@pytest.mark.usefixtures("_small_chunks")
def test_places_survive_merges() -> None:
    """Depths and stamps are those of a list."""

    @given(st.integers(0, 1 << 32), st.integers(1, 60))
    def check(seed: int, blocks: int) -> None:
        compare_stack(seed, blocks)

    check()


@pytest.mark.long
def test_a_full_sample_becomes_smaller_without_bias() -> None:
    """The rate falls, the limit holds, and the curve stays right in the mean."""
    stream = zipf(150_000, 0.8, 60_000, 5)
    distinct = len({*stream})
    capacities = [distinct // part for part in FRACTIONS]
    truth = exact(stream, capacities)
    found = []
    for salt in range(6):
        # The rate is below what the limit allows.
        curve = TraceCurve(0.001, Random(salt).getrandbits(64))
        curve._tracker.max_blocks = 3000
        curve.add(stream)
        assert curve._tracker.tracked <= 3000
        assert curve._tracker.rate < 0.1
        found.append([point.hit_ratio for point in curve.points(capacities)])

    for ratio, estimates in zip(truth, zip(*found, strict=True), strict=True):
        assert abs(statistics.fmean(estimates) - ratio) < 0.015


def test_beyond_the_horizon_blocks_leave_first() -> None:
    """The sample stays as large as before as long as the oldest blocks are of no interest."""
    ours = ReuseTracker(max_blocks=5000)
    ours.horizon = 2500.0
    random = Random(1)
    for step in range(40_000):
        ours.use(random.getrandbits(64), float(step), is_hot=False, is_hit=False)

    assert ours.rate == 1.0
    assert 2500 <= ours.tracked <= 5000


def test_blocks_that_come_and_go_take_no_time_and_no_memory() -> None:
    """A loop beyond the horizon enters the sample again and again; no call looks at all blocks."""
    ours = ReuseTracker(max_blocks=8000)
    ours.horizon = 9000.0
    blocks = [Random(number).getrandbits(64) for number in range(12_000)]
    began = time.process_time()
    for step in range(120_000):
        ours.use(blocks[step % len(blocks)], float(step), is_hot=False, is_hit=False)
    seconds = time.process_time() - began

    assert ours.tracked <= 8000
    keys = ours._keys
    assert len(keys) == len(keys._heap) + len(keys._unsifted) <= 2 * 8000 + 1
    assert seconds < 10


def test_another_rate_of_the_source_forgets_the_blocks() -> None:
    """The samples are not comparable; what was learnt of distances stays."""
    ours = ReuseTracker()
    ours.use(ALL - 1, 1.0, is_hot=False, is_hit=False)
    ours.sample(0.1)

    assert ours.tracked == 0
    assert ours.rate == pytest.approx(0.1)
    ours.use(ALL - 1, 2.0, is_hot=False, is_hit=False)
    ours.sample(0.1)
    assert ours.tracked == 1


def test_lookups_fade_with_their_half_life() -> None:
    """The curve follows the load, however long the exporter runs."""
    curve = HitRatioCurve(half_life=10.0)
    for at, hit in [(0.0, True), (10.0, False), (50_000.0, True), (50_010.0, False)]:
        curve.advance(at)
        curve.count(not hit, hit)
        curve.observe(7, 3, 1.0, hit=hit)
        if at == 10.0:
            assert curve.hit_ratio == pytest.approx(1 / 3)
            assert curve.lookups == pytest.approx(1.5)

    assert curve.lookups == pytest.approx(1.5)
    assert curve.hit_ratio == pytest.approx(1 / 3)
    assert curve.hit_ratios([2, 3]) == [0.0, pytest.approx(1.0)]


def test_without_lookups_there_is_no_curve() -> None:
    """Nor a ratio."""
    curve = HitRatioCurve()

    assert (curve.hit_ratio, curve.hit_ratios([1]), curve.points([1], 1.0, 0)) == (None, [], [])


def least_distance(number: int) -> float:
    """Return the least distance in a bucket: from ``FINE`` on, that many are a doubling."""
    return number if number <= FINE else FINE * 2.0 ** (number / FINE - 1)


@given(st.floats(1, 1e12))
def test_a_distance_lies_in_its_bucket(distance: float) -> None:
    """Up to 128 they are exact, beyond it within a hundredth."""
    number = bucket(distance)

    assert least_distance(number) <= distance * (1 + 1e-12)
    assert distance <= least_distance(number + 1) * (1 + 1e-12)
    assert distance < 129 or least_distance(number + 1) / least_distance(number) < 1.006


def test_hot_blocks_are_found_in_bounded_memory() -> None:
    """Those with a share above the limit are hot; a former one is not for ever."""
    finder = HotBlocks(100)
    random = Random(3)
    for _ in range(2000):
        finder.note([1, 2, *(random.getrandbits(64) for _ in range(20))])
    assert finder.hot == {1, 2}
    assert len(finder._counts) <= 400
    for _ in range(20_000):
        finder.note([3, *(random.getrandbits(64) for _ in range(20))])

    assert finder.hot == {3}


def test_memory_is_bounded_by_the_limit() -> None:
    """Any number of distinct blocks takes as much as those that are tracked."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        ours = ReuseTracker(max_blocks=20_000)
        random = Random(9)
        for step in range(60_000):
            ours.use(random.getrandbits(64), float(step), is_hot=False, is_hit=False)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert ours.tracked == 20_000
    assert (after - before) / ours.tracked < 500


def test_a_hit_of_an_unknown_block_is_in_no_distance() -> None:
    """The sample has only begun: the engine has known the block for longer."""
    ours = ReuseTracker()

    misses = ours.admit(Lookup(1, 1.0, blocks=3, found=2, sampled=[1, 2, 3], sampled_found=2), 1.0)

    assert (misses.cold, misses.cleared, misses.evicted) == (1.0, 0.0, [])
    assert ours.curve.hit_ratio == pytest.approx(2 / 3)
    assert [point.hit_ratio for point in ours.points(CAPACITIES)] == [0.0] * len(CAPACITIES)


def test_a_repeated_lookup_counts_nothing() -> None:
    """A preempted request finds its own blocks, which says nothing of a cache."""
    ours = ReuseTracker()
    ours.admit(Lookup(1, 1.0, blocks=1, sampled=[1]), 1.0)
    ours.release([1], 2.0)

    misses = ours.admit(
        Lookup(1, 3.0, blocks=1, found=1, sampled=[1], sampled_found=1), 3.0, counts=False
    )

    assert (misses.cold, ours.curve.lookups) == (0.0, 1.0)
    assert ours.tracked == 1
