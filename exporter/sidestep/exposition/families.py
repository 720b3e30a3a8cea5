"""Metric families of a page: which there are, the engines that have them, their values and labels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Generic, TypeVar

from sidestep.catalog.layout import Layout, SlotAssignment
from sidestep.catalog.row import ENGINE_LABELS, OBSERVED, Combine, Constant, Info, Kind
from sidestep.exposition.engine_values import EngineValues, RegistryValues, Value
from sidestep.metrics.engine_state import Key

Children = Sequence[tuple[Key, Value]]
"""Values by own label values."""
Reader = Callable[[EngineValues], tuple[Key, Children]]
"""Returns own label names, and values in the exposed unit."""


def row_reader(placed: SlotAssignment) -> Reader:
    """Return the reader of a row of the catalogue."""
    row, names, source = placed.row, placed.own_labels, placed.row.source
    if placed.storage == "sampled":
        # The senders of a catalogued family may have labels besides the row's.
        name = placed.stored_name
        return lambda engine: _open_children(engine, name)
    if placed.storage == "computed":
        return lambda engine: (
            names,
            () if (value := engine.computed[row.name]) is None else (((), value),),
        )
    if isinstance(source, Info):
        info = source.name
        return lambda engine: _info(engine.info.get(info))
    if isinstance(source, Constant):
        constant = (((), source.value),)
        return lambda _: (names, constant)
    return _slot_reader(placed, names, row.unit_divisor)


def _slot_reader(placed: SlotAssignment, names: Key, divisor: int) -> Reader:
    """Return the reader of a row whose values are in slots of an engine."""
    if placed.storage == "keyed":
        (keyed,) = placed.slots
        if divisor == 1:
            return lambda engine: (names, [*engine.keyed[keyed].items()])
        return lambda engine: (names, [(k, n / divisor) for k, n in engine.keyed[keyed].items()])
    slots = [*zip(placed.label_values, placed.slots, strict=True)]
    if placed.storage == "histogram":
        return lambda engine: (
            names,
            [(key, one) for key, slot in slots if (one := engine.histograms[slot]) is not None],
        )
    return lambda engine: (
        names,
        [
            (key, value if divisor == 1 else value / divisor)
            for key, slot in slots
            if (value := engine.values[slot]) is not None
        ],
    )


def _info(labels: Mapping[str, str] | None) -> tuple[Key, Children]:
    return ((), ()) if labels is None else (tuple(labels), [(tuple(labels.values()), 1)])


def _open_children(engine: EngineValues, name: str) -> tuple[Key, Children]:
    family = engine.open_families[name]
    return family.labels, [*family.children.items()]


DESCRIBED = ""
"""Key of the reader of a self-described family."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric family of the page; the same object on each page while engines have it.

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
    def is_shared(self) -> bool:
        """True if engines can have equal labels, so that their series need aggregation."""
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
            # The gauges of a silent engine are out of date.
            engines = [engine for engine in engines if engine.live]
        if placed is not None and placed.row.feature:
            name, feature = placed.row.name, placed.row.feature
            engines = [e for e in engines if feature in e.features or name not in e.layout.gated]
        return engines

    def engines(self, values: RegistryValues) -> Sequence[EngineValues]:
        """Return the engines that have samples, in page order; a few without samples can be among them."""
        if not self.assignments:
            return self.having(values.engines, None)
        found: list[EngineValues] = []
        for dialect, placed in self.assignments.items():
            engines = self.having(values.of_dialect.get(dialect, ()), placed)
            # Many engines lack a value of some families; in these it is quickly seen.
            if placed.storage == "computed":
                name = placed.row.name
                engines = [engine for engine in engines if engine.computed[name] is not None]
            elif placed.storage == "scalars" and len(placed.slots) == 1:
                (slot,) = placed.slots
                engines = [engine for engine in engines if engine.values[slot] is not None]
            elif placed.storage == "histogram" and len(placed.slots) == 1:
                (slot,) = placed.slots
                engines = [engine for engine in engines if engine.histograms[slot] is not None]
            found += engines
        return found

    def children(self, engine: EngineValues) -> tuple[Key, Children]:
        """Return own label names and the values of one of ``engines``."""
        return self.readers[engine.layout.dialect if self.assignments else DESCRIBED](engine)


def families(values: RegistryValues, names: Collection[str] = ()) -> Iterator[Family]:
    """Yield the families in page order: all, or those that own one of the sample ``names``.

    Families of dialects that no engine uses are left out: they cannot have samples.
    """
    layouts = tuple(values.layouts[name] for name in values.layouts if name in values.of_dialect)
    for family in chain(_of_layouts(layouts), _self_described(values)):
        if values.is_exposed(family.name) and (
            not names or has_sample_name(family.name, family.kind, names)
        ):
            yield family


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
                yield _described(found.name, found.kind, found.help, found.labels)


@functools.lru_cache(maxsize=1024)
def _described(name: str, kind: Kind, text: str, labels: Key) -> Family:
    def read(engine: EngineValues) -> tuple[Key, Children]:
        # Two engines may describe one name differently; a page shows the first form.
        family = engine.open_families[name]
        is_same = (family.kind, family.labels) == (kind, labels)
        return _open_children(engine, name) if is_same else ((), ())

    return Family(name, kind, text, labels, readers={DESCRIBED: read})


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


MAX_LABEL_SETS = 200_000
"""Label sets that a cache holds: four times what self-described families can have at once."""

Encoded = TypeVar("Encoded")


class LabelCache(Generic[Encoded]):
    """Encoded labels of series, cached until the labels of their engine may have changed."""

    def __init__(self, encode: Callable[[dict[str, str]], Encoded]) -> None:
        self._encode = encode
        self._by_version: dict[int, dict[object, dict[Key, Encoded]]] = {}
        self._count = 0

    def get(
        self, engine: EngineValues, family: Family, names: Key, keys: Iterable[Key]
    ) -> list[Encoded]:
        """Return the labels of an engine's series; ``names`` and ``keys`` are their own labels."""
        # Families of equal form put the same labels of an engine into their series.
        form: object = names
        placed = family.assignments.get(engine.layout.dialect)
        if placed is not None:
            form = placed.label_form
            if names is not placed.own_labels:
                form = form, names
        known = self._by_version.setdefault(engine.label_version, {}).setdefault(form, {})
        found = []
        for key in keys:
            one = known.get(key)
            if one is None:
                self._count += 1
                one = known[key] = self._encode(series_labels(engine, family, names, key))
            found.append(one)
        return found

    def retain(self, engines: Iterable[EngineValues]) -> None:
        """Drop the labels of other engines; drop all where there are too many."""
        for label_version in self._by_version.keys() - {engine.label_version for engine in engines}:
            del self._by_version[label_version]
        if self._count > MAX_LABEL_SETS:
            self._by_version, self._count = {}, 0
