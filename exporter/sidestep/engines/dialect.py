"""All that generic code needs of one engine's dialect, in one value."""

from __future__ import annotations

import dataclasses

from sidestep.catalog.dialect import DialectTables
from sidestep.engines.handlers import Handlers


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Dialect(DialectTables):
    """One engine's dialect.

    Attributes:
        handlers: Applies its items.
    """

    handlers: type[Handlers]
