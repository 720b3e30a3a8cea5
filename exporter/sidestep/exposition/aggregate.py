"""How the series of several engines become one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.model import Combine
from sidestep.metrics.engine import Number
from sidestep.metrics.histogram import Histogram, State

Shown = TypeVar("Shown")
"""What is shown of a histogram."""
Made = TypeVar("Made")
Turn = TypeVar("Turn")
Turns = Generator[None, None, Made]
"""Makes something; between two steps the event loop may have its turn."""
Merge = Callable[[Sequence[Shown]], Turns[Shown]]

AT_ONCE = 100
"""Histograms whose counts are added up in a step: a microsecond each."""
FEW = 20
"""Likewise, native ones: some 20 us each."""
ADDED = ("num_gpu_blocks", "num_cpu_blocks", "num_pages", "kv_cache_size_tokens")
"""Labels of a cache's configuration that say how much there is of it."""
BLOCK_SIZES = {"block_size": "num_gpu_blocks", "page_size": "num_pages"}
"""Labels that say how large a block is, and those that count such blocks."""


def turning(making: Turns[Made], turn: Turn) -> Generator[Turn, None, Made]:
    """What ``making`` makes; ``turn`` stands where one is due."""
    while True:
        try:
            next(making)
        except StopIteration as done:
            made: Made = done.value
            return made
        yield turn


def combined_numbers(values: Sequence[Number], rule: Combine) -> Number:
    """One number of several; a sum is the same in whatever order they come.

    Otherwise a counter could fall by its last digit when an engine comes back, which
    Prometheus takes for a reset.
    """
    if len(values) == 1:
        return values[0]
    if rule == "max":
        return max(values)
    if rule == "min":
        return min(values)
    total = sum(values)
    if isinstance(total, float):
        total = math.fsum(values) if math.isfinite(total) else total
    return total / len(values) if rule == "mean" else total


def merged(
    values: Sequence[Number | Shown], rule: Combine, merge: Merge[Shown]
) -> Turns[Number | Shown]:
    """One series of several: of numbers by ``rule``, of histograms by ``merge``."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) == len(values):
        return combined_numbers(numbers, rule)
    return (yield from merge([value for value in values if not isinstance(value, int | float)]))


def merged_states(found: Sequence[State]) -> Turns[State]:
    """One histogram of several, over the bounds that all have: its counts are exact."""
    if len(found) == 1:
        return found[0]
    by_bounds: dict[Bounds, list[Sequence[int]]] = {}
    last: Bounds | None = None
    same: list[Sequence[int]] = []
    for bounds, counts, _ in found:
        if bounds is not last:
            last, same = bounds, by_bounds.setdefault(bounds, [])
        same.append(counts)
    summed: list[tuple[Bounds, Sequence[int]]] = []
    for bounds, (first, *others) in by_bounds.items():
        total = first
        for start in range(0, len(others), AT_ONCE):
            total = [*map(sum, zip(total, *others[start : start + AT_ONCE], strict=True))]
            yield
        summed.append((bounds, total))
    (bounds, total), *rest = summed
    if rest:
        bounds = common_bounds(by_bounds)
        total = [0] * (len(bounds) + 1)
        for other in summed:
            total = [a + b for a, b in zip(total, _over(*other, bounds), strict=True)]
            yield
    return bounds, total, math.fsum([one for _, _, one in found])


def merged_histograms(found: Sequence[Histogram]) -> Turns[Histogram]:
    """Likewise, with their native buckets where they have such and all bounds are the same."""
    first = found[0]
    if len(found) == 1:
        return first
    if type(first) is Histogram or any(other.bounds != first.bounds for other in found):
        bounds, counts, summed = yield from merged_states(
            [(h.bounds, h.counts, h.sum) for h in found]
        )
        plain = Histogram(bounds)
        plain.counts, plain.sum = [*counts], summed
        return plain
    total = first.empty_copy()
    for number, other in enumerate(found, start=1):
        total.merge(other)
        if not number % FEW:
            yield
    total.sum = math.fsum(other.sum for other in found)
    return total


def common_bounds(found: Iterable[Bounds]) -> Bounds:
    """Those that are in all of ``found``."""
    first, *others = found
    shared = set(first).intersection(*others)
    return tuple(bound for bound in first if bound in shared)


def _over(known: Bounds, counts: Sequence[int], bounds: Bounds) -> list[int]:
    """``counts`` by ``known`` in buckets of ``bounds``, each of which is one of these."""
    cumulative = [*accumulate(counts)]
    places = {bound: place for place, bound in enumerate(known)}
    upto = [*(cumulative[places[bound]] for bound in bounds), cumulative[-1]]
    return [count - before for count, before in zip(upto, [0, *upto], strict=False)]


def combined_info(found: Sequence[Mapping[str, str]]) -> Turns[dict[str, str]]:
    """The labels of one info metric for several engines: what all of them say, and how much.

    Blocks are added up; where their sizes differ they are counted in the smallest, so that
    size times number is what all engines have. A label that engines disagree about is left out.
    """
    often: Counter[tuple[tuple[str, str], ...]] = Counter()
    for start in range(0, len(found), AT_ONCE):
        often.update([tuple(one.items()) for one in found[start : start + AT_ONCE]])
        yield
    # Most engines of a fleet say the same.
    told = [(dict(pairs), times) for pairs, times in often.items()]
    first = dict(found[0])
    if len(found) == 1:
        return first
    shared: set[str] = set(first)
    alike: set[tuple[str, str]] = set(first.items())
    for one, _ in told:
        shared &= one.keys()
        alike &= one.items()
    labels = {name: value for name, value in first.items() if (name, value) in alike}
    for name in ADDED:
        if name in shared and all(_is_whole(one[name]) for one, _ in told):
            labels[name] = str(sum(times * int(one[name]) for one, times in told))
    for size, number in BLOCK_SIZES.items():
        if size in shared and size not in labels and all(_is_whole(one[size]) for one, _ in told):
            least = min(int(one[size]) for one, _ in told)
            labels[size] = str(least)
            if number in labels and least:
                tokens = sum(times * int(one[size]) * int(one[number]) for one, times in told)
                labels[number] = str(tokens // least)
    return labels


def combined_adapters(found: Iterable[str]) -> str:
    """One list of LoRA adapters of several, each once."""
    names = {name for one in found for name in one.split(",") if name}
    return ",".join(sorted(names))


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit()
