"""The dialect of engines' native streams."""

from __future__ import annotations

from sidestep.engines.dialect import Dialect
from sidestep.engines.streams.handlers import StreamHandlers
from sidestep.engines.streams.rows import ROWS
from sidestep.engines.streams.wire import ForwardPass, LoadStat

DIALECT: Dialect = Dialect(
    name="stream",
    rows=ROWS,
    structs=(ForwardPass, LoadStat),
    has_own_namespace=True,
    handlers=StreamHandlers,
)
