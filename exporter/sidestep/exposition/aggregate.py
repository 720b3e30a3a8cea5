"""Aggregation of one series of several engines into one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.model import Combine
from sidestep.exposition.engine_values import Value
from sidestep.metrics.engine import Number
from sidestep.metrics.exemplars import newest
from sidestep.metrics.histogram import Histogram

Aggregator = Callable[[Sequence[Histogram]], Histogram]

SUMMED_INFO_LABELS = ("num_gpu_blocks", "num_cpu_blocks", "num_pages", "kv_cache_size_tokens")
"""Labels of a cache's configuration that are amounts."""
BLOCK_SIZE_LABELS = {"block_size": "num_gpu_blocks", "page_size": "num_pages"}
"""Labels with the size of a block, and the label that counts such blocks."""


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


def aggregate_values(values: Sequence[Value], rule: Combine, aggregate: Aggregator) -> Value:
    """Aggregate values of one series: numbers by ``rule``, histograms by ``aggregate``."""
    if len(values) == 1:
        return values[0]
    histograms = [value for value in values if isinstance(value, Histogram)]
    if histograms:
        return aggregate(histograms)
    return aggregate_numbers([v for v in values if not isinstance(v, Histogram)], rule)


def aggregate_histograms(found: Sequence[Histogram]) -> Histogram:
    """Add up histograms over the bounds that all of them have, which keeps the counts exact.

    Native buckets are left out. Exemplars remain where all bounds are equal.
    """
    if len(found) == 1:
        return found[0]
    by_bounds: dict[Bounds, list[Sequence[int]]] = {}
    for one in found:
        by_bounds.setdefault(one.bounds, []).append(one.counts)
    summed = {
        bounds: [*map(sum, zip(*counts, strict=True))] for bounds, counts in by_bounds.items()
    }
    bounds = common_bounds(summed)
    total = Histogram(bounds)
    if len(summed) == 1:
        total.counts = summed[bounds]
        total.exemplars = newest(one.exemplars for one in found)
    else:
        parts = (rebucketed(own, counts, bounds) for own, counts in summed.items())
        total.counts = [*map(sum, zip(*parts, strict=True))]
    total.sum = math.fsum(one.sum for one in found)
    return total


def aggregate_native(found: Sequence[Histogram]) -> Histogram:
    """Add up histograms, with their native buckets if all have them and the same bounds."""
    first = found[0]
    if len(found) == 1:
        return first
    if type(first) is Histogram or any(other.bounds != first.bounds for other in found):
        return aggregate_histograms(found)
    total = first.empty_copy()
    for other in found:
        total.merge(other)
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


def aggregate_info(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Aggregate the labels of an info metric: labels that are equal everywhere, and summed amounts.

    Numbers of blocks are summed; if their sizes differ, blocks are counted in the smallest size,
    so that size times number is the total. Any other label that differs is left out.
    """
    occurrences = Counter(tuple(one.items()) for one in found)
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
