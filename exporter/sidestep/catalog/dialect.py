"""What the catalogue knows of one engine's dialect: its rows, and the structs whose fields feed them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from sidestep.catalog.model import Row, check

Ended = tuple[int | float, int | float]
"""Requests that were served, and requests that were not."""


class Polled(msgspec.Struct):
    """Statistics that are polled of a server."""

    @property
    def absent(self) -> bool:
        """Whether the server does not have what they are about any more."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Tables:
    """One dialect's tables.

    Attributes:
        name: As an engine's Hello names it.
        rows: Its families, in the order of the page.
        common_rows: Families under names that are the same for all engines.
        structs: Wire structs whose fields the rows' paths name.
        has_requests: Whether its engines may send raw request events.
        apart: Whether no family of it is another dialect's, so that its engines may have another's labels.
        part_labels: Labels of those engines that are parts of another, such as a server's models.
        polled: Struct of statistics that are polled of a server, which counts by itself.
        ended: Reads how an engine's requests ended; ``None`` from it where the engine does not say.
        load_reader: Makes, for a layout, what reads an engine's load.
    """

    name: str
    rows: tuple[Row, ...]
    common_rows: tuple[Row, ...] = ()
    structs: tuple[type[msgspec.Struct], ...] = ()
    has_requests: bool = False
    apart: bool = False
    part_labels: frozenset[str] = frozenset()
    # Of engines, which are above this package.
    polled: type[Polled] | None = None
    ended: Callable[[Any], Ended | None] | None = None
    load_reader: Callable[[Any], Callable[[Any], Any]] | None = None

    def is_part(self, labels: Collection[str]) -> bool:
        """Return whether an engine with such labels is a part of one that is described by itself."""
        return bool(self.part_labels) and self.part_labels <= set(labels)

    def rows_for(self, *, legacy: bool = False, common: bool = False) -> tuple[Row, ...]:
        """Return the rows; hidden ones only with ``legacy``, common names only with ``common``.

        Raises:
            CatalogueError: A row cannot work.
        """
        rows = self.rows + (self.common_rows if common else ())
        return check(tuple(row for row in rows if legacy or row.status != "hidden"))
