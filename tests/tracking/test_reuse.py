"""Reuse distances of sampled lookups, against exact LRU caches and a naive model."""

from __future__ import annotations

import math
import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reuse_streams import exact, loops, zipf
from sidestep.protocol.cache_lookups import Lookup
from sidestep.tracking.kv_blocks import lru_stack
from sidestep.tracking.kv_blocks.hit_ratio_curve import FINE, HitRatioCurve, bucket
from sidestep.tracking.kv_blocks.hot_blocks import HotBlocks
from sidestep.tracking.kv_blocks.lru_stack import LruStack
from sidestep.tracking.kv_blocks.reuse import ALL, Misses, ReuseTracker
from sidestep_tools.whatif.estimate import TraceCurve

CAPACITIES = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]


class NaiveCache:
    """All blocks in a list, those that were released last at its end."""

    def __init__(self) -> None:
        self.released: list[int] = []
        self.stamps: dict[int, float] = {}
        self.held: list[int] = []
        self.distances: list[float] = []
        self.misses = Misses()
        self.cleared_at = -1.0

    def admit(self, keys: list[int], found: int, now: float) -> None:
        """Look up blocks and hold them."""
        for index, key in enumerate(keys):
            distance, idle = math.inf, 0.0
            if key in self.held:
                distance = 1.0
            elif key in self.released:
                above = len(self.released) - self.released.index(key) - 1
                if self.stamps[key] > self.cleared_at:
                    distance = above + len({*self.held}) + 1
                idle = now - self.stamps[key]
                self.released.remove(key)
            is_hit = index < found
            in_progress = key in self.held and not is_hit
            if in_progress:
                distance = math.inf
            if not is_hit or distance < math.inf:
                self.distances.append(distance)
            if in_progress:
                self.misses.in_progress += 1
            elif not is_hit:
                self._miss(key, distance, idle)
            self.stamps[key] = now
            self.held.append(key)

    def _miss(self, key: int, distance: float, idle: float) -> None:
        if key not in self.stamps:
            self.misses.cold += 1
        elif distance == math.inf:
            self.misses.cleared += 1
        else:
            self.misses.evicted.append((idle, 1.0))

    def release(self, keys: list[int], now: float) -> None:
        """End a request, whose first blocks stay longest."""
        for key in reversed(keys):
            if key in self.held:
                self.held.remove(key)
            if key in self.held:
                continue
            if key in self.released:
                self.released.remove(key)
            self.released.append(key)
            self.stamps[key] = now


def compare(seed: int) -> None:
    """Run random requests through both, which must agree on every distance and every reason."""
    random = Random(seed)
    ours, naive = ReuseTracker(), NaiveCache()
    running: list[list[int]] = []
    now, looked_up, clears = 0.0, 0, random.random() < 0.5
    roots = [random.getrandbits(64) for _ in range(6)]
    for number in range(60):
        now += random.random()
        root, size = random.choice(roots), random.randint(0, 9)
        steps = (step * random.choice([1, 1, 1, 7]) for step in range(size))
        keys = [*dict.fromkeys((root + step) % (1 << 64) for step in steps)]
        known = next((n for n, key in enumerate(keys) if key not in naive.stamps), len(keys))
        found = random.randint(0, known)
        split = random.randint(0, len(keys)) if number % 3 else 0
        lookup = Lookup(
            number,
            now,
            blocks=len(keys),
            found=found,
            hot_blocks=split,
            hot=keys[:split],
            hot_step=1,
            sampled=keys[split:],
            sampled_found=max(found - split, 0),
        )
        naive.misses = Misses()
        naive.admit(keys, found, now)
        assert ours.admit(lookup, now) == naive.misses
        looked_up += len(keys)
        running.append([*keys, *(random.getrandbits(64) for _ in range(random.randint(0, 2)))])
        while len(running) > random.randint(1, 5):
            ended = running.pop(random.randrange(len(running)))
            now += random.random()
            ours.release(ended, now)
            naive.release(ended, now)
        if clears and random.random() < 0.05:
            ours.reset(now)
            naive.cleared_at = now
        assert ours.tracked == len({*naive.released, *naive.held})
    if looked_up and len(naive.distances) == looked_up:
        # Otherwise hits without a distance are taken to have that of others.
        exact = [sum(d <= c for d in naive.distances) / looked_up for c in CAPACITIES]
        points = ours.points(CAPACITIES)
        assert all(abs(p.hit_ratio - e) < 1e-9 for p, e in zip(points, exact, strict=True))
    since = sorted(naive.stamps[key] for key in naive.released)
    if since:
        middle = since[len(since) // 2]
        used = sum(stamp >= middle for stamp in since) + len({*naive.held})
        assert ours.used_since(middle) == used


def compare_stack(seed: int, blocks: int) -> None:
    """Use random blocks in a stack and in a dictionary, which must agree on depths and stamps."""
    random, stack = Random(seed), LruStack()
    naive: dict[int, tuple[float, bool]] = {}
    for step in range(600):
        key = random.randrange(blocks)
        found = stack.remove(key)
        if key in naive:
            below = [*naive].index(key) + 1
            above = sum(counted for _, counted in [*naive.values()][below:])
            assert found == (above, naive.pop(key)[0])
        else:
            assert found is None
        if random.random() < 0.9:
            naive[key] = float(step), random.random() < 0.7
            stack.push(key, naive[key][0], counted=naive[key][1])
        since = random.uniform(0, step)
        assert stack.counted == sum(counted for _, counted in naive.values())
        assert stack.used_since(since) == sum(c for at, c in naive.values() if at >= since)
        assert all(key in stack for key in naive)


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
