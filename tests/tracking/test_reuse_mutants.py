"""Mutants of the estimator, each of which the naive model or an exact curve must notice."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from random import Random
from types import ModuleType

import pytest

from naive_reuse import compare, compare_stack
from reuse_streams import exact, zipf
from sidestep.tracking.kv_blocks import hit_ratio_curve, lru_stack, reuse

MODULES = (lru_stack, hit_ratio_curve, reuse)
COUNT = "self.curve.count(lookup.blocks - lookup.found, lookup.found)"
ABOVE = "        above = self._held_counted\n"
MUTANTS: Mapping[str, tuple[ModuleType, str, str]] = {
    "a block counts itself": (lru_stack, "            above ^= 1\n", ""),
    "a chunk counts a block that left": (lru_stack, "            counts[index] -= 1\n", ""),
    "depth ends with the block's chunk": (lru_stack, " + sum(counts[index + 1 :])", ""),
    "a merge takes any two": (lru_stack, "sizes[i] + sizes[i + 1] <= CHUNK", "True"),
    "a merge loses the stamps": (lru_stack, "append(chunk.stamps[offset])", "append(0.0)"),
    "a merge counts all": (lru_stack, "digits.append(marks[-1 - offset])", "digits.append('1')"),
    "use since a time counts all": (lru_stack, "bisect_left(chunk.stamps, stamp)", "0"),
    "held blocks are not above": (reuse, "(used[0] + above, used[1])", "used"),
    "a held block is above itself": (reuse, ABOVE, ABOVE.replace("counted\n", "counted + 1\n")),
    "the last holder's release counts for all": (reuse, "holders > 1", "holders > 2"),
    "first blocks go first": (reuse, "reversed(keys)", "keys"),
    "output is not stored": (
        reuse,
        "                self._keys.add(key, self, self.max_blocks)\n            stack.push",
        "                continue\n            stack.push",
    ),
    "a clear is not noted": (reuse, "self._cleared_at = now", "pass"),
    "a lookup does not count": (reuse, COUNT, "pass"),
    "hits and misses are exchanged": (
        reuse,
        COUNT,
        "self.curve.count(lookup.found, lookup.blocks - lookup.found)",
    ),
    "distances are not scaled": (reuse, "used[0] * scale + 1.0", "used[0] + 1.0"),
    "a distance leaves its block out": (reuse, " * scale + 1.0", " * scale"),
    "a cleared block is cold": (reuse, "misses.cleared += weight", "misses.cold += weight"),
    "a full sample keeps its rate": (
        reuse,
        "self.floor = max(self.floor, self._leave_least() + 1)",
        "self._leave_least()",
    ),
    "a hit has the distances of misses": (
        hit_ratio_curve,
        "lookups = self._by_result[hit]\n",
        "lookups = self._by_result[False]\n",
    ),
    "hot lookups count twice": (
        hit_ratio_curve,
        "self.total - sum(self.hot.values())",
        "self.total",
    ),
    "the sample stands for nothing": (hit_ratio_curve, "hot + rest * _share(sampled, size)", "hot"),
}


@contextmanager
def mutated(original: ModuleType, before: str, after: str) -> Iterator[ModuleType]:
    """Yield the tracker with the mutant in it or in what it uses, and small chunks."""
    saved = {module.__name__: module for module in MODULES}
    try:
        for name, module in saved.items():
            source = inspect.getsource(module)
            if module is original:
                assert source.count(before) == 1, f"fits {source.count(before)} places"
                source = source.replace(before, after)
            source = source.replace("CHUNK = 2048", "CHUNK = 8")
            # Struct types look their module up by name.
            sys.modules[name] = copy = ModuleType(name)
            exec(compile(source, name, "exec"), copy.__dict__)
        yield sys.modules[reuse.__name__]
    finally:
        sys.modules.update(saved)


def passes(mutant: ModuleType) -> bool:
    """Return whether random requests and a sampled curve are right with this tracker."""
    try:
        for seed in range(40):
            compare(seed, mutant.ReuseTracker)
            compare_stack(seed, 40, mutant.LruStack)
        check_sample(mutant)
    except (AssertionError, LookupError, ValueError):
        return False
    return True


def check_sample(mutant: ModuleType) -> None:
    """Compare the curve of a sample, which becomes smaller, with the exact one."""
    stream = zipf(20_000, 0.8, 5_000, 1)
    capacities = [50, 200, 800, 3200]
    keys: dict[int, int] = {}
    ours, random = mutant.ReuseTracker(max_blocks=600), Random(2)
    for step, block in enumerate(stream):
        is_new, is_hot = block not in keys, block < 20
        key = keys.setdefault(block, random.getrandbits(64))
        ours.curve.count(is_new, not is_new)
        if is_hot or key >= ours.floor:
            is_hit = not is_new and (is_hot or key in ours)
            ours.use(key, float(step), is_hot=is_hot, is_hit=is_hit)
    assert ours.tracked <= 600
    found = [point.hit_ratio for point in ours.points(capacities)]
    for one, ratio in zip(found, exact(stream, capacities), strict=True):
        assert abs(one - ratio) < 0.06


def test_the_estimator_itself_passes() -> None:
    """A copy without a mutant passes what mutants must fail."""
    with mutated(reuse, "TRIM = 256", "TRIM = 256") as copy:
        assert passes(copy)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_killed(name: str) -> None:
    """A mutant that survives is a fault that the model cannot notice."""
    with mutated(*MUTANTS[name]) as mutant:
        assert not passes(mutant)
