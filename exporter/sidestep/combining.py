"""How the series of several engines become one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from sidestep.buckets import Bounds
from sidestep.catalogue.model import Combine
from sidestep.engine import Number
from sidestep.histogram import Histogram, State

ADDED = ("num_gpu_blocks", "num_cpu_blocks", "num_pages", "kv_cache_size_tokens")
"""Labels of a cache's configuration that say how much there is of it."""
BLOCK_SIZES = {"block_size": "num_gpu_blocks", "page_size": "num_pages"}
"""Labels that say how large a block is, and those that count such blocks."""


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


def combined_histograms(found: Sequence[Histogram]) -> Histogram:
    """All of them as one, over the bounds that all have: its counts are exact."""
    first = found[0]
    if len(found) == 1:
        return first
    if type(first) is not Histogram and all(other.bounds == first.bounds for other in found):
        return _merged(found)
    bounds, counts, summed = combined_states([(h.bounds, h.counts, h.sum) for h in found])
    total = Histogram(bounds)
    total.counts, total.sum = [*counts], summed
    return total


def combined_states(found: Sequence[State]) -> State:
    """Likewise, of what pages show of them: without native buckets."""
    first = found[0]
    if len(found) == 1:
        return first
    bounds = first[0]
    counts = [other for _, other, _ in found]
    if any(other is not bounds and other != bounds for other, _, _ in found):
        bounds = common_bounds(other for other, _, _ in found)
        counts = [_over(other, bounds) for other in found]
    return bounds, [*map(sum, zip(*counts, strict=True))], math.fsum(total for _, _, total in found)


def _merged(found: Sequence[Histogram]) -> Histogram:
    """Those with native buckets, which are added up, too."""
    total = found[0].empty()
    for other in found:
        total.merge(other)
    total.sum = math.fsum(other.sum for other in found)
    return total


def common_bounds(found: Iterable[Bounds]) -> Bounds:
    """Those that are in all of ``found``."""
    first, *others = found
    shared = set(first).intersection(*others)
    return tuple(bound for bound in first if bound in shared)


def _over(state: State, bounds: Bounds) -> list[int]:
    """Counts of ``state`` in buckets of ``bounds``, each of which it has."""
    known, counts, _ = state
    cumulative = [*accumulate(counts)]
    places = {bound: place for place, bound in enumerate(known)}
    upto = [*(cumulative[places[bound]] for bound in bounds), cumulative[-1]]
    return [count - before for count, before in zip(upto, [0, *upto], strict=False)]


def combined_info(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The labels of one info metric for several engines: what all of them say, and how much.

    Blocks are added up; where their sizes differ they are counted in the smallest, so that
    size times number is what all engines have. A label that engines disagree about is left out.
    """
    first, *others = found
    if not others:
        return dict(first)
    names = [name for name in first if all(name in other for other in others)]
    labels = {name: first[name] for name in names if all(o[name] == first[name] for o in others)}
    for name in ADDED:
        if name in names and all(_is_whole(one[name]) for one in found):
            labels[name] = str(sum(int(one[name]) for one in found))
    for size, number in BLOCK_SIZES.items():
        if size in names and size not in labels and all(_is_whole(one[size]) for one in found):
            least = min(int(one[size]) for one in found)
            labels[size] = str(least)
            if number in labels and least:
                tokens = sum(int(one[size]) * int(one[number]) for one in found)
                labels[number] = str(tokens // least)
    return labels


def combined_adapters(found: Iterable[str]) -> str:
    """One list of LoRA adapters of several, each once."""
    names = {name for one in found for name in one.split(",") if name}
    return ",".join(sorted(names))


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit()
