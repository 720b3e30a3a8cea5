"""The dialect of one engine: everything that generic code needs to know of the engine."""

from __future__ import annotations

import dataclasses

from sidestep.catalog.dialect import DialectTables
from sidestep.engines.handlers import Handlers


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Dialect(DialectTables):
    """One engine's dialect.

    Attributes:
        handlers: The class that applies the dialect's items.
    """

    handlers: type[Handlers]
