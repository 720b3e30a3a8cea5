"""A dialect's plan: where every series of the catalogue lives and which fields feed it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple

import msgspec

from sidestep.catalog.dialect import DialectTables
from sidestep.catalog.model import OBSERVED, Kind, Row, Same
from sidestep.protocol.limits import OTHER

Storage = Literal["scalars", "histogram", "keyed", "sampled", "reading", "constant", "info"]


@dataclasses.dataclass(frozen=True)
class SlotAssignment:
    """A row and where an engine keeps its series.

    Attributes:
        slots: ``scalars``: indices into ``Engine.values``, one per value of
            ``closed`` plus one for any other, or a single one; ``histogram``:
            indices into the histograms, one per value of ``closed`` or a single one;
            ``keyed``: one index into the list of that name.
    """

    row: Row
    storage: Storage
    slots: tuple[int, ...] = ()

    @functools.cached_property
    def label_values(self) -> tuple[tuple[str, ...], ...]:
        """Own label values of the slots, in order."""
        if not self.row.closed:
            return ((),)
        closed = self.row.closed if self.storage == "histogram" else (*self.row.closed, OTHER)
        return tuple((value,) for value in closed)


class FeedTarget(NamedTuple):
    """A place that gets what another family's children get; see ``model.Also``."""

    row: Row
    slot: int
    values: tuple[str, ...]


class StructFields:
    """What to read from one struct of an item, and the structs below it."""

    __slots__ = (
        "codes", "columns", "counters", "gauges", "lists", "name", "parts", "path", "rows", "runs",
        "single", "tallies",
    )  # fmt: skip

    def __init__(self, name: str, path: str = "") -> None:
        self.name = name
        self.path = path
        self.gauges: list[tuple[str, int]] = []
        self.counters: list[tuple[str, int]] = []
        self.observed: list[tuple[str, int]] = []
        """Numbers that a histogram observes."""
        self.observed_lists: list[tuple[str, int]] = []
        """Lists of numbers that a histogram observes."""
        self.observed_runs: list[tuple[str, int]] = []
        """Likewise, as runs of equal numbers."""
        self.observed_columns: list[tuple[str, bool, int]] = []
        """Of a list of structs: field, whether it is itself a list, histogram."""
        self.code_fields: list[tuple[str, SlotAssignment]] = []
        """Of a list of structs: a field that indexes the row's closed values."""
        self.labelled_counts: list[tuple[str, SlotAssignment]] = []
        """Dicts by label value, or lists by position."""
        self.rows: list[SlotAssignment] = []
        self.nested: dict[str, StructFields] = {}

    @property
    def optional_rows(self) -> list[SlotAssignment]:
        """The rows that appear with the first such struct: all, where one option sends it."""
        return self.rows if all(placed.row.feature for placed in self.rows) else []

    @property
    def optional_paths(self) -> Iterator[str]:
        """Here and below, where an option's families appear together."""
        if self.optional_rows:
            yield self.path
        for part in self.nested.values():
            yield from part.optional_paths

    @property
    def gated(self) -> Iterator[str]:
        """Names of rows, here and below, that one option shows although others share its struct."""
        if not self.optional_rows:
            yield from (placed.row.name for placed in self.rows if placed.row.feature)
        for part in self.nested.values():
            yield from part.gated

    def part(self, name: str) -> StructFields:
        """The section of the struct in field ``name``."""
        return self.nested.setdefault(name, StructFields(name, f"{self.path}.{name}"))


