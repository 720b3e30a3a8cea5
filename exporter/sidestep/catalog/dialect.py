"""The catalogue tables of one engine's dialect: its rows, and the structs whose fields feed them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from sidestep.catalog.model import Row, check

AvailabilityCounts = tuple[int | float, int | float]
"""Requests that were served, and requests that were not."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DialectTables:
    """The tables of one dialect.

    Attributes:
        name: The dialect's name in an engine's Hello.
        rows: The dialect's families, in the order of the page.
        common_rows: Families whose names are the same for all engines.
        structs: Wire structs whose fields the rows' paths name.
        has_requests: Whether engines of the dialect may send raw request events.
        has_own_namespace: Whether no other dialect has a family of these names, so that an
            engine may carry the same labels as another dialect's engine.
        part_labels: Labels of engines that are part of another engine, such as a server's models.
        availability_counts: Reads how an engine's requests ended; it returns ``None`` where the
            engine does not report that.
        load_reader: Makes, for a layout, the function that reads an engine's load.
    """

    name: str
    rows: tuple[Row, ...]
    common_rows: tuple[Row, ...] = ()
    structs: tuple[type[msgspec.Struct], ...] = ()
    has_requests: bool = False
    has_own_namespace: bool = False
    part_labels: frozenset[str] = frozenset()
    # The arguments are engines, which belong to a package above this one.
    availability_counts: Callable[[Any], AvailabilityCounts | None] | None = None
    load_reader: Callable[[Any], Callable[[Any], Any]] | None = None

    def is_part(self, labels: Collection[str]) -> bool:
        """Return whether an engine with these labels is part of another engine."""
        return bool(self.part_labels) and self.part_labels <= set(labels)

    def rows_for(self, *, legacy: bool = False, common: bool = False) -> tuple[Row, ...]:
        """Return the rows; hidden ones only with ``legacy``, common names only with ``common``.

        Raises:
            CatalogueError: A row contradicts itself or another row.
        """
        rows = self.rows + (self.common_rows if common else ())
        return check(tuple(row for row in rows if legacy or row.status != "hidden"))
