"""Aggregation of series that are equal, or become equal once dropped labels are removed.

Counters of an engine that has gone stay in the sum as long as the registry retains its totals and
another engine has the same labels: Prometheus would take a smaller sum for a counter reset.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.row import Combine, Handler, Info, Row
from sidestep.exposition.engine_values import (
    EngineValues,
    RegistryValues,
    Value,
)
from sidestep.exposition.families import Children, Family, LabelCache
from sidestep.exposition.series_filter import RANK_LABELS
from sidestep.metrics.engine import ORIGIN
from sidestep.metrics.engine_state import Key, Number
from sidestep.metrics.exemplars import newest
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeHistogram

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
    if not isinstance(first, NativeHistogram) or any(
        other.bounds != first.bounds for other in found
    ):
        return aggregate_histograms(found)
    total: Histogram = NativeHistogram(first.bounds, first.schema, first.created)
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


Labels = tuple[tuple[str, str], ...]
"""Label pairs, sorted by name."""
Series = tuple[Labels, Value]
"""Labels and value."""
Replica = tuple[Labels, tuple[int, ...]]
"""Labels that the ranks of one replica share, and the rank."""
Groups = dict[Labels, list[Value]]
"""Values to aggregate, by the labels of the resulting series."""
EngineState = tuple[EngineValues, Key, Children]
"""An engine, own label names, and values by own label values."""

LORA = Handler("lora")
INFO = "_info"


class AggregatedSeries:
    """Series of a registry, one for each set of labels without the ``dropped`` ones."""

    def __init__(self, dropped: frozenset[str] = frozenset()) -> None:
        self._dropped = dropped
        self._labels: LabelCache[Labels] = LabelCache(
            lambda labels: tuple(sorted(pair for pair in labels.items() if pair[0] not in dropped))
        )
        self._replicas: LabelCache[Replica] = LabelCache(replica_of)

    def retain(self, values: RegistryValues) -> None:
        """Drop what belongs to engines that are gone."""
        present = [*values.engines, *values.gone]
        self._labels.retain(present)
        self._replicas.retain(present)

    def series(self, values: RegistryValues, family: Family, aggregate: Aggregator) -> list[Series]:
        """Return the series of ``family``; ``aggregate`` adds up histograms."""
        groups: Groups = {}
        for dialect in family.assignments or ("",):
            self._add(values, family, dialect, groups)
        found = [*groups.items()]
        if any(placed.row.omits_empty_labels for placed in family.assignments.values()):
            # A client that reads only the first sample of a family gets the sum of the others.
            found.sort(key=lambda one: len(one[0]))
        return [
            (labels, aggregate_values(some, family.combine, aggregate)) for labels, some in found
        ]

    def _add(self, values: RegistryValues, family: Family, dialect: str, groups: Groups) -> None:
        """Add the values of one dialect's engines, or of all that describe a family, to ``groups``."""
        placed = family.assignments.get(dialect)
        row = None if placed is None else placed.row
        engines = values.of_dialect.get(dialect, ()) if family.assignments else values.engines
        counted = exposed = family.having(engines, placed)
        gone: Sequence[EngineValues] = ()
        if self._dropped and family.kind != "gauge":
            layouts = {engine.layout for engine in exposed}
            gone = family.having([e for e in values.gone if e.layout in layouts], placed)
        if gone or (row is not None and row.mirrored):
            counted = self._counted(family, exposed, gone, row)
        found = [(engine, *family.children(engine)) for engine in counted]
        found = [one for one in found if one[2]]
        if "engine" in self._dropped and row is not None and row.source == LORA:
            self._add_adapters(values, family, found, groups)
        elif self._dropped and _is_info(family, row):
            self._add_infos(family, row, found, groups)
        else:
            self._add_values(family, row, found, groups)

    def _counted(
        self,
        family: Family,
        exposed: Sequence[EngineValues],
        gone: Sequence[EngineValues],
        row: Row | None,
    ) -> Sequence[EngineValues]:
        """Return the engines whose values count.

        Those of an engine that is gone count if an exposed engine has the same labels. If all ranks
        of a replica report the same requests, only its first rank counts.
        """
        outer = {engine: self._outer(engine, family) for engine in (*exposed, *gone)}
        shown = {outer[engine] for engine in exposed}
        counted = [engine for engine, labels in outer.items() if labels in shown]
        if row is None or not row.mirrored:
            return counted
        replicas = {e: self._replicas.get(e, family, (), [()])[0] for e in counted}
        first: dict[tuple[Labels, Labels], tuple[int, ...]] = {}
        for engine, (replica, rank) in replicas.items():
            key = outer[engine], replica
            first[key] = min(rank, first.get(key, rank))
        return [e for e, (replica, rank) in replicas.items() if rank == first[outer[e], replica]]

    def _outer(self, engine: EngineValues, family: Family) -> Labels:
        """Return the remaining labels of an engine."""
        return self._labels.get(engine, family, (), [()])[0]

    def _add_values(
        self, family: Family, row: Row | None, found: Iterable[EngineState], groups: Groups
    ) -> None:
        """Add values by the labels of their series."""
        omits = row is not None and row.omits_empty_labels
        for one in found:
            engine, names, children = self._without_addends(one) if omits else one
            labels = self._labels.get(engine, family, names, [key for key, _ in children])
            for own, (_, value) in zip(labels, children, strict=True):
                groups.setdefault(own, []).append(value)

    def _without_addends(self, one: EngineState) -> EngineState:
        """Leave out series with dropped labels if one without them is their sum."""
        engine, names, children = one
        dropped = [place for place, name in enumerate(names) if name in self._dropped]
        sums = [one for one in children if not any(one[0][place] for place in dropped)]
        return engine, names, sums or children

    def _add_infos(
        self, family: Family, row: Row | None, found: Iterable[EngineState], groups: Groups
    ) -> None:
        """Add info metrics, of which engines with the same remaining labels have one together."""
        for outer, some in self._by_outer(family, found).items():
            if row is not None or all(len(children) == 1 for _, _, children in some):
                infos = [dict(zip(names, key, strict=True)) for _, names, ((key, _),) in some]
                groups[self._joined(outer, aggregate_info(infos))] = [1]
            else:
                self._add_values(family, row, some, groups)

    def _add_adapters(
        self,
        values: RegistryValues,
        family: Family,
        found: Iterable[EngineState],
        groups: Groups,
    ) -> None:
        """Add the LoRA adapters of engines with the same remaining labels as one series.

        Its value is the newest time.
        """
        capacity: Counter[Labels] = Counter()
        for engine in values.engines:
            if engine.live and engine.layout.dialect in family.assignments:
                most = engine.info.get("lora", {}).get("max_lora", "")
                number = int(most) if most.isascii() and most.isdigit() else 0
                capacity[self._outer(engine, family)] += number
        for outer, some in self._by_outer(family, found).items():
            children = [one for _, _, own in some for one in own]
            labels = {
                "max_lora": str(capacity[outer]),
                "running_lora_adapters": aggregate_adapters(key[1] for key, _ in children),
                "waiting_lora_adapters": aggregate_adapters(key[2] for key, _ in children),
            }
            newest = [value for _, value in children if not isinstance(value, Histogram)]
            groups[self._joined(outer, labels)] = [max(newest)]

    def _by_outer(
        self, family: Family, found: Iterable[EngineState]
    ) -> dict[Labels, list[EngineState]]:
        by_outer: dict[Labels, list[EngineState]] = {}
        for one in found:
            by_outer.setdefault(self._outer(one[0], family), []).append(one)
        return by_outer

    def _joined(self, outer: Labels, own: Mapping[str, str]) -> Labels:
        left = [pair for pair in own.items() if pair[0] not in self._dropped]
        return tuple(sorted((*outer, *left)))


def _is_info(family: Family, row: Row | None) -> bool:
    if row is not None:
        return isinstance(row.source, Info)
    return family.kind == "gauge" and family.name.endswith(INFO)


def replica_of(labels: Mapping[str, str]) -> Replica:
    """Return the replica that labels name, and the rank within it."""
    shared = [one for one in labels.items() if one[0] not in RANK_LABELS and one[0] != ORIGIN]
    ranks = [labels.get(name, "") for name in RANK_LABELS]
    return tuple(sorted(shared)), tuple(
        int(rank) if rank.isascii() and rank.isdigit() else 0 for rank in ranks
    )
