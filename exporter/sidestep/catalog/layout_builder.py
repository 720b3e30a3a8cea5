"""Compilation of catalogue rows to a layout.

A row's source may be a path such as ``scheduler.prefix_cache_stats.hits``. A path starts at every
struct of the dialect that has its first field: the step item, the outcomes of request events, or both.
``[]`` after a field stands for each element of a list of structs, as in
``iteration.finished_requests[].e2e_latency``, or of a list of numbers that a histogram observes. The
exporter does not start if a path names no field of the wire structs.
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
from sidestep.catalog.layout import FeedTarget, Layout, SlotAssignment, Storage, StructFields
from sidestep.catalog.row import Alias, Computed, Constant, FeedsFrom, Handler, Info, Row, Sampled
from sidestep.errors import CatalogueError

WITHOUT_SLOT: Mapping[type, Storage] = {
    Sampled: "sampled",
    Computed: "computed",
    Constant: "constant",
    Info: "info",
}
"""The storage of rows that need no slot, by the class of their source."""


@functools.cache
def compile_layout(tables: DialectTables, *, legacy: bool = False, common: bool = False) -> Layout:
    """Return the layout of the rows of ``tables``; see ``DialectTables.rows_for``."""
    return _LayoutBuilder(tables).layout(tables.rows_for(legacy=legacy, common=common))


class _LayoutBuilder:
    """One pass over a dialect's rows that assigns their slots."""

    def __init__(self, tables: DialectTables) -> None:
        self.tables = tables
        self.roots = {struct: StructFields("") for struct in tables.structs}
        self.scalars = 0
        self.histograms: list[Row] = []
        self.keyed: list[Row] = []
        self.handled: dict[str, SlotAssignment] = {}
        self.feeds: dict[str, list[FeedTarget]] = {}

    def layout(self, rows: tuple[Row, ...]) -> Layout:
        assignments = {
            row.name: self.assign(row) for row in rows if not isinstance(row.source, Alias)
        }
        for row in rows:
            if isinstance(row.source, Alias):
                target = assignments[row.source.name]
                assignments[row.name] = dataclasses.replace(target, row=row)
        sampled_rows = {row.name: row for row in rows if isinstance(row.source, Sampled)}
        for name in self.feeds.keys() - sampled_rows.keys():
            raise CatalogueError(f"{self.feeds[name][0].row.name}: {name} is not a sampled row")
        return Layout(
            tables=self.tables,
            assignments=tuple(assignments[row.name] for row in rows),
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
        """Allocate the slots of ``row`` and connect its source to them."""
        storage = WITHOUT_SLOT.get(type(row.source))
        if storage is not None:
            return SlotAssignment(row, storage)
        assignment = self.allocate(row)
        match row.source:
            case Handler(name):
                self.handled[name] = assignment
            case Mapping() as sources:
                if tuple(sources) != row.closed:
                    raise CatalogueError(f"{row.name}: one path for each value of {row.closed}")
                for slot, source in zip(assignment.slots, sources.values(), strict=False):
                    self.connect_source(assignment, source, slot)
            case tuple() as sources_of_one:
                for source in sources_of_one:
                    self.connect_source(assignment, source, assignment.slots[0])
            case str() | FeedsFrom() as source:
                self.connect_source(assignment, source, assignment.slots[0])
        return assignment

    def connect_source(
        self, assignment: SlotAssignment, source: str | FeedsFrom, slot: int
    ) -> None:
        """Feed ``slot`` from a path or from another family."""
        if isinstance(source, str):
            self.connect(assignment, source, slot)
        else:
            target = FeedTarget(assignment.row, slot, source.values)
            self.feeds.setdefault(source.name, []).append(target)

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

    def connect(self, assignment: SlotAssignment, path: str, slot: int) -> None:
        """Connect ``path``, below every struct that has its first field, to ``slot``."""
        first = path.partition(".")[0].removesuffix("[]")
        structs = [struct for struct in self.roots if hasattr(struct, first)]
        if not structs:
            raise CatalogueError(f"{assignment.row.name}: no item has a field {first}")
        for struct in structs:
            self.connect_below(struct, assignment, path, slot)

    def connect_below(
        self, struct: type[msgspec.Struct], assignment: SlotAssignment, path: str, slot: int
    ) -> None:
        row = assignment.row
        section = self.roots[struct]
        *parents, leaf = path.split(".")
        for index, parent in enumerate(parents):
            inner, shape = self.field(row, struct, parent.removesuffix("[]"))
            if not (isinstance(inner, type) and issubclass(inner, msgspec.Struct)):
                raise CatalogueError(f"{row.name}: {parent} in {path} is no struct")
            if parent.endswith("[]"):
                if shape != "list" or index != len(parents) - 1:
                    raise CatalogueError(f"{row.name}: {parent} in {path} is no list of structs")
                self.connect_column(section.part(parent), assignment, inner, leaf, slot)
                return
            section, struct = section.part(parent), inner
        _, shape = self.field(row, struct, leaf.removesuffix("[]"))
        if row.kind == "histogram":
            fields = section.observed_lists if leaf.endswith("[]") else section.observed
            fields.append((leaf.removesuffix("[]"), slot))
            runs = f"{leaf.removesuffix('[]')}_runs"
            if runs in struct.__struct_fields__:
                section.observed_runs.append((runs, slot))
        elif shape == "plain":
            (section.counters if row.kind == "counter" else section.gauges).append((leaf, slot))
        elif row.own_labels:
            section.labelled_counts.append((leaf, assignment))
        else:
            raise CatalogueError(f"{row.name}: {path} holds many values, the row has no label")
        section.rows.append(assignment)

    def connect_column(
        self,
        section: StructFields,
        assignment: SlotAssignment,
        struct: type,
        leaf: str,
        slot: int,
    ) -> None:
        """Connect field ``leaf`` of a list of structs to ``slot``."""
        row = assignment.row
        section.rows.append(assignment)
        self.field(row, struct, leaf.removesuffix("[]"))
        if row.kind == "histogram":
            nested = leaf.endswith("[]")
            section.observed_columns.append((leaf.removesuffix("[]"), nested, slot))
        elif row.kind == "counter" and row.closed:
            section.code_fields.append((leaf, assignment))
        else:
            raise CatalogueError(f"{row.name}: {row.source} needs a histogram or closed values")

    def field(self, row: Row, struct: type, name: str) -> tuple[Any, str]:
        """Return the type and the shape (plain, list, dict) of a struct's field or property."""
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
