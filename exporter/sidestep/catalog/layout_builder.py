"""The catalogue, compiled to a plan.

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
from collections.abc import Mapping
from typing import Any

import msgspec

from sidestep.catalog.dialect import DialectTables
from sidestep.catalog.layout import FeedTarget, Layout, SlotAssignment, Section, Where
from sidestep.catalog.model import FeedsFrom, Constant, Handler, Info, Computed, Row, Alias, Sampled
from sidestep.errors import CatalogueError

WITHOUT_SLOT: Mapping[type, Where] = {
    Sampled: "sampled",
    Computed: "reading",
    Constant: "constant",
    Info: "info",
}
"""Sources without a slot."""


@functools.cache
def compile_layout(tables: DialectTables, *, legacy: bool = False, common: bool = False) -> Layout:
    """Compile the rows of ``tables``; see ``Tables.rows_for``.

    Raises:
        CatalogueError: A row's source names no field, or one of another shape.
    """
    return _LayoutBuilder(tables).layout(tables.rows_for(legacy=legacy, common=common))


class _LayoutBuilder:
    """Hands out slots while it walks the rows once."""

    def __init__(self, tables: DialectTables) -> None:
        self.tables = tables
        self.roots = {struct: Section("") for struct in tables.structs}
        self.scalars = 0
        self.histograms: list[Row] = []
        self.keyed: list[Row] = []
        self.handled: dict[str, SlotAssignment] = {}
        self.feeds: dict[str, list[FeedTarget]] = {}

    def layout(self, rows: tuple[Row, ...]) -> Layout:
        placed = {row.name: self.assign(row) for row in rows if not isinstance(row.source, Alias)}
        for row in rows:
            if isinstance(row.source, Alias):
                target = placed[row.source.name]
                placed[row.name] = dataclasses.replace(target, row=row)
        sampled_rows = {row.name: row for row in rows if isinstance(row.source, Sampled)}
        for name in self.feeds.keys() - sampled_rows.keys():
            raise CatalogueError(f"{self.also[name][0].row.name}: no sampled row {name} to add")
        return Layout(
            tables=self.tables,
            placed=tuple(placed[row.name] for row in rows),
            roots=self.roots,
            handled=self.handled,
            sampled_rows=sampled_rows,
            feeds=self.feeds,
            gated=frozenset(name for root in self.roots.values() for name in root.gated),
            scalars=self.scalars,
            histograms=tuple(self.histograms),
            keyed=tuple(self.keyed),
        )

    def assign(self, row: Row) -> SlotAssignment:
        """Give ``row`` its slots and connect its source."""
        match row.source:
            case Handler(name):
                placed = self.allocate(row)
                self.handled[name] = placed
            case FeedsFrom() as feeds:
                placed = self.allocate(row)
                self.feed(placed, feeds, placed.slots[0])
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
                    if isinstance(path, FeedsFrom):
                        self.feed(placed, path, slot)
                    else:
                        self.connect(placed, path, slot)
            case source:
                return SlotAssignment(row, WITHOUT_SLOT[type(source)])
        return placed

    def feed(self, placed: SlotAssignment, feeds: FeedsFrom, slot: int) -> None:
        """Have ``slot`` fed with another family."""
        self.feeds.setdefault(feeds.name, []).append(FeedTarget(placed.row, slot, feeds.values))

    def allocate(self, row: Row) -> SlotAssignment:
        if row.kind == "histogram":
            first = len(self.histograms)
            self.histograms += [row] * max(len(row.closed), 1)
            return SlotAssignment(row, "histogram", tuple(range(first, len(self.histograms))))
        if row.own_labels and not row.closed:
            self.keyed.append(row)
            return SlotAssignment(row, "keyed", (len(self.keyed) - 1,))
        first = self.scalars
        self.scalars += len(row.closed) + 1 if row.closed else 1
        return SlotAssignment(row, "scalars", tuple(range(first, self.scalars)))

    def connect(self, placed: SlotAssignment, path: str, slot: int | None) -> None:
        """Add the reading of ``path`` to the section of its struct, below every root that has it."""
        first = path.partition(".")[0].removesuffix("[]")
        structs = [struct for struct in self.roots if hasattr(struct, first)]
        if not structs:
            raise CatalogueError(f"{placed.row.name}: no item has a field {first}")
        for struct in structs:
            self.connect_below(struct, placed, path, slot)

    def connect_below(
        self, struct: type[msgspec.Struct], placed: SlotAssignment, path: str, slot: int | None
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
            fields = section.observed_lists if leaf.endswith("[]") else section.single
            fields.append((leaf.removesuffix("[]"), target))
            twin = f"{leaf.removesuffix('[]')}_runs"
            if twin in struct.__struct_fields__:
                section.observed_runs.append((twin, target))
        elif shape == "plain":
            (section.counters if row.kind == "counter" else section.gauges).append((leaf, target))
        elif row.own_labels:
            section.labelled_counts.append((leaf, placed))
        else:
            raise CatalogueError(f"{row.name}: {path} holds many values, the row has no label")
        section.rows.append(placed)

    def connect_column(
        self, section: Section, placed: SlotAssignment, struct: type, leaf: str, slot: int | None
    ) -> None:
        row = placed.row
        section.rows.append(placed)
        self.field(row, struct, leaf.removesuffix("[]"))
        if row.kind == "histogram":
            nested = leaf.endswith("[]")
            target = placed.slots[0] if slot is None else slot
            section.observed_columns.append((leaf.removesuffix("[]"), nested, target))
        elif row.kind == "counter" and row.closed:
            section.code_fields.append((leaf, placed))
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
