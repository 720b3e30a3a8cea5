"""The layout of a dialect: the slot of every series, and the fields that feed it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple

import msgspec

from sidestep.catalog.dialect import DialectTables
from sidestep.catalog.row import ENGINE_LABELS, OBSERVED, Alias, Computed, Handler, Kind, Row
from sidestep.protocol.limits import OTHER

OWN_PREFIXES = ("sidestep_", "process_", "python_")
"""Prefixes of the exporter's own names."""

Storage = Literal["scalars", "histogram", "keyed", "sampled", "computed", "constant", "info"]


@dataclasses.dataclass(frozen=True)
class SlotAssignment:
    """A row and the slots in which an engine stores its series.

    Attributes:
        slots: Indices by ``storage``. ``scalars``: indices into ``Engine.values``, one for each value of
            ``closed`` and one for all others, or a single one. ``histogram``: indices into the
            histograms, one for each value of ``closed`` or a single one. ``keyed``: one index into the
            list of that name.
    """

    row: Row
    storage: Storage
    slots: tuple[int, ...] = ()

    @functools.cached_property
    def label_values(self) -> tuple[tuple[str, ...], ...]:
        """The own label values of the slots, in the order of the slots."""
        if not self.row.closed:
            return ((),)
        closed = self.row.closed if self.storage == "histogram" else (*self.row.closed, OTHER)
        return tuple((value,) for value in closed)

    @functools.cached_property
    def own_labels(self) -> tuple[str, ...]:
        """The row's ``own_labels``."""
        return self.row.own_labels

    @functools.cached_property
    def stored_name(self) -> str:
        """The name under which an engine stores a family that Samples items feed."""
        source = self.row.source
        return source.name if isinstance(source, Alias) else self.row.name

    @functools.cached_property
    def label_form(self) -> str:
        """Text that is equal for rows which put the same labels of an engine into their series."""
        hidden = (name for name in ENGINE_LABELS if name not in self.row.labels)
        return f"{','.join(hidden)};{self.row.omits_empty_labels};{','.join(self.own_labels)}"

    @property
    def sources(self) -> Iterable[Sequence[str]]:
        """The paths without ``[]``, or the handler, that feed each of the slots."""
        source = self.row.source
        if isinstance(source, Mapping):
            return [_paths((each,)) for each in source.values()]
        several = source if isinstance(source, tuple) else (source,)
        return itertools.repeat(_paths(several), len(self.slots))


def _paths(sources: Iterable[object]) -> list[str]:
    names = (each.name if isinstance(each, Handler) else each for each in sources)
    return [name.replace("[]", "") for name in names if isinstance(name, str)]


class FeedTarget(NamedTuple):
    """A slot that also receives what another family's children receive; see ``row.FeedsFrom``."""

    row: Row
    slot: int
    values: tuple[str, ...]


@dataclasses.dataclass(slots=True, eq=False)
class StructFields:
    """The fields to read from one struct of an item, and from the structs nested in it.

    Attributes:
        observed: Numbers that a histogram observes, and its slot.
        observed_lists: Lists of numbers that a histogram observes.
        observed_runs: Runs of equal numbers that a histogram observes.
        observed_columns: Fields of a list of structs: name, whether the field itself is a list, and
            the histogram's slot.
        code_fields: Fields of a list of structs whose value is an index into the row's closed values.
        labelled_counts: Counts by label value (a dict) or by position (a list).
    """

    name: str
    path: str = ""
    gauges: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    counters: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    observed: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    observed_lists: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    observed_runs: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    observed_columns: list[tuple[str, bool, int]] = dataclasses.field(default_factory=list)
    code_fields: list[tuple[str, SlotAssignment]] = dataclasses.field(default_factory=list)
    labelled_counts: list[tuple[str, SlotAssignment]] = dataclasses.field(default_factory=list)
    rows: list[SlotAssignment] = dataclasses.field(default_factory=list)
    nested: dict[str, StructFields] = dataclasses.field(default_factory=dict)

    @property
    def optional_rows(self) -> list[SlotAssignment]:
        """Rows that are exposed from the first such struct on: all rows if all belong to an option."""
        return self.rows if all(assignment.row.feature for assignment in self.rows) else []

    @property
    def optional_paths(self) -> Iterator[str]:
        """The paths, of this struct and those below, that have ``optional_rows``."""
        if self.optional_rows:
            yield self.path
        for part in self.nested.values():
            yield from part.optional_paths

    @property
    def gated(self) -> Iterator[str]:
        """Names of rows, here and below, that need an option which other rows of the struct do not need."""
        if not self.optional_rows:
            yield from (assignment.row.name for assignment in self.rows if assignment.row.feature)
        for part in self.nested.values():
            yield from part.gated

    def part(self, name: str) -> StructFields:
        """Return the fields of the struct nested in field ``name``."""
        return self.nested.setdefault(name, StructFields(name, f"{self.path}.{name}"))


