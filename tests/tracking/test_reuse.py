"""Reuse distances of sampled lookups, against exact LRU caches and a naive model."""

from __future__ import annotations

import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naive_reuse import CAPACITIES, compare, compare_stack
from reuse_streams import exact, loops, zipf
from sidestep.protocol.cache_lookups import Lookup
from sidestep.tracking.kv_blocks import lru_stack
from sidestep.tracking.kv_blocks.hit_ratio_curve import FINE, HitRatioCurve, bucket
from sidestep.tracking.kv_blocks.hot_blocks import HotBlocks
from sidestep.tracking.kv_blocks.reuse import ALL, ReuseTracker
from sidestep_tools.whatif.estimate import TraceCurve


@pytest.mark.parametrize("is_loops", [False, True], ids=["zipf", "loops"])
def test_the_curve_is_that_of_exact_caches(is_loops: bool) -> None:
    """The largest error over capacities is small in the mean of samples, and the bounds enclose the truth."""
    load = loops(4) if is_loops else zipf(20_000, 0.8, 8_000, 1)
    distinct = len({*load})
    capacities = [distinct // part for part in (64, 16, 4, 2, 1)]
    truth = exact(load, capacities)
    errors, covered = [], 0
    for salt in range(3):
        curve = TraceCurve(0.05, Random(salt).getrandbits(64))
        curve.add(load)
        assert (curve.accesses, curve.distinct) == (len(load), distinct)
        pairs = [*zip(curve.points(capacities), truth, strict=True)]
        errors.append(max(abs(point.hit_ratio - ratio) for point, ratio in pairs))
        covered += sum(point.low - 1e-9 <= ratio <= point.high + 1e-9 for point, ratio in pairs)
    assert statistics.fmean(errors) <= 0.015
    assert covered >= 0.9 * 3 * len(capacities)


def test_a_full_sample_becomes_smaller() -> None:
    """The limit holds, and the curve stays near the exact one."""
    stream = zipf(20_000, 0.8, 5_000, 1)
    capacities = [50, 200, 800, 3200]
    keys: dict[int, int] = {}
    ours, random = ReuseTracker(max_blocks=600), Random(2)
    for step, block in enumerate(stream):
        is_new, is_hot = block not in keys, block < 20
        key = keys.setdefault(block, random.getrandbits(64))
        ours.curve.count(is_new, not is_new)
        if is_hot or key >= ours.floor:
            is_hit = not is_new and (is_hot or key in ours)
            ours.use(key, float(step), is_hot=is_hot, is_hit=is_hit)
    assert ours.tracked <= 600
    found = [point.hit_ratio for point in ours.points(capacities)]
    assert found == pytest.approx(exact(stream, capacities), abs=0.06)


def test_blocks_that_come_and_go_take_no_memory() -> None:
    """A loop beyond the horizon enters the sample again and again."""
    ours = ReuseTracker(max_blocks=800)
    ours.horizon = 900.0
    blocks = [Random(number).getrandbits(64) for number in range(1200)]
    for step in range(12_000):
        ours.use(blocks[step % len(blocks)], float(step), is_hot=False, is_hit=False)
    keys = ours._keys
    assert ours.tracked <= 800
    assert len(keys) == len(keys._heap) + len(keys._unsifted) <= 2 * 800 + 1


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


def test_beyond_the_horizon_blocks_leave_first() -> None:
    """The sample stays as large as before as long as the oldest blocks are of no interest."""
    ours = ReuseTracker(max_blocks=5000)
    ours.horizon = 2500.0
    random = Random(1)
    for step in range(15_000):
        ours.use(random.getrandbits(64), float(step), is_hot=False, is_hit=False)

    assert ours.rate == 1.0
    assert 2500 <= ours.tracked <= 5000


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
