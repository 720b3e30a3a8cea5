"""Aggregation of series that become equal once dropped labels are removed.

Counters of an engine that has gone stay in the sum as long as the registry retains its totals and
another engine has the same labels: Prometheus would take a smaller sum for a counter reset.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import Combine, Handler, Info, Row
from sidestep.exposition.aggregate import (
    aggregate_adapters,
    aggregate_info,
    aggregate_states,
    aggregate_values,
)
from sidestep.exposition.families import (
    Family,
    active_dialects,
    catalogue_families,
    has_sample_name,
    self_described_families,
)
from sidestep.exposition.family_snapshot import (
    NUMERIC,
    EngineSnapshot,
    histogram_state,
    row_histograms,
    row_numbers,
    snapshot_engines,
)
from sidestep.exposition.grouping import (
    Contributors,
    Group,
    GroupCache,
    Grouping,
    GroupQuery,
    Labels,
    missing_engine_labels,
)
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.metrics.engine import Engine, Key, Number
from sidestep.metrics.histogram import State
from sidestep.metrics.registry import Registry

Value = Number | State
Series = tuple[Labels, Value]

PER_SLICE = 50
"""Series to aggregate before yielding to the event loop: some 10 us each, when they are new."""
LORA = Handler("lora")
INFO = "_info"


class _Contribution(NamedTuple):
    """Values that some engines contribute to one series.

    Attributes:
        outer: Labels of the engines.
        own: Labels of the row.
        whole: Whether these are all values of the series; they replace earlier ones.
    """

    outer: Labels
    own: Labels
    values: Sequence[Value]
    whole: bool = False


class _DialectQuery(NamedTuple):
    """Engines of one dialect, or of none, that have a family, as a query to ``GroupCache``."""

    placed: SlotAssignment | None
    query: GroupQuery

    @property
    def is_mirrored(self) -> bool:
        """Return whether all ranks of a replica report the same values."""
        return self.placed is not None and self.placed.row.mirrored


class AggregatedSeries:
    """Series of a registry without the labels that ``series_filter`` drops."""

    def __init__(self, registry: Registry, series_filter: SeriesFilter) -> None:
        self.registry = registry
        self.series_filter = series_filter
        self._groups = GroupCache(registry, series_filter)
        self._families: dict[frozenset[str], list[Family]] = {}
        """Families of the catalogue, for the latest set of active dialects."""

    def families(self, names: Collection[str] = ()) -> list[Family]:
        """Return the families that engines can have, or those with a sample of ``names``."""
        dialects = active_dialects(self.registry)
        if dialects not in self._families:
            self._families = {dialects: list(catalogue_families(self.registry, dialects))}
        found = [*self._families[dialects], *self_described_families(self.registry)]
        if not names:
            return found
        return [family for family in found if has_sample_name(family.name, family.kind, names)]

    def refresh(self) -> None:
        """Read the present engines; call this at the start of each page."""
        self._groups.refresh()

    def series(self, family: Family) -> Iterator[Series | None]:
        """Yield the series of ``family`` at one moment; None asks to yield to the event loop."""
        queries = self._queries(family)
        if any(self._groups.cached(one.query) is None for one in queries):
            for one in queries:
                yield from self._groups.prepare(one.query, mirrored=one.is_mirrored)
            # Engines may have connected meanwhile.
            queries = self._queries(family)
        found = [*self._contributions(family, queries)]
        # Copying the state of a thousand engines takes most of a slice.
        yield None
        if found:
            by_length = any(placed.row.omits_empty_labels for placed in family.assignments.values())
            yield from _series(chain.from_iterable(found), family.combine, by_length=by_length)

    def _queries(self, family: Family) -> list[_DialectQuery]:
        """Return the engines that have ``family`` now, by dialect, without empty dialects."""
        if not family.assignments:
            all_engines = self._open_engines(family)
            query = GroupQuery(all_engines, (), family.kind != "gauge")
            return [_DialectQuery(None, query)] if all_engines else []
        found = []
        for dialect, placed in family.assignments.items():
            shown = self._groups.engines_of_row(dialect, placed)
            if shown:
                hidden = missing_engine_labels(placed.row.labels)
                query = GroupQuery(shown, hidden, placed.row.kind != "gauge")
                found.append(_DialectQuery(placed, query))
        return found

    def _contributions(
        self, family: Family, queries: Iterable[_DialectQuery]
    ) -> Iterator[Iterable[_Contribution | None]]:
        """Copy the values that all engines have of ``family`` now, to be read afterwards."""
        for placed, query in queries:
            found = self._groups.group(query)
            if placed is None:
                yield self._self_described(family, found)
                continue
            row = placed.row
            if row.source == LORA and "engine" in self.series_filter.dropped_labels:
                yield self._lora_adapters(placed, found.groups)
                continue
            contributors = found.contributors(row)
            engines = [engine for _, some in contributors for engine in some]
            if isinstance(row.source, Info):
                name = row.source.name
                infos_by_group = [
                    (own, [e.info[name] for e in some if name in e.info])
                    for own, some in contributors
                ]
                yield self._info(infos_by_group)
            elif placed.storage == "histogram":
                yield self._from_slots(
                    placed, contributors, row_histograms(placed, engines, histogram_state)
                )
            elif placed.storage in NUMERIC:
                yield self._from_slots(placed, contributors, row_numbers(placed, engines))
            else:
                yield self._from_snapshots(
                    contributors, snapshot_engines(family, placed, engines, histogram_state), row
                )

    def _from_slots(
        self,
        placed: SlotAssignment,
        contributors: Iterable[Contributors],
        values: Sequence[Value | None],
    ) -> Iterator[_Contribution]:
        """Yield values in slots, series by series."""
        row, width = placed.row, len(placed.label_values)
        has_sample_name = [self._own(row.own_labels, key) for key in placed.label_values]
        start = 0
        for outer, engines in contributors:
            end = start + width * len(engines)
            for place, own in enumerate(has_sample_name, start):
                some = [value for value in values[place:end:width] if value is not None]
                if row.unit_divisor != 1:
                    some = [
                        value / row.unit_divisor for value in some if not isinstance(value, tuple)
                    ]
                if some:
                    yield _Contribution(outer, own, some)
            start = end

    def _from_snapshots(
        self,
        contributors: Iterable[Contributors],
        snapshots: Iterator[EngineSnapshot[State]],
        row: Row | None,
    ) -> Iterator[_Contribution]:
        """Yield values that are not in slots: families with open labels, and self-described ones."""
        total = row is not None and row.omits_empty_labels
        for outer, engines in contributors:
            for _, _, names, children in islice(snapshots, len(engines)):
                some = children
                gone = [
                    at for at, name in enumerate(names) if name in self.series_filter.dropped_labels
                ]
                if total and gone:
                    # The series without these labels is the sum of those that have them.
                    whole = [c for c in children if not any(c[0][at] for at in gone)]
                    some = whole or children
                for key, value in some:
                    yield _Contribution(outer, self._own(names, key, unless_empty=total), (value,))

    def _info(
        self, infos_by_group: Iterable[tuple[Labels, Sequence[Mapping[str, str]]]]
    ) -> Iterator[_Contribution | None]:
        for outer, infos in infos_by_group:
            if infos:
                labels = yield from aggregate_info(infos)
                own = (
                    (n, v)
                    for n, v in sorted(labels.items())
                    if n not in self.series_filter.dropped_labels
                )
                yield _Contribution(outer, tuple(own), (1,), whole=True)

    def _lora_adapters(
        self, placed: SlotAssignment, groups: Sequence[Group]
    ) -> Iterator[_Contribution]:
        """Aggregate the LoRA adapters of all engines, and their capacity, to one series."""
        slot = placed.slots[0]
        layout = groups[0].members[0].layout
        live = [engine for engine in self._groups.all_engines(live=True) if engine.layout is layout]
        hidden = missing_engine_labels(placed.row.labels)
        capacity: dict[Labels, int] = {}
        for group in self._groups.group(GroupQuery(live, hidden, counts=False)).groups:
            contributors = [
                engine.info.get("lora", {}).get("max_lora", "") for engine in group.members
            ]
            capacity[group.labels] = sum(
                int(one) for one in contributors if one.isascii() and one.isdigit()
            )
        adapters_by_group = [
            (group.labels, [item for e in group.members for item in e.keyed[slot].items()])
            for group in groups
        ]
        return self._aggregated_adapters(placed, adapters_by_group, capacity)

    def _aggregated_adapters(
        self,
        placed: SlotAssignment,
        adapters_by_group: Iterable[tuple[Labels, Sequence[tuple[Key, Number]]]],
        capacity: Mapping[Labels, int],
    ) -> Iterator[_Contribution]:
        for outer, combinations in adapters_by_group:
            if combinations:
                key = (
                    str(capacity.get(outer, 0)),
                    aggregate_adapters(running for (_, running, _), _ in combinations),
                    aggregate_adapters(waiting for (_, _, waiting), _ in combinations),
                )
                own = self._own(placed.row.own_labels, key)
                newest = max(stamp for _, stamp in combinations)
                yield _Contribution(outer, own, (newest,), whole=True)

    def _open_engines(self, family: Family) -> Sequence[Engine]:
        """Return the engines that have a self-described family."""
        all_engines = self._groups.all_engines(live=family.kind == "gauge")
        return [engine for engine in all_engines if family.name in engine.open_families]

    def _self_described(self, family: Family, found: Grouping) -> Iterable[_Contribution | None]:
        """Copy a self-described family, whose engines keep all their labels."""
        is_gauge = family.kind == "gauge"
        contributors = [(group.labels, group.members) for group in found.groups]
        engines = [engine for _, some in contributors for engine in some]
        snapshots = snapshot_engines(family, None, engines, histogram_state)
        if is_gauge and family.name.endswith(INFO):
            return self._self_described_info(family, contributors, snapshots)
        return self._from_snapshots(contributors, snapshots, None)

    def _self_described_info(
        self,
        family: Family,
        contributors: Iterable[Contributors],
        snapshots: Iterator[EngineSnapshot[State]],
    ) -> Iterator[_Contribution | None]:
        """Aggregate an info metric label by label if each engine has one series of it."""
        for one in contributors:
            outer, engines = one
            some = [*islice(snapshots, len(engines))]
            children = [copy[3] for copy in some]
            if max(map(len, children)) == 1:
                keys = [key for each in children for key, _ in each]
                infos_by_group = [dict(zip(family.labels, key, strict=True)) for key in keys]
                yield from self._info([(outer, infos_by_group)])
            else:
                yield from self._from_snapshots([one], iter(some), None)

    def _own(self, names: Key, key: Key, *, unless_empty: bool = False) -> Labels:
        dropped = self.series_filter.dropped_labels
        pairs = zip(names, key, strict=True)
        return tuple((n, v) for n, v in pairs if n not in dropped and (v or not unless_empty))


def _series(
    found: Iterable[_Contribution | None], rule: Combine, *, by_length: bool
) -> Iterator[Series | None]:
    """Merge contributions that have equal labels."""
    # A client that reads only the first sample of a family gets the sum of the others.
    by_size: dict[int, dict[Labels, list[Value]]] = {}
    spent = 0
    for one in found:
        if one is None or spent >= PER_SLICE:
            yield None
            spent = 0
        if one is not None:
            labels = _joined(one.outer, one.own)
            by_labels = by_size.setdefault(len(labels) if by_length else 0, {})
            if one.whole or labels not in by_labels:
                by_labels[labels] = list(one.values)
            else:
                by_labels[labels] += one.values
            spent += 1
    for size in sorted(by_size):
        for labels, values in by_size[size].items():
            value = yield from aggregate_values(values, rule, aggregate_states)
            yield labels, value
            spent += 1 + len(values)
            if spent >= PER_SLICE:
                yield None
                spent = 0


def _joined(outer: Labels, own: Labels) -> Labels:
    return tuple(sorted((*outer, *own))) if own else outer
