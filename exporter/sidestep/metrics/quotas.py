"""What families that describe themselves take, of all engines: series, bytes on a page, names."""

from __future__ import annotations

from collections import Counter

from sidestep.catalog.layout import exposed_names
from sidestep.catalog.model import Kind
from sidestep.metrics.engine import Engine, Key, OpenFamily

MAX_OPEN_FAMILIES = 512
MAX_ENGINE_SERIES = 2000
MAX_SERIES = 50_000
"""Children, of one engine and of all."""
MAX_ENGINE_BYTES = 12 << 20
MAX_BYTES = 16 << 20
"""What these take on a page, about: a line repeats all labels, a histogram has many lines."""


class SeriesQuota:
    """How much of it there is left.

    Attributes:
        series: Children of self-described families, of all engines.
        bytes: What they take on a page, about.
        families: Kind and own labels of those that no catalogue has: one form a name.
        names: All names that those take on a page.
    """

    def __init__(self) -> None:
        self.series = self.bytes = 0
        self.families: dict[str, tuple[Kind, Key]] = {}
        self.names: set[str] = set()
        self._users: Counter[str] = Counter()
        """Engines that have a family, by its name."""

    def limit(self, engine: Engine, series: int, size: int) -> str:
        """Which limit ``engine`` would pass with so many children more, of so many bytes; or none."""
        reached = {
            "engine_series": engine.open_series + series > MAX_ENGINE_SERIES,
            "series": self.series + series > MAX_SERIES,
            "engine_bytes": engine.open_bytes + size > MAX_ENGINE_BYTES,
            "bytes": self.bytes + size > MAX_BYTES,
        }
        return next((limit for limit, passed in reached.items() if passed), "")

    def describe(self, family: OpenFamily) -> None:
        """Note that one engine more has ``family``, which no catalogue has."""
        self._users[family.name] += 1
        if family.name not in self.families:
            self.families[family.name] = family.kind, family.labels
            self.names |= exposed_names(family.name, family.kind)

    def resize(self, engine: Engine, series: int, size: int) -> None:
        """Note that ``engine`` has so many more children of self-described families."""
        engine.open_series += series
        self.series += series
        engine.open_bytes += size
        self.bytes += size

    def without_gauges(self, engine: Engine) -> None:
        """Let the gauges among the self-described families of ``engine`` have no children."""
        for family in engine.open_families.values():
            if family.kind == "gauge":
                size = sum(family.size(key, engine) for key in family.children)
                self.resize(engine, -len(family.children), -size)
                family.children.clear()

    def release(self, engine: Engine) -> None:
        """Give free what the self-described families of ``engine`` took: it has none any more."""
        self.series -= engine.open_series
        self.bytes -= engine.open_bytes
        for name in engine.open_families.keys() & self._users.keys():
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self.names -= exposed_names(name, self.families.pop(name)[0])
        engine.open_families = {}
        engine.open_series = engine.open_bytes = 0
