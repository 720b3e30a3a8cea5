"""The catalogue, compiled: where every series lives and which fields feed it.

A path such as ``scheduler.prefix_cache_stats.hits`` starts below the dialect's
step item, or below what its request events come to (``outcomes``), or where both
have such a field below either. ``[]`` behind a field means each of its elements: of a list of structs
(``iteration.finished_requests[].e2e_latency``) or of a list of numbers, which a
histogram observes one by one. A path is checked against the wire structs here,
so that a row with a misspelt source stops the start-up, not the night.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal, NamedTuple

import msgspec

from sidestep.catalogue import APART, rows_of
from sidestep.catalogue.model import (
    OBSERVED,
    Also,
    Constant,
    Hook,
    Info,
    Kind,
    Reading,
    Row,
    Same,
    Sampled,
)
from sidestep.errors import CatalogueError
from sidestep.lifecycle.outcomes import Outcomes
from sidestep.wire.items import SglangStats, VllmStep
from sidestep.wire.limits import OTHER
from sidestep.wire.streams import ForwardPass, LoadStat
from sidestep.wire.triton import ModelStats

STEPS: Mapping[str, tuple[type[msgspec.Struct], ...]] = {
    "vllm": (VllmStep, Outcomes),
    "sglang": (SglangStats,),
    "stream": (ForwardPass, LoadStat),
    "triton": (ModelStats,),
}
"""The structs whose fields a dialect's paths name."""

Where = Literal["scalars", "histogram", "keyed", "sampled", "reading", "constant", "info"]

ELSEWHERE: Mapping[type, Where] = {
    Sampled: "sampled",
    Reading: "reading",
    Constant: "constant",
    Info: "info",
}
"""Sources without a slot."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """A row and where an engine keeps its series.

    Attributes:
        slots: ``scalars``: indices into ``Engine.values``, one per value of
            ``closed`` plus one for any other, or a single one; ``histogram``:
            indices into the histograms, one per value of ``closed`` or a single one;
            ``keyed``: one index into the list of that name.
    """

    row: Row
    where: Where
    slots: tuple[int, ...] = ()

    @functools.cached_property
    def values_of_label(self) -> tuple[tuple[str, ...], ...]:
        """Own label values of the slots, in order."""
        if not self.row.closed:
            return ((),)
        closed = self.row.closed if self.where == "histogram" else (*self.row.closed, OTHER)
        return tuple((value,) for value in closed)


class Fed(NamedTuple):
    """A place that gets what another family's children get; see ``model.Also``."""

    row: Row
    slot: int
    values: tuple[str, ...]


class Section:
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
        self.single: list[tuple[str, int]] = []
        """Numbers that a histogram observes."""
        self.lists: list[tuple[str, int]] = []
        """Lists of numbers that a histogram observes."""
        self.runs: list[tuple[str, int]] = []
        """Likewise, as runs of equal numbers."""
        self.columns: list[tuple[str, bool, int]] = []
        """Of a list of structs: field, whether it is itself a list, histogram."""
        self.codes: list[tuple[str, Placed]] = []
        """Of a list of structs: a field that indexes the row's closed values."""
        self.tallies: list[tuple[str, Placed]] = []
        """Dicts by label value, or lists by position."""
        self.rows: list[Placed] = []
        self.parts: dict[str, Section] = {}

    @property
    def shown(self) -> list[Placed]:
        """The rows that appear with the first such struct: all, where one option sends it."""
        return self.rows if all(placed.row.feature for placed in self.rows) else []

    @property
    def shown_paths(self) -> Iterator[str]:
        """Here and below, where an option's families appear together."""
        if self.shown:
            yield self.path
        for part in self.parts.values():
            yield from part.shown_paths

    @property
    def gated(self) -> Iterator[str]:
        """Names of rows, here and below, that one option shows although others share its struct."""
        if not self.shown:
            yield from (placed.row.name for placed in self.rows if placed.row.feature)
        for part in self.parts.values():
            yield from part.gated

    def part(self, name: str) -> Section:
        """The section of the struct in field ``name``."""
        return self.parts.setdefault(name, Section(name, f"{self.path}.{name}"))


