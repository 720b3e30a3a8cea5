"""A naive model of a cache whose requests hold their blocks, and random runs of it."""

from __future__ import annotations

import math
from random import Random

from sidestep.protocol.cache_lookups import Lookup
from sidestep.tracking.kv_blocks.lru_stack import LruStack
from sidestep.tracking.kv_blocks.reuse import Misses, ReuseTracker

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
