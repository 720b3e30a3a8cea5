"""Limits on self-described families: series, bytes on a page, and names."""

from __future__ import annotations

from collections import Counter

from sidestep.catalog.layout import exposed_names
from sidestep.catalog.model import Kind
from sidestep.metrics.engine import Engine, Key, OpenFamily

MAX_OPEN_FAMILIES = 512
MAX_ENGINE_SERIES = 2000
MAX_SERIES = 50_000
"""Most children of one engine, and of all engines."""
MAX_ENGINE_BYTES = 12 << 20
MAX_BYTES = 16 << 20
"""Most bytes that these may take on a page: a line repeats all labels, a histogram has many lines."""


class SeriesQuota:
    """The current use of the limits, by all engines.

    Attributes:
        series: Number of children of self-described families.
        bytes: Approximate bytes that these take on a page.
        families: Kind and own labels of families that are in no catalogue, by name.
        names: All names that these families take on a page.
    """

    def __init__(self) -> None:
        self.series = self.bytes = 0
        self.families: dict[str, tuple[Kind, Key]] = {}
        self.names: set[str] = set()
        self._users: Counter[str] = Counter()
        """Number of engines that have a family, by its name."""

    def limit(self, engine: Engine, series: int, size: int) -> str:
        """Return the limit that ``engine`` would exceed with ``series`` more children, or ''.

        Args:
            engine: The engine that would get them.
            series: Number of additional children.
            size: Approximate bytes that these take on a page.
        """
        exceeded = {
            "engine_series": engine.open_series + series > MAX_ENGINE_SERIES,
            "series": self.series + series > MAX_SERIES,
            "engine_bytes": engine.open_bytes + size > MAX_ENGINE_BYTES,
            "bytes": self.bytes + size > MAX_BYTES,
        }
        return next((limit for limit, is_exceeded in exceeded.items() if is_exceeded), "")

    def describe(self, family: OpenFamily) -> None:
        """Record that one more engine has ``family``, which is in no catalogue."""
        self._users[family.name] += 1
        if family.name not in self.families:
            self.families[family.name] = family.kind, family.labels
            self.names |= exposed_names(family.name, family.kind)

    def resize(self, engine: Engine, series: int, size: int) -> None:
        """Record that ``engine`` has ``series`` more children, of ``size`` bytes; both may be negative."""
        engine.open_series += series
        self.series += series
        engine.open_bytes += size
        self.bytes += size

    def remove_gauges(self, engine: Engine) -> None:
        """Remove the children of gauges among the self-described families of ``engine``."""
        for family in engine.open_families.values():
            if family.kind == "gauge":
                size = sum(family.size(key, engine) for key in family.children)
                self.resize(engine, -len(family.children), -size)
                family.children.clear()

    def release_all(self, engine: Engine) -> None:
        """Remove all self-described families of ``engine``."""
        self.series -= engine.open_series
        self.bytes -= engine.open_bytes
        for name in engine.open_families.keys() & self._users.keys():
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self.names -= exposed_names(name, self.families.pop(name)[0])
        engine.open_families = {}
        engine.open_series = engine.open_bytes = 0