def taken(name: str, kind: Kind) -> frozenset[str]:
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
        placed: Every row, in the order of the page.
        roots: What to read from each struct of ``STEPS``.
        hooks: Rows that functions feed, by the hook's name.
        sampled: Rows that Samples items feed, by family name.
        also: What these feed besides, by the name of the family sampled.
        gated: Rows of an option whose fields are sent without it, too: hidden while it is off.
    """

    dialect: str
    placed: tuple[Placed, ...]
    roots: Mapping[type[msgspec.Struct], Section]
    hooks: Mapping[str, Placed]
    sampled: Mapping[str, Row]
    also: Mapping[str, list[Fed]]
    gated: frozenset[str]
    scalars: int
    histograms: tuple[Row, ...]
    keyed: tuple[Row, ...]

    @property
    def apart(self) -> bool:
        """Whether no other dialect's engine can have a series of one of its own."""
        return self.dialect in APART

    @property
    def has_requests(self) -> bool:
        """Whether its engines may tell of requests by raw events."""
        return Outcomes in self.roots

    @functools.cached_property
    def required(self) -> frozenset[str]:
        """Label names that every engine has to bring along: all rows share them."""
        shared = [set(placed.row.shared) for placed in self.placed]
        return frozenset(set.intersection(*shared) if shared else ())

    @functools.cached_property
    def own_labels(self) -> frozenset[str]:
        """Label names that no engine may bring along: they tell its children apart."""
        own = {label for placed in self.placed for label in placed.row.own_labels}
        return frozenset(own | {"le", "quantile"})

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Every name that a family of the catalogue takes on a page, as family or as sample."""
        return frozenset().union(*(taken(p.row.name, p.row.kind) for p in self.placed))

    def names_with(self, features: AbstractSet[str]) -> frozenset[str]:
        """``names`` without those of rows that only other features than ``features`` show."""
        hidden = [
            placed.row
            for placed in self.placed
            if placed.row.name in self.gated and placed.row.feature not in features
        ]
        return self.names.difference(*(taken(row.name, row.kind) for row in hidden))

    @functools.cached_property
    def histogram_names(self) -> tuple[str, ...]:
        """By slot: the family, and where it has a label the label's value."""
        found = [""] * len(self.histograms)
        for placed in self.own:
            if placed.where == "histogram":
                for slot, key in zip(placed.slots, placed.values_of_label, strict=True):
                    found[slot] = "|".join((placed.row.name, *key))
        return tuple(found)

    @functools.cached_property
    def own(self) -> tuple[Placed, ...]:
        """The rows that have slots of their own."""
        return tuple(placed for placed in self.placed if not isinstance(placed.row.source, Same))

    @functools.cached_property
    def scalar_names(self) -> tuple[tuple[str, str], ...]:
        """By slot: the family and, where it has a label, the label's value."""
        found = [("", "")] * self.scalars
        for placed in self.own:
            if placed.where == "scalars":
                for slot, key in zip(placed.slots, placed.values_of_label, strict=True):
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
            for placed in self.own
            if placed.where == "scalars" and placed.row.kind == "gauge"
            for slot in placed.slots
        )

    @functools.cached_property
    def shown_paths(self) -> frozenset[str]:
        """Paths of structs with which an option's families appear."""
        return frozenset(path for root in self.roots.values() for path in root.shown_paths)

    @functools.cached_property
    def timeless(self) -> frozenset[int]:
        """Those of gauges that no step tells: they are true until told anew."""
        hook = self.hooks.get("sleep_state")
        return frozenset() if hook is None else frozenset(hook.slots)

    def find(self, name: str) -> Placed:
        """The row named ``name``."""
        return next(placed for placed in self.placed if placed.row.name == name)


@functools.cache
def compile_layout(dialect: str, *, legacy: bool = False, common: bool = False) -> Layout:
    """The plan of ``dialect``; see ``rows_of``.

    Raises:
        CatalogueError: A row's source names no field, or one of another shape.
    """
    return _Compiler(dialect).layout(rows_of(dialect, legacy=legacy, common=common))


