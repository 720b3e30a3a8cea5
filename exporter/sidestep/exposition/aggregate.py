"""Aggregation of one series of several engines into one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.model import Combine
from sidestep.metrics.engine import Number
from sidestep.metrics.exemplars import NO_EXEMPLARS, newest
from sidestep.metrics.histogram import Histogram, State

HistogramValue = TypeVar("HistogramValue")
"""Copy of what a page format needs of a histogram."""
Result = TypeVar("Result")
Pause = TypeVar("Pause")
Steps = Generator[None, None, Result]
"""Generator that returns a result; each step is a point to yield to the event loop."""
Aggregator = Callable[[Sequence[HistogramValue]], Steps[HistogramValue]]

HISTOGRAMS_PER_SLICE = 100
"""Histograms whose counts are added in one step: a microsecond each."""
NATIVE_PER_SLICE = 20
"""Native histograms that are merged in one step: some 20 us each."""
SUMMED_INFO_LABELS = ("num_gpu_blocks", "num_cpu_blocks", "num_pages", "kv_cache_size_tokens")
"""Labels of a cache's configuration that are amounts."""
BLOCK_SIZE_LABELS = {"block_size": "num_gpu_blocks", "page_size": "num_pages"}
"""Labels with the size of a block, and the label that counts such blocks."""


def run_yielding(steps: Steps[Result], pause: Pause) -> Generator[Pause, None, Result]:
    """Run ``steps`` and return its result; yield ``pause`` at each step."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: Result = done.value
            return result
        yield pause


def aggregate_numbers(values: Sequence[Number], rule: Combine) -> Number:
    """Aggregate numbers by ``rule``; a sum does not depend on their order.

    Otherwise the last digit of a counter could decrease when an engine comes back, which
    Prometheus takes for a counter reset.
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


def aggregate_values(
    values: Sequence[Number | HistogramValue], rule: Combine, aggregate: Aggregator[HistogramValue]
) -> Steps[Number | HistogramValue]:
    """Aggregate values of one series: numbers by ``rule``, histograms by ``aggregate``."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) == len(values):
        return aggregate_numbers(numbers, rule)
    return (yield from aggregate([value for value in values if not isinstance(value, int | float)]))


def aggregate_states(found: Sequence[State]) -> Steps[State]:
    """Add up histograms over the bounds that all of them have, which keeps the counts exact.

    Exemplars remain where all bounds are equal.
    """
    if len(found) == 1:
        return found[0]
    by_bounds: dict[Bounds, list[Sequence[int]]] = {}
    last: Bounds | None = None
    same: list[Sequence[int]] = []
    for bounds, counts, _, _ in found:
        if bounds is not last:
            last, same = bounds, by_bounds.setdefault(bounds, [])
        same.append(counts)
    summed: list[tuple[Bounds, Sequence[int]]] = []
    for bounds, (first, *others) in by_bounds.items():
        total = first
        for start in range(0, len(others), HISTOGRAMS_PER_SLICE):
            total = [
                *map(sum, zip(total, *others[start : start + HISTOGRAMS_PER_SLICE], strict=True))
            ]
            yield
        summed.append((bounds, total))
    (bounds, total), *rest = summed
    exemplars = NO_EXEMPLARS
    if not rest:
        exemplars = newest(one for *_, one in found)
    else:
        bounds = common_bounds(by_bounds)
        total = [0] * (len(bounds) + 1)
        for other in summed:
            total = [a + b for a, b in zip(total, rebucketed(*other, bounds), strict=True)]
            yield
    return bounds, total, math.fsum([one for _, _, one, _ in found]), exemplars


def aggregate_histograms(found: Sequence[Histogram]) -> Steps[Histogram]:
    """Add up histograms, with their native buckets if all have them and the same bounds."""
    first = found[0]
    if len(found) == 1:
        return first
    if type(first) is Histogram or any(other.bounds != first.bounds for other in found):
        bounds, counts, summed, exemplars = yield from aggregate_states(
            [(h.bounds, h.counts, h.sum, h.exemplars) for h in found]
        )
        plain = Histogram(bounds)
        plain.counts, plain.sum, plain.exemplars = [*counts], summed, exemplars
        return plain
    total = first.empty_copy()
    for number, other in enumerate(found, start=1):
        total.merge(other)
        if not number % NATIVE_PER_SLICE:
            yield
    total.sum = math.fsum(other.sum for other in found)
    total.exemplars = newest(other.exemplars for other in found)
    return total


def common_bounds(found: Iterable[Bounds]) -> Bounds:
    """Return the bounds that are in all of ``found``."""
    first, *others = found
    shared = set(first).intersection(*others)
    return tuple(bound for bound in first if bound in shared)


def rebucketed(own_bounds: Bounds, counts: Sequence[int], bounds: Bounds) -> list[int]:
    """Convert ``counts`` of buckets ``own_bounds`` to ``bounds``, a subset of them."""
    cumulative = [*accumulate(counts)]
    places = {bound: place for place, bound in enumerate(own_bounds)}
    upto = [*(cumulative[places[bound]] for bound in bounds), cumulative[-1]]
    return [count - before for count, before in zip(upto, [0, *upto], strict=False)]


def aggregate_info(found: Sequence[Mapping[str, str]]) -> Steps[dict[str, str]]:
    """Aggregate the labels of an info metric: labels that are equal everywhere, and summed amounts.

    Numbers of blocks are summed; if their sizes differ, blocks are counted in the smallest size,
    so that size times number is the total. Any other label that differs is left out.
    """
    occurrences: Counter[tuple[tuple[str, str], ...]] = Counter()
    for start in range(0, len(found), HISTOGRAMS_PER_SLICE):
        occurrences.update(
            [tuple(one.items()) for one in found[start : start + HISTOGRAMS_PER_SLICE]]
        )
        yield
    # Most engines of a fleet have the same labels.
    distinct = [(dict(pairs), times) for pairs, times in occurrences.items()]
    first = dict(found[0])
    if len(found) == 1:
        return first
    shared: set[str] = set(first)
    equal_pairs: set[tuple[str, str]] = set(first.items())
    for one, _ in distinct:
        shared &= one.keys()
        equal_pairs &= one.items()
    labels = {name: value for name, value in first.items() if (name, value) in equal_pairs}
    for name in SUMMED_INFO_LABELS:
        if name in shared and all(_is_whole(one[name]) for one, _ in distinct):
            labels[name] = str(sum(times * int(one[name]) for one, times in distinct))
    for size, number in BLOCK_SIZE_LABELS.items():
        if (
            size in shared
            and size not in labels
            and all(_is_whole(one[size]) for one, _ in distinct)
        ):
            least = min(int(one[size]) for one, _ in distinct)
            labels[size] = str(least)
            if number in labels and least:
                tokens = sum(times * int(one[size]) * int(one[number]) for one, times in distinct)
                labels[number] = str(tokens // least)
    return labels


def aggregate_adapters(found: Iterable[str]) -> str:
    """Merge comma-separated lists of LoRA adapters; each adapter is in the result once."""
    names = {name for one in found for name in one.split(",") if name}
    return ",".join(sorted(names))


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit()
