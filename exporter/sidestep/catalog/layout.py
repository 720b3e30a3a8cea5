"""A dialect's plan: where every series of the catalogue lives and which fields feed it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple

import msgspec

from sidestep.catalog.dialect import Tables
from sidestep.catalog.model import OBSERVED, Kind, Row, Same
from sidestep.protocol.limits import OTHER

Where = Literal["scalars", "histogram", "keyed", "sampled", "reading", "constant", "info"]


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
        tables: Of the dialect.
        placed: Every row, in the order of the page.
        roots: What to read from each struct of ``its dialect``.
        hooks: Rows that functions feed, by the hook's name.
        sampled: Rows that Samples items feed, by family name.
        also: What these feed besides, by the name of the family sampled.
        gated: Rows of an option whose fields are sent without it, too: hidden while it is off.
    """

    tables: Tables
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
    def dialect(self) -> str:
        """The dialect's name."""
        return self.tables.name

    @property
    def apart(self) -> bool:
        """Whether no other dialect's engine can have a series of one of its own."""
        return self.tables.apart

    @property
    def has_requests(self) -> bool:
        """Whether its engines may tell of requests by raw events."""
        return self.tables.has_requests

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
