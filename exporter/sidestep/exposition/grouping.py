"""Groups of engines whose labels become equal once dropped labels are removed.

Groups of counters include retired engines, whose totals stay in the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from sidestep.catalog.layout import Layout, SlotAssignment
from sidestep.catalog.model import ENGINE_LABELS, Row
from sidestep.exposition.families import engines_with_samples
from sidestep.exposition.selection import Selections
from sidestep.exposition.series_filter import RANK_LABELS, SeriesFilter
from sidestep.metrics.engine import ORIGIN, Engine, Key
from sidestep.metrics.registry import Registry

Labels = tuple[tuple[str, str], ...]
"""Label pairs, sorted by name."""

MAX_LABEL_SETS = 20_000
"""Label sets of engines that the cache holds."""

PER_SLICE = 100
"""New engines to read before yielding to the event loop: some 5 us each."""
MAX_GROUPINGS = 16
"""Groupings that the cache holds per query; few differ: all engines, live ones, those with LoRA."""

Replica = tuple[Labels, tuple[int, ...]]
"""Labels that the ranks of one replica share, and the rank."""


class Group:
    """Engines with equal labels.

    Attributes:
        members: Retired engines, if the family is cumulative, then exposed ones.
        representatives: One rank of each replica.
    """

    def __init__(
        self, labels: Labels, members: list[Engine], replica: Callable[[Engine], Replica]
    ) -> None:
        self.labels = labels
        self.members = members
        self._replica = replica

    @functools.cached_property
    def representatives(self) -> list[Engine]:
        """Return one rank of each replica: all ranks report the same requests."""
        if len(self.members) == 1:
            return self.members
        found: dict[Labels, list[tuple[tuple[int, ...], Engine]]] = {}
        for engine in self.members:
            replica, rank = self._replica(engine)
            found.setdefault(replica, []).append((rank, engine))
        representatives: list[Engine] = []
        for ranks in found.values():
            first = min([rank for rank, _ in ranks])
            representatives += [engine for rank, engine in ranks if rank == first]
        return representatives


Contributors = tuple[Labels, Sequence[Engine]]
"""Common labels of a group, and the engines whose values count."""


class Grouping:
    """All engines that have a family, in groups.

    Attributes:
        label_versions: Label versions of the exposed engines.
        retired: Label versions of the retired engines.
        groups: Engines by common labels.
    """

    def __init__(
        self, label_versions: Sequence[int], retired: Sequence[int], groups: list[Group]
    ) -> None:
        self.label_versions = label_versions
        self.retired = retired
        self.groups = groups

    def contributors(self, row: Row) -> list[Contributors]:
        """Return the engines whose values of ``row`` count, by group."""
        contributors = self._representatives if row.mirrored else self._members
        if contributors and row.name in contributors[0][1][0].layout.gated:
            return [
                (labels, [e for e in some if row.feature in e.features])
                for labels, some in contributors
            ]
        return contributors

    @functools.cached_property
    def _members(self) -> list[Contributors]:
        return [(group.labels, group.members) for group in self.groups]

    @functools.cached_property
    def _representatives(self) -> list[Contributors]:
        return [(group.labels, group.representatives) for group in self.groups]


class GroupQuery(NamedTuple):
    """Engines to group.

    Attributes:
        shown: Engines that have the family.
        hidden: Engine labels that the family does not have.
        counts: Whether values are cumulative, so that retired engines count.
    """

    shown: Sequence[Engine]
    hidden: Key
    counts: bool


class GroupCache:
    """Groupings of engines, cached from page to page until labels change."""

    def __init__(self, registry: Registry, series_filter: SeriesFilter) -> None:
        self._registry = registry
        self._dropped = series_filter.dropped_labels
        self._selections = Selections(registry)
        self._common_label_sets: dict[tuple[int, Key], Labels] = {}
        self._replicas: dict[int, Replica] = {}
        self._groupings: dict[tuple[Key, bool], list[Grouping]] = {}
        """Groupings by hidden labels and whether values are cumulative; the last used one first."""
        self._version = -1
        self._retired: dict[Layout, list[Engine]] = {}
        self._by_query: dict[tuple[int, Key, bool], tuple[GroupQuery, Grouping]] = {}
        """Groupings at this registry version, by address of a list that the entry holds."""
        self._label_versions: Sequence[int] = ()

    def refresh(self) -> None:
        """Start a page: drop what belongs to engines that are gone."""
        self._selections.refresh()
        self._version = -1
        self._by_query = {}
        present = chain(self._registry.engines.values(), self._registry.retired.values())
        label_versions = [engine.label_version for engine in present]
        if label_versions != self._label_versions:
            self._label_versions = label_versions
            known = frozenset(label_versions)
            self._groupings = {
                key: [
                    one
                    for one in groupings
                    if known.issuperset((*one.label_versions, *one.retired))
                ]
                for key, groupings in self._groupings.items()
            }
        for texts in (self._common_label_sets, self._replicas):
            if len(texts) > MAX_LABEL_SETS:
                texts.clear()

    def engines_of_row(self, dialect: str, placed: SlotAssignment) -> list[Engine]:
        """Return the engines that have samples of a dialect's row."""
        return engines_with_samples(self._selections.of_row(dialect, placed).engines, placed)

    def all_engines(self, *, live: bool) -> Sequence[Engine]:
        """Return the engines of all dialects."""
        return self._selections.of_all(live=live).engines

    def prepare(self, query: GroupQuery, *, mirrored: bool) -> Iterator[None]:
        """Read the labels of engines that ``group`` would read for the first time, in slices."""
        spent = 0
        for engine in (*self._retired_beside(query), *query.shown):
            if (engine.label_version, query.hidden) not in self._common_label_sets:
                self._common_labels(engine, query.hidden)
                spent += 1
            if mirrored and engine.label_version not in self._replicas:
                self._replica(engine)
                spent += 1
            if spent >= PER_SLICE:
                yield
                spent = 0

    def cached(self, query: GroupQuery) -> Grouping | None:
        """Return the grouping for ``question`` if the cache has it."""
        shown, hidden, counts = query
        retired = self._retired_beside(query)
        entry = self._by_query.get((id(shown), hidden, counts))
        if entry is not None:
            return entry[1]
        label_versions = [engine.label_version for engine in shown]
        retired_versions = [engine.label_version for engine in retired]
        groupings = self._groupings.get((hidden, counts), [])
        for index, known in enumerate(groupings):
            # Label versions are unique: no two engines share one, and none is used again.
            if known.label_versions == label_versions and known.retired == retired_versions:
                groupings.insert(0, groupings.pop(index))
                self._by_query[id(shown), hidden, counts] = query, known
                return known
        return None

    def group(self, query: GroupQuery) -> Grouping:
        """Return the grouping for ``question``."""
        known = self.cached(query)
        if known is None:
            shown, hidden, counts = query
            known = self._grouped(shown, self._retired_beside(query), hidden)
            groupings = self._groupings.setdefault((hidden, counts), [])
            groupings.insert(0, known)
            del groupings[MAX_GROUPINGS:]
            self._by_query[id(shown), hidden, counts] = query, known
        return known

    def _grouped(self, shown: Sequence[Engine], retired: Sequence[Engine], hidden: Key) -> Grouping:
        by_labels: dict[Labels, list[Engine]] = {}
        for engine in shown:
            by_labels.setdefault(self._common_labels(engine, hidden), []).append(engine)
        retired_members: dict[Labels, list[Engine]] = {}
        present = set(shown)
        for engine in retired:
            labels = self._common_labels(engine, hidden)
            if labels in by_labels and engine not in present:
                retired_members.setdefault(labels, []).append(engine)
        groups = [
            Group(labels, retired_members.get(labels, []) + members, self._replica)
            for labels, members in by_labels.items()
        ]
        return Grouping(
            [e.label_version for e in shown], [e.label_version for e in retired], groups
        )

    def _retired_beside(self, query: GroupQuery) -> Sequence[Engine]:
        """Return engines that are no longer exposed but whose totals stay in the sums."""
        registry = self._registry
        if self._version != registry.version:
            self._version = registry.version
            self._by_query = {}
            self._retired = {}
            absent = [engine for engine in registry.engines.values() if engine.absent]
            for engine in (*registry.retired.values(), *absent):
                self._retired.setdefault(engine.layout, []).append(engine)
        if not query.counts or not self._dropped or not self._retired:
            return ()
        layouts = dict.fromkeys([engine.layout for engine in query.shown])
        return [engine for layout in layouts for engine in self._retired.get(layout, ())]

    def _common_labels(self, engine: Engine, hidden: Key) -> Labels:
        """Return the labels of ``engine`` that remain on this page."""
        known = self._common_label_sets.get((engine.label_version, hidden))
        if known is None:
            pairs = engine.labels.items()
            shown = ((n, v) for n, v in pairs if n not in self._dropped and n not in hidden)
            known = self._common_label_sets[engine.label_version, hidden] = tuple(sorted(shown))
        return known

    def _replica(self, engine: Engine) -> Replica:
        """Return the replica of ``engine``, and its rank."""
        known = self._replicas.get(engine.label_version)
        if known is None:
            pairs = engine.labels.items()
            replica = tuple(
                sorted((n, v) for n, v in pairs if n not in RANK_LABELS and n != ORIGIN)
            )
            rank = tuple(_rank(engine.labels.get(name, "")) for name in RANK_LABELS)
            known = self._replicas[engine.label_version] = replica, rank
        return known


@functools.cache
def missing_engine_labels(shown: Key) -> Key:
    """Return the engine labels that a family with ``shown`` labels does not have."""
    return tuple(name for name in ENGINE_LABELS if name not in shown)


def _rank(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