def exposed_names(name: str, kind: Kind) -> frozenset[str]:
    """Return the names that family ``name`` takes on a page: the OpenMetrics family and its samples."""
    if kind in OBSERVED:
        ends = ("bucket", "count", "sum", "created")
        return frozenset({name, *(f"{name}_{end}" for end in ends)})
    base = name.removesuffix("_total") if kind == "counter" else name
    return frozenset({name, base, f"{base}_created"} if kind == "counter" else {name})


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The layout of one dialect.

    Attributes:
        assignments: Every row with its slots, in the order of the page.
        roots: The fields to read, by wire struct.
        handled: Rows that handlers feed, by the handler's name.
        sampled_rows: Rows that Samples items feed, by family name.
        feeds: Further slots that these items feed, by family name.
        gated: Rows of an option whose fields are sent even without it, which are hidden while it is off.
        histograms: The row of each histogram slot.
        keyed: The row of each keyed slot.
    """

    tables: DialectTables
    assignments: tuple[SlotAssignment, ...]
    roots: Mapping[type[msgspec.Struct], StructFields]
    handled: Mapping[str, SlotAssignment]
    sampled_rows: Mapping[str, Row]
    feeds: Mapping[str, list[FeedTarget]]
    gated: frozenset[str]
    scalars: int
    histograms: tuple[Row, ...]
    keyed: tuple[Row, ...]

    @functools.cached_property
    def dialect(self) -> str:
        """The dialect's name."""
        return self.tables.name

    @functools.cached_property
    def required_labels(self) -> frozenset[str]:
        """Label names that every engine must have, since all rows share them."""
        shared = [set(assignment.row.shared) for assignment in self.assignments]
        return frozenset(set.intersection(*shared) if shared else ())

    @functools.cached_property
    def own_labels(self) -> frozenset[str]:
        """Label names that no engine may have, since they distinguish an engine's children."""
        own = {label for assignment in self.assignments for label in assignment.row.own_labels}
        return frozenset(own | {"le", "quantile"})

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Every name that the catalogue takes on a page, of families and of samples."""
        return frozenset().union(*(exposed_names(p.row.name, p.row.kind) for p in self.assignments))

    def names_for(self, features: AbstractSet[str]) -> frozenset[str]:
        """Return ``names`` without those of gated rows whose option is not in ``features``."""
        hidden = [
            assignment.row
            for assignment in self.assignments
            if assignment.row.name in self.gated and assignment.row.feature not in features
        ]
        return self.names.difference(*(exposed_names(row.name, row.kind) for row in hidden))

    @functools.cached_property
    def computed(self) -> tuple[tuple[str, str], ...]:
        """The families that functions compute, and the names of these functions."""
        return tuple(
            (assignment.row.name, assignment.row.source.name)
            for assignment in self.assignments
            if isinstance(assignment.row.source, Computed)
        )

    @functools.cached_property
    def histogram_names(self) -> tuple[str, ...]:
        """The family of each histogram slot and, where the family has a label, the label's value."""
        found = [""] * len(self.histograms)
        for assignment in self.primary:
            if assignment.storage == "histogram":
                for slot, key in zip(assignment.slots, assignment.label_values, strict=True):
                    found[slot] = "|".join((assignment.row.name, *key))
        return tuple(found)

    @functools.cached_property
    def primary(self) -> tuple[SlotAssignment, ...]:
        """The rows that have slots of their own: all but aliases."""
        return tuple(
            assignment
            for assignment in self.assignments
            if not isinstance(assignment.row.source, Alias)
        )

    @functools.cached_property
    def scalar_names(self) -> tuple[tuple[str, str], ...]:
        """The family of each scalar slot and, where the family has a label, the label's value."""
        found = [("", "")] * self.scalars
        for assignment in self.primary:
            if assignment.storage == "scalars":
                for slot, key in zip(assignment.slots, assignment.label_values, strict=True):
                    found[slot] = assignment.row.name, "".join(key)
        return tuple(found)

    @functools.cached_property
    def scalar_slots(self) -> dict[tuple[str, str], int]:
        """The scalar slots by ``scalar_names``."""
        return {name: slot for slot, name in enumerate(self.scalar_names)}

    @functools.cached_property
    def scalar_gauges(self) -> frozenset[int]:
        """The scalar slots of gauges."""
        return frozenset(
            slot
            for assignment in self.primary
            if assignment.storage == "scalars" and assignment.row.kind == "gauge"
            for slot in assignment.slots
        )

    @functools.cached_property
    def optional_paths(self) -> frozenset[str]:
        """The paths of structs that have ``optional_rows``."""
        return frozenset(path for root in self.roots.values() for path in root.optional_paths)

    @functools.cached_property
    def lasting_gauges(self) -> frozenset[int]:
        """The scalar slots of gauges that hold until their next report."""
        return frozenset(
            slot
            for assignment in self.primary
            if assignment.row.lasting
            for slot in assignment.slots
        )

    def slots_without(self, fields: Collection[str]) -> tuple[tuple[Storage, int], ...]:
        """Return storage and slot of the series that need one of ``fields``, which are paths."""
        derived = {name for field in fields for name in self.tables.needed_by.get(field, ())}
        gone = {*fields, *derived}

        def is_gone(name: str) -> bool:
            return name in gone or any(name.startswith(f"{field}.") for field in gone)

        return tuple(
            (assignment.storage, slot)
            for assignment in (self.primary if gone else ())
            for slot, names in zip(assignment.slots, assignment.sources, strict=False)
            if any(map(is_gone, names))
        )

    def handler_slot(self, name: str) -> int:
        """Return the first slot of the row that handler ``name`` feeds."""
        return self.handled[name].slots[0]

    def find(self, name: str) -> SlotAssignment:
        """Return the assignment of the row named ``name``."""
        return next(assignment for assignment in self.assignments if assignment.row.name == name)
