"""Aggregation of series that are equal, or become equal once dropped labels are removed.

Counters of an engine that has gone stay in the sum as long as the registry retains its totals and
another engine has the same labels: Prometheus would take a smaller sum for a counter reset.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import Handler, Info
from sidestep.exposition.aggregate import (
    Aggregator,
    Steps,
    aggregate_adapters,
    aggregate_info,
    aggregate_values,
)
from sidestep.exposition.families import Family
from sidestep.exposition.family_snapshot import (
    EngineSnapshot,
    HistogramCopy,
    Values,
    is_in_slots,
    slot_snapshots,
    slot_values,
    snapshot_engines,
)
from sidestep.exposition.label_cache import LabelCache, LabelForm, label_form
from sidestep.exposition.selection import Selections
from sidestep.exposition.series_filter import RANK_LABELS
from sidestep.metrics.engine import ORIGIN, Engine, Number
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry

Labels = tuple[tuple[str, str], ...]
"""Label pairs, sorted by name."""
Series = tuple[Labels, Number | HistogramCopy]
"""Labels and value."""
Replica = tuple[Labels, tuple[int, ...]]
"""Labels that the ranks of one replica share, and the rank."""
Groups = dict[Labels, list[Number | HistogramCopy]]
"""Values to aggregate, by the labels of the resulting series."""

PER_SLICE = 50
"""Series to read or to aggregate before yielding to the event loop: some 10 us each, when new."""
SLOTS_PER_SLICE = 1000
"""Values whose labels are known to add before yielding to the event loop: some 0.3 us each."""
LORA = Handler("lora")
INFO = "_info"


@dataclasses.dataclass(slots=True)
class _Part(Generic[HistogramCopy]):
    """Values of one dialect's engines, or of all engines that describe a family themselves.

    Attributes:
        engines: Exposed engines, then those whose totals stay in the sums.
        exposed: Number of exposed engines.
        snapshots: The values, engine by engine.
        slots: The same values in one list, if the row's values are in slots.
        live: Live engines and their info metrics, if LoRA adapters are aggregated.
    """

    placed: SlotAssignment | None
    form: LabelForm
    engines: Sequence[Engine]
    exposed: int
    snapshots: Iterator[EngineSnapshot[HistogramCopy]]
    slots: Values[HistogramCopy] | None
    live: Sequence[tuple[Engine, Mapping[str, Mapping[str, str]]]] | None


class AggregatedSeries:
    """Series of a registry, one for each set of labels without the ``dropped`` ones."""

    def __init__(self, registry: Registry, dropped: frozenset[str] = frozenset()) -> None:
        self._registry = registry
        self._dropped = dropped
        self._selections = Selections(registry)
        self._labels: LabelCache[Labels] = LabelCache(
            lambda labels: tuple(sorted(pair for pair in labels.items() if pair[0] not in dropped))
        )
        self._replicas: LabelCache[Replica] = LabelCache(replica_of)
        self._of_slots: dict[tuple[object, ...], tuple[Sequence[Engine], list[Labels]]] = {}

    def refresh(self) -> None:
        """Start a page: drop what belongs to engines that are gone."""
        self._selections.refresh()
        self._of_slots.clear()
        present = [*self._registry.engines.values(), *self._registry.retired.values()]
        self._labels.retain(present)
        self._replicas.retain(present)

    def series(
        self,
        family: Family,
        copy: Callable[[Histogram], HistogramCopy],
        aggregate: Aggregator[HistogramCopy],
    ) -> Iterator[Series[HistogramCopy] | None]:
        """Copy the values of ``family`` now; yield its series, None to yield to the event loop."""
        parts = [
            self._part(family, placed, exposed, copy)
            for placed, exposed in self._selections.parts(family)
            if exposed
        ]
        return self._aggregated(family, parts, aggregate)

    def _part(
        self,
        family: Family,
        placed: SlotAssignment | None,
        exposed: list[Engine],
        copy: Callable[[Histogram], HistogramCopy],
    ) -> _Part[HistogramCopy]:
        engines, live = exposed, None
        if self._dropped and family.kind != "gauge":
            gone = self._selections.gone(placed, exposed)
            engines = [*exposed, *gone] if gone else exposed
        if placed is not None and placed.row.source == LORA and "engine" in self._dropped:
            live_engines = self._selections.live(exposed[0].layout.dialect)
            live = [(engine, engine.info) for engine in live_engines]
        slots = None
        if placed is not None and is_in_slots(placed):
            slots = slot_values(placed, engines, copy)
            snapshots = slot_snapshots(placed, engines, slots)
        else:
            snapshots = snapshot_engines(family, placed, engines, copy)
        return _Part(placed, label_form(placed), engines, len(exposed), snapshots, slots, live)

    def _aggregated(
        self,
        family: Family,
        parts: Sequence[_Part[HistogramCopy]],
        aggregate: Aggregator[HistogramCopy],
    ) -> Iterator[Series[HistogramCopy] | None]:
        # Copying the state of a thousand engines takes most of a slice.
        yield None
        groups: Groups[HistogramCopy] = {}
        for part in parts:
            yield from self._add_part(family, part, groups)
        found = [*groups.items()]
        if any(placed.row.omits_empty_labels for placed in family.assignments.values()):
            # A client that reads only the first sample of a family gets the sum of the others.
            found.sort(key=lambda one: len(one[0]))
        spent = 0
        for labels, values in found:
            yield labels, (yield from aggregate_values(values, family.combine, aggregate))
            spent += 1 + len(values)
            if spent >= PER_SLICE:
                yield None
                spent = 0

    def _add_part(
        self, family: Family, part: _Part[HistogramCopy], groups: Groups[HistogramCopy]
    ) -> Iterator[None]:
        """Add the values of ``part`` to ``groups``."""
        row = None if part.placed is None else part.placed.row
        is_info = may_be_info = False
        if self._dropped:
            is_info = row is not None and isinstance(row.source, Info)
            may_be_info = row is None and family.kind == "gauge" and family.name.endswith(INFO)
        is_plain = not is_info and not may_be_info and part.live is None
        if is_plain and len(part.engines) == part.exposed and (row is None or not row.mirrored):
            if part.slots is None:
                yield from self._add_values(family, part, part.snapshots, groups)
            else:
                yield from self._add_slots(family, part, part.slots, groups)
            return
        outer_labels = yield from self._outer_labels(family, part)
        counted = (
            (outer, snapshot)
            for outer, snapshot in zip(outer_labels, part.snapshots, strict=True)
            if outer is not None and snapshot[2]
        )
        if is_plain:
            yield from self._add_values(family, part, (one for _, one in counted), groups)
            return
        by_outer: dict[Labels, list[EngineSnapshot[HistogramCopy]]] = {}
        for outer, snapshot in counted:
            by_outer.setdefault(outer, []).append(snapshot)
        capacity = yield from self._capacity(family, part)
        for outer, snapshots in by_outer.items():
            if part.live is not None:
                self._add_adapters(outer, snapshots, capacity.get(outer, 0), groups)
            elif is_info or all(len(children) == 1 for _, _, children in snapshots):
                infos = [dict(zip(names, key, strict=True)) for _, names, ((key, _),) in snapshots]
                groups[self._joined(outer, (yield from aggregate_info(infos)))] = [1]
            else:
                yield from self._add_values(family, part, snapshots, groups)

    def _add_values(
        self,
        family: Family,
        part: _Part[HistogramCopy],
        snapshots: Iterable[EngineSnapshot[HistogramCopy]],
        groups: Groups[HistogramCopy],
    ) -> Iterator[None]:
        """Add values by the labels of their series."""
        omits = part.placed is not None and part.placed.row.omits_empty_labels
        spent = 0
        for snapshot in snapshots:
            engine, names, children = self._without_addends(snapshot) if omits else snapshot
            known = self._labels.known(engine, part.form, names)
            for key, value in children:
                labels = known.get(key)
                if labels is None:
                    labels = self._labels.add(known, engine, family, names, key)
                groups.setdefault(labels, []).append(value)
                spent += 1
                if spent >= PER_SLICE:
                    yield
                    spent = 0

    def _add_slots(
        self,
        family: Family,
        part: _Part[HistogramCopy],
        slots: Values[HistogramCopy],
        groups: Groups[HistogramCopy],
    ) -> Iterator[None]:
        """Add values in slots by the labels of their series."""
        slot_labels = yield from self._slot_labels(family, part)
        for number, (labels, value) in enumerate(zip(slot_labels, slots, strict=True), start=1):
            if value is not None:
                groups.setdefault(labels, []).append(value)
            if not number % SLOTS_PER_SLICE:
                yield

    def _slot_labels(self, family: Family, part: _Part[HistogramCopy]) -> Steps[Sequence[Labels]]:
        """Return the labels of all slots of all engines, cached until the registry changes."""
        assert part.placed is not None
        names, keys = part.placed.row.own_labels, part.placed.label_values
        cached = id(part.engines), part.form, names, keys
        # The cache holds the list of engines, so no other list has its id.
        _, found = self._of_slots.get(cached, (part.engines, None))
        if found is None:
            found = []
            for number, engine in enumerate(part.engines, start=1):
                found += self._labels.get(engine, family, part.form, names, keys)
                if not number % PER_SLICE:
                    yield
            self._of_slots[cached] = part.engines, found
        return found

    def _without_addends(
        self, snapshot: EngineSnapshot[HistogramCopy]
    ) -> EngineSnapshot[HistogramCopy]:
        """Leave out series with dropped labels if one without them is their sum."""
        engine, names, children = snapshot
        dropped = [place for place, name in enumerate(names) if name in self._dropped]
        sums = [one for one in children if not any(one[0][place] for place in dropped)]
        return engine, names, sums or children

    def _outer_labels(
        self, family: Family, part: _Part[HistogramCopy]
    ) -> Steps[Sequence[Labels | None]]:
        """Return the remaining labels of each engine; None if its values do not count.

        The values of an engine that is gone count if an exposed engine has the same labels. If all
        ranks of a replica report the same requests, only its first rank counts.
        """
        mirrored = part.placed is not None and part.placed.row.mirrored
        outer_labels: list[Labels | None] = []
        replicas: list[Replica] = []
        for number, engine in enumerate(part.engines, start=1):
            outer_labels += self._labels.get(engine, family, part.form, (), [()])
            if mirrored:
                replicas += self._replicas.get(engine, family, part.form, (), [()])
            if not number % PER_SLICE:
                yield
        exposed = {*outer_labels[: part.exposed]}
        outer_labels = [outer if outer in exposed else None for outer in outer_labels]
        first: dict[tuple[Labels | None, Labels], tuple[int, ...]] = {}
        for outer, (replica, rank) in zip(outer_labels, replicas, strict=False):
            first[outer, replica] = min(rank, first.get((outer, replica), rank))
        for place, (replica, rank) in enumerate(replicas):
            if rank != first[outer_labels[place], replica]:
                outer_labels[place] = None
        return outer_labels

    def _capacity(self, family: Family, part: _Part[HistogramCopy]) -> Steps[Mapping[Labels, int]]:
        """Return how many LoRA adapters the live engines with equal labels can run."""
        found: Counter[Labels] = Counter()
        for number, (engine, info) in enumerate(part.live or (), start=1):
            (outer,) = self._labels.get(engine, family, part.form, (), [()])
            most = info.get("lora", {}).get("max_lora", "")
            found[outer] += int(most) if most.isascii() and most.isdigit() else 0
            if not number % PER_SLICE:
                yield
        return found

    def _add_adapters(
        self,
        outer: Labels,
        snapshots: Iterable[EngineSnapshot[HistogramCopy]],
        capacity: int,
        groups: Groups[HistogramCopy],
    ) -> None:
        """Aggregate the LoRA adapters of some engines to one series, at the newest time."""
        children = [one for _, _, some in snapshots for one in some]
        own = {
            "max_lora": str(capacity),
            "running_lora_adapters": aggregate_adapters(key[1] for key, _ in children),
            "waiting_lora_adapters": aggregate_adapters(key[2] for key, _ in children),
        }
        newest = [value for _, value in children if isinstance(value, int | float)]
        groups[self._joined(outer, own)] = [max(newest)]

    def _joined(self, outer: Labels, own: Mapping[str, str]) -> Labels:
        left = [pair for pair in own.items() if pair[0] not in self._dropped]
        return tuple(sorted((*outer, *left)))


def replica_of(labels: Mapping[str, str]) -> Replica:
    """Return the replica that labels name, and the rank within it."""
    shared = [one for one in labels.items() if one[0] not in RANK_LABELS and one[0] != ORIGIN]
    ranks = [labels.get(name, "") for name in RANK_LABELS]
    return tuple(sorted(shared)), tuple(
        int(rank) if rank.isascii() and rank.isdigit() else 0 for rank in ranks
    )