class _Compiler:
    """Hands out slots while it walks the rows once."""

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self.roots = {struct: Section("") for struct in STEPS[dialect]}
        self.scalars = 0
        self.histograms: list[Row] = []
        self.keyed: list[Row] = []
        self.hooks: dict[str, Placed] = {}
        self.also: dict[str, list[Fed]] = {}

    def layout(self, rows: tuple[Row, ...]) -> Layout:
        placed = {row.name: self.place(row) for row in rows if not isinstance(row.source, Same)}
        for row in rows:
            if isinstance(row.source, Same):
                shown = placed[row.source.name]
                placed[row.name] = dataclasses.replace(shown, row=row)
        sampled = {row.name: row for row in rows if isinstance(row.source, Sampled)}
        for name in self.also.keys() - sampled.keys():
            raise CatalogueError(f"{self.also[name][0].row.name}: no sampled row {name} to add")
        return Layout(
            dialect=self.dialect,
            placed=tuple(placed[row.name] for row in rows),
            roots=self.roots,
            hooks=self.hooks,
            sampled=sampled,
            also=self.also,
            gated=frozenset(name for root in self.roots.values() for name in root.gated),
            scalars=self.scalars,
            histograms=tuple(self.histograms),
            keyed=tuple(self.keyed),
        )

    def place(self, row: Row) -> Placed:
        """Give ``row`` its slots and connect its source."""
        match row.source:
            case Hook(name):
                placed = self.allocate(row)
                self.hooks[name] = placed
            case Also() as also:
                placed = self.allocate(row)
                self.feed(placed, also, placed.slots[0])
            case str() as path:
                placed = self.allocate(row)
                self.connect(placed, path, None)
            case tuple() as paths:
                placed = self.allocate(row)
                for path in paths:
                    self.connect(placed, path, None)
            case Mapping() as mapping:
                placed = self.allocate(row)
                if tuple(mapping) != row.closed:
                    raise CatalogueError(f"{row.name}: one path for each value of {row.closed}")
                for slot, path in zip(placed.slots, mapping.values(), strict=False):
                    if isinstance(path, Also):
                        self.feed(placed, path, slot)
                    else:
                        self.connect(placed, path, slot)
            case elsewhere:
                return Placed(row, ELSEWHERE[type(elsewhere)])
        return placed

    def feed(self, placed: Placed, also: Also, slot: int) -> None:
        """Have ``slot`` fed with another family."""
        self.also.setdefault(also.name, []).append(Fed(placed.row, slot, also.values))

    def allocate(self, row: Row) -> Placed:
        if row.kind == "histogram":
            first = len(self.histograms)
            self.histograms += [row] * max(len(row.closed), 1)
            return Placed(row, "histogram", tuple(range(first, len(self.histograms))))
        if row.own_labels and not row.closed:
            self.keyed.append(row)
            return Placed(row, "keyed", (len(self.keyed) - 1,))
        first = self.scalars
        self.scalars += len(row.closed) + 1 if row.closed else 1
        return Placed(row, "scalars", tuple(range(first, self.scalars)))

    def connect(self, placed: Placed, path: str, slot: int | None) -> None:
        """Add the reading of ``path`` to the section of its struct, below every root that has it."""
        first = path.partition(".")[0].removesuffix("[]")
        below = [struct for struct in self.roots if hasattr(struct, first)]
        if not below:
            raise CatalogueError(f"{placed.row.name}: no item has a field {first}")
        for struct in below:
            self.connect_below(struct, placed, path, slot)

    def connect_below(
        self, struct: type[msgspec.Struct], placed: Placed, path: str, slot: int | None
    ) -> None:
        row = placed.row
        section = self.roots[struct]
        *parents, leaf = path.split(".")
        for index, parent in enumerate(parents):
            inner, shape = self.field(row, struct, parent.removesuffix("[]"))
            if not (isinstance(inner, type) and issubclass(inner, msgspec.Struct)):
                raise CatalogueError(f"{row.name}: {parent} in {path} is no struct")
            if parent.endswith("[]"):
                if shape != "list" or index != len(parents) - 1:
                    raise CatalogueError(f"{row.name}: {parent} in {path} is no list of structs")
                self.connect_column(section.part(parent), placed, inner, leaf, slot)
                return
            section, struct = section.part(parent), inner
        _, shape = self.field(row, struct, leaf.removesuffix("[]"))
        target = placed.slots[0] if slot is None else slot
        if row.kind == "histogram":
            chosen = section.lists if leaf.endswith("[]") else section.single
            chosen.append((leaf.removesuffix("[]"), target))
            twin = f"{leaf.removesuffix('[]')}_runs"
            if twin in struct.__struct_fields__:
                section.runs.append((twin, target))
        elif shape == "plain":
            (section.counters if row.kind == "counter" else section.gauges).append((leaf, target))
        elif row.own_labels:
            section.tallies.append((leaf, placed))
        else:
            raise CatalogueError(f"{row.name}: {path} holds many values, the row has no label")
        section.rows.append(placed)

    def connect_column(
        self, section: Section, placed: Placed, struct: type, leaf: str, slot: int | None
    ) -> None:
        row = placed.row
        section.rows.append(placed)
        self.field(row, struct, leaf.removesuffix("[]"))
        if row.kind == "histogram":
            nested = leaf.endswith("[]")
            target = placed.slots[0] if slot is None else slot
            section.columns.append((leaf.removesuffix("[]"), nested, target))
        elif row.kind == "counter" and row.closed:
            section.codes.append((leaf, placed))
        else:
            raise CatalogueError(f"{row.name}: {row.source} needs a histogram or closed values")

    def field(self, row: Row, struct: type, name: str) -> tuple[Any, str]:
        """Type and shape (plain, list, dict) of a struct's field or property.

        Raises:
            CatalogueError: There is none.
        """
        hints = typing.get_type_hints(struct)
        if name not in hints:
            if isinstance(getattr(struct, name, None), property):
                return float, "plain"
            raise CatalogueError(f"{row.name}: {struct.__name__} has no field {name}")
        hint = hints[name]
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        if typing.get_origin(hint) is list:
            return typing.get_args(hint)[0], "list"
        if typing.get_origin(hint) is dict:
            return typing.get_args(hint)[1], "dict"
        return hint, "plain"