def exposed_names(name: str, kind: Kind) -> frozenset[str]:
    """The names that family ``name`` takes: OpenMetrics' family and every sample's."""
    if kind in OBSERVED:
        ends = ("bucket", "count", "sum", "created")
        return frozenset({name, *(f"{name}_{end}" for end in ends)})
    base = name.removesuffix("_total") if kind == "counter" else name
    return frozenset({name, base, f"{base}_created"} if kind == "counter" else {name})


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """One dialect's plan.

    Attributes:
        tables: Of the dialect.
        placed: Every row, in the order of the page.
        roots: What to read from each struct of ``its dialect``.
        hooks: Rows that functions feed, by the hook's name.
        sampled: Rows that Samples items feed, by family name.
        also: What these feed besides, by the name of the family sampled.
        gated: Rows of an option whose fields are sent without it, too: hidden while it is off.
    """

    tables: DialectTables
    placed: tuple[SlotAssignment, ...]
    roots: Mapping[type[msgspec.Struct], StructFields]
    handled: Mapping[str, SlotAssignment]
    sampled_rows: Mapping[str, Row]
    feeds: Mapping[str, list[FeedTarget]]
    gated: frozenset[str]
    scalars: int
    histograms: tuple[Row, ...]
    keyed: tuple[Row, ...]

    @property
    def dialect(self) -> str:
        """The dialect's name."""
        return self.tables.name

    @property
    def has_own_namespace(self) -> bool:
        """Whether no other dialect's engine can have a series of one of its own."""
        return self.tables.has_own_namespace

    @property
    def has_requests(self) -> bool:
        """Whether its engines may tell of requests by raw events."""
        return self.tables.has_requests

    @functools.cached_property
    def required_labels(self) -> frozenset[str]:
        """Label names that every engine has to bring along: all rows share them."""
        shared = [set(placed.row.shared) for placed in self.assignments]
        return frozenset(set.intersection(*shared) if shared else ())

    @functools.cached_property
    def own_labels(self) -> frozenset[str]:
        """Label names that no engine may bring along: they tell its children apart."""
        own = {label for placed in self.assignments for label in placed.row.own_labels}
        return frozenset(own | {"le", "quantile"})

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Every name that a family of the catalogue takes on a page, as family or as sample."""
        return frozenset().union(*(exposed_names(p.row.name, p.row.kind) for p in self.assignments))

    def names_for(self, features: AbstractSet[str]) -> frozenset[str]:
        """``names`` without those of rows that only other features than ``features`` show."""
        hidden = [
            placed.row
            for placed in self.assignments
            if placed.row.name in self.gated and placed.row.feature not in features
        ]
        return self.names.difference(*(exposed_names(row.name, row.kind) for row in hidden))

    @functools.cached_property
    def histogram_names(self) -> tuple[str, ...]:
        """By slot: the family, and where it has a label the label's value."""
        found = [""] * len(self.histograms)
        for placed in self.primary:
            if placed.storage == "histogram":
                for slot, key in zip(placed.slots, placed.label_values, strict=True):
                    found[slot] = "|".join((placed.row.name, *key))
        return tuple(found)

    @functools.cached_property
    def own(self) -> tuple[SlotAssignment, ...]:
        """The rows that have slots of their own."""
        return tuple(placed for placed in self.assignments if not isinstance(placed.row.source, Same))

    @functools.cached_property
    def scalar_names(self) -> tuple[tuple[str, str], ...]:
        """By slot: the family and, where it has a label, the label's value."""
        found = [("", "")] * self.scalars
        for placed in self.primary:
            if placed.storage == "scalars":
                for slot, key in zip(placed.slots, placed.label_values, strict=True):
                    found[slot] = placed.row.name, "".join(key)
        return tuple(found)

    @functools.cached_property
    def scalar_slots(self) -> dict[tuple[str, str], int]:
        """Slots by ``scalar_names``."""
        return {name: slot for slot, name in enumerate(self.scalar_names)}

    @functools.cached_property
    def scalar_gauges(self) -> frozenset[int]:
        """Slots of gauges."""
        return frozenset(
            slot
            for placed in self.primary
            if placed.storage == "scalars" and placed.row.kind == "gauge"
            for slot in placed.slots
        )

    @functools.cached_property
    def optional_paths(self) -> frozenset[str]:
        """Paths of structs with which an option's families appear."""
        return frozenset(path for root in self.roots.values() for path in root.optional_paths)

    @functools.cached_property
    def lasting_gauges(self) -> frozenset[int]:
        """Those of gauges that no step tells: they are true until told anew."""
        assignment = self.handled.get("sleep_state")
        return frozenset() if assignment is None else frozenset(assignment.slots)

    def find(self, name: str) -> SlotAssignment:
        """The row named ``name``."""
        return next(placed for placed in self.assignments if placed.row.name == name)
