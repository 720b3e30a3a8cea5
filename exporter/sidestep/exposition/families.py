"""Metric families of a page: which there are, their values by engine, and the labels of their series."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

from sidestep.catalog.layout import Layout, SlotAssignment
from sidestep.catalog.model import ENGINE_LABELS, OBSERVED, Combine, Kind
from sidestep.exposition.engine_values import EngineValues, RegistryValues
from sidestep.exposition.row_readers import Children, Reader, described_reader, row_reader
from sidestep.metrics.engine import Key

DESCRIBED = ""
"""Key of the reader of a self-described family."""


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One metric family of the page.

    Attributes:
        labels: Own label names, as the first engine that has the family uses them.
        assignments: Slot assignment by dialect; empty for a self-described family.
        readers: Readers of an engine's values, by dialect; ``DESCRIBED`` for a self-described family.
    """

    name: str
    kind: Kind
    help: str
    labels: Key
    combine: Combine = "sum"
    assignments: Mapping[str, SlotAssignment] = dataclasses.field(default_factory=dict)
    readers: Mapping[str, Reader] = dataclasses.field(default_factory=dict)

    @property
    def form(self) -> tuple[object, ...]:
        """What distinguishes families of one name."""
        return self.name, self.kind, self.help, self.labels, *self.assignments

    @property
    def is_shared(self) -> bool:
        """Whether engines can have equal labels, so that their series need aggregation."""
        rows = [placed.row for placed in self.assignments.values()]
        return any(not set(row.shared) <= set(row.labels) for row in rows)

    def having(
        self, engines: Sequence[EngineValues], placed: SlotAssignment | None
    ) -> Sequence[EngineValues]:
        """Return those of ``engines`` that can have samples of the family.

        Args:
            engines: Engines of one dialect; of all for a self-described family.
            placed: The dialect's assignment; None for a self-described family.
        """
        if placed is None or placed.storage == "sampled":
            name = self.name if placed is None else placed.stored_name
            engines = [engine for engine in engines if name in engine.open_families]
        elif placed.storage == "keyed":
            (slot,) = placed.slots
            engines = [engine for engine in engines if engine.keyed[slot]]
        if self.kind == "gauge":
            # Those of an engine that is silent say nothing of now.
            engines = [engine for engine in engines if engine.live]
        if placed is not None and placed.row.feature:
            name, feature = placed.row.name, placed.row.feature
            engines = [e for e in engines if feature in e.features or name not in e.layout.gated]
        return engines

    def engines(self, values: RegistryValues) -> Sequence[EngineValues]:
        """Return the engines that have samples, in the order of the page; few of them have none."""
        if not self.assignments:
            return self.having(values.engines, None)
        found = [
            _with_values(self.having(values.of_dialect.get(dialect, ()), placed), placed)
            for dialect, placed in self.assignments.items()
        ]
        return found[0] if len(found) == 1 else [*chain.from_iterable(found)]

    def label_form(self, engine: EngineValues, names: Key) -> object:
        """Return what is equal for families that put the same labels of an engine into their series.

        Args:
            engine: The engine.
            names: Own label names.
        """
        placed = self.assignments.get(engine.layout.dialect)
        if placed is None:
            return names
        return placed.label_form if names is placed.own_labels else (placed.label_form, names)

    def children(self, engine: EngineValues) -> tuple[Key, Children]:
        """Return own label names and the values of one of ``engines``."""
        return self.readers[engine.layout.dialect if self.assignments else DESCRIBED](engine)


def _with_values(engines: Sequence[EngineValues], placed: SlotAssignment) -> Sequence[EngineValues]:
    """Leave out engines without a value, if that is quickly seen."""
    if placed.storage == "computed":
        name = placed.row.name
        return [engine for engine in engines if engine.computed[name] is not None]
    if len(placed.slots) == 1 and placed.storage == "scalars":
        (slot,) = placed.slots
        return [engine for engine in engines if engine.values[slot] is not None]
    if len(placed.slots) == 1 and placed.storage == "histogram":
        (slot,) = placed.slots
        return [engine for engine in engines if engine.histograms[slot] is not None]
    return engines


def families(values: RegistryValues, names: Collection[str] = ()) -> Iterator[Family]:
    """Yield the families in page order: all, or those that own one of the sample ``names``.

    Families of dialects that no engine uses are left out: they cannot have samples.
    """
    for family in chain(_catalogued(values), _self_described(values)):
        if not names or has_sample_name(family.name, family.kind, names):
            yield family


def _catalogued(values: RegistryValues) -> Iterator[Family]:
    layouts = (values.layouts[name] for name in values.layouts if name in values.of_dialect)
    return (each for each in _of_layouts(tuple(layouts)) if values.is_exposed(each.name))


@functools.lru_cache(maxsize=16)
def _of_layouts(layouts: tuple[Layout, ...]) -> Sequence[Family]:
    """Return the families of the catalogue, in the order of the page."""
    assignments: dict[str, dict[str, SlotAssignment]] = {}
    for layout in layouts:
        for placed in layout.assignments:
            assignments.setdefault(placed.row.name, {})[layout.dialect] = placed
    found = []
    for name, own in assignments.items():
        row = next(iter(own.values())).row
        readers = {dialect: row_reader(placed) for dialect, placed in own.items()}
        found.append(
            Family(name, row.kind, row.exposed_help, row.own_labels, row.combine, own, readers)
        )
    return found


def _self_described(values: RegistryValues) -> Iterator[Family]:
    sampled = {name for layout in values.layouts.values() for name in layout.sampled_rows}
    for engine in values.engines:
        for found in engine.open_families.values():
            if found.name not in sampled:
                sampled.add(found.name)
                if values.is_exposed(found.name):
                    readers = {DESCRIBED: described_reader(found.name, found.kind, found.labels)}
                    yield Family(found.name, found.kind, found.help, found.labels, readers=readers)


def has_sample_name(family: str, kind: Kind, names: Collection[str]) -> bool:
    """Return whether one of the sample ``names`` belongs to ``family``, as in ``name[]``."""
    if family in names:
        return True
    if kind in OBSERVED:
        return any(f"{family}_{suffix}" in names for suffix in ("bucket", "count", "sum"))
    return kind == "counter" and family.removesuffix("_total") in names


def series_labels(engine: EngineValues, family: Family, names: Key, key: Key) -> dict[str, str]:
    """Return all labels of one series; ``names`` and ``key`` are its own label names and values."""
    placed = family.assignments.get(engine.layout.dialect)
    labels = dict(zip(names, key, strict=True))
    if placed is None:
        return {**labels, **engine.labels}
    if placed.row.omits_empty_labels:
        labels = {name: value for name, value in labels.items() if value}
    shown = {n: v for n, v in engine.labels.items() if _has_label(placed, n)}
    return {**labels, **shown}


def _has_label(placed: SlotAssignment, label: str) -> bool:
    return label in placed.row.labels or label not in ENGINE_LABELS
