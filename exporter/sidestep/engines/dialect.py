"""The dialect of one engine: everything that generic code needs to know of the engine."""

from __future__ import annotations

import dataclasses
import functools
import operator

import msgspec

from sidestep.catalog.dialect import DialectTables
from sidestep.catalog.layout import Layout
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.handlers import Handlers
from sidestep.engines.items import Item
from sidestep.engines.polled_page import PolledPage
from sidestep.errors import CatalogueError, WireError
from sidestep.protocol.messages import DECODE_ERRORS
from sidestep.protocol.self_described import SHAPED, Samples, check_sample_count


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Dialect(DialectTables):
    """One engine's dialect.

    Attributes:
        items: Wire structs that the dialect's streams carry, besides ``Samples``.
        handlers: The class that applies these items.
    """

    items: tuple[type[msgspec.Struct], ...] = ()
    handlers: type[Handlers]

    @property
    def polls_page(self) -> bool:
        """True if the engine's page is polled, with ``--engine``."""
        return PolledPage in self.items


class Dialects(dict[str, Dialect]):
    """Dialects by the name in an engine's Hello, and the decoder of their items.

    Raises:
        CatalogueError: Two dialects have the same name, or two items the same tag.
    """

    def __init__(self, *dialects: Dialect) -> None:
        super().__init__((dialect.name, dialect) for dialect in dialects)
        if len(self) != len(dialects):
            raise CatalogueError("two dialects have the same name")
        items = dict.fromkeys(item for dialect in dialects for item in dialect.items)
        try:
            self._decoder = msgspec.msgpack.Decoder(functools.reduce(operator.or_, items, Samples))
        except TypeError as error:
            raise CatalogueError(f"items of the dialects: {error}") from error

    def layouts(self, *, legacy: bool = False, common: bool = False) -> dict[str, Layout]:
        """Return the layout of each dialect; see ``DialectTables.rows_for``."""
        return {
            name: compile_layout(dialect, legacy=legacy, common=common)
            for name, dialect in self.items()
        }

    def decode(self, raw: bytes | memoryview | msgspec.Raw) -> Item:
        """Decode the item in ``raw``."""
        try:
            if len(raw) > SHAPED:
                check_sample_count(raw)
            return self._decoder.decode(raw)
        except DECODE_ERRORS as error:
            raise WireError("bad_item", str(error)) from None
