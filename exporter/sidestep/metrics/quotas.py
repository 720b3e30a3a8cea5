"""Limits on self-described families: series, bytes on a page, and names."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from sidestep.catalog.layout import exposed_names
from sidestep.catalog.row import OBSERVED, Kind
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Key, OpenFamily

MAX_OPEN_FAMILIES = 512
MAX_ENGINE_SERIES = 2000
MAX_SERIES = 50_000
"""Most children of one engine, and of all engines."""
MAX_ENGINE_BYTES = 12 << 20
MAX_BYTES = 16 << 20
"""Most bytes that these may take on a page: a line repeats all labels, a histogram has many lines."""

LINE_BYTES = 32
"""Approximate bytes of a line on a page without its names and labels."""
PUNCTUATION = 4
"""Characters of a label in a line besides its name and value."""


@dataclasses.dataclass(slots=True)
class Usage:
    """Use of the quota by the self-described families of one engine; see ``OpenFamilyQuota``.

    Attributes:
        label_chars: Characters of the engine's labels in each line.
    """

    label_chars: int
    series: int = 0
    bytes: int = 0


class OpenFamilyQuota:
    """Quota of the self-described families of all engines, and their use of it.

    Attributes:
        bytes: Approximate bytes that these take on a page.
        families: Kind and own labels of families that are in no catalogue, by name.
        names: All names that these families take on a page.
    """

    def __init__(self) -> None:
        self.series = self.bytes = 0
        self.families: dict[str, tuple[Kind, Key]] = {}
        self.names: set[str] = set()
        self.usage: dict[Engine, Usage] = {}
        self._users: Counter[str] = Counter()
        """Number of engines that have a family, by its name."""

    def limit(self, engine: Engine, series: int, size: int) -> str:
        """Return the limit that ``engine`` would exceed with ``series`` children of ``size`` bytes, or ''."""
        used = self._used(engine)
        exceeded = {
            "engine_series": used.series + series > MAX_ENGINE_SERIES,
            "series": self.series + series > MAX_SERIES,
            "engine_bytes": used.bytes + size > MAX_ENGINE_BYTES,
            "bytes": self.bytes + size > MAX_BYTES,
        }
        return next((limit for limit, is_exceeded in exceeded.items() if is_exceeded), "")

    def describe(self, family: OpenFamily) -> None:
        """Record that one more engine has ``family``, which is in no catalogue."""
        self._users[family.name] += 1
        if family.name not in self.families:
            self.families[family.name] = family.kind, family.labels
            self.names |= exposed_names(family.name, family.kind)

    def size(self, engine: Engine, family: OpenFamily, keys: Iterable[Key]) -> int:
        """Return the approximate bytes that the children with these label values take on a page."""
        line = LINE_BYTES + len(family.name) + sum(map(len, family.labels))
        line += self._used(engine).label_chars
        lines = len(family.bounds) + 3 if family.kind in OBSERVED else 1
        return sum(lines * (line + sum(map(len, key))) for key in keys)

    def resize(self, engine: Engine, series: int, size: int) -> None:
        """Record that ``engine`` has ``series`` more children, of ``size`` bytes; both may be negative."""
        used = self._used(engine)
        used.series += series
        used.bytes += size
        self.series += series
        self.bytes += size

    def remove_children(self, engine: Engine, family: OpenFamily) -> None:
        """Record that ``engine`` no longer has the children of ``family``."""
        size = self.size(engine, family, family.children)
        self.resize(engine, -len(family.children), -size)

    def remove_gauges(self, engine: Engine) -> None:
        """Remove the children of gauges among the self-described families of ``engine``."""
        for family in engine.open_families.values():
            if family.kind == "gauge":
                self.remove_children(engine, family)
                family.children.clear()

    def release_all(self, engine: Engine) -> None:
        """Remove all self-described families of ``engine``."""
        used = self._used(engine)
        self.series -= used.series
        self.bytes -= used.bytes
        del self.usage[engine]
        for name in engine.open_families.keys() & self._users.keys():
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self.names -= exposed_names(name, self.families.pop(name)[0])
        engine.open_families = {}

    def _used(self, engine: Engine) -> Usage:
        used = self.usage.get(engine)
        if used is None:
            used = self.usage[engine] = Usage(label_chars(engine.sent_labels))
        return used


def label_chars(labels: Mapping[str, str]) -> int:
    """Return the characters that ``labels`` take in a line."""
    return sum(len(name) + len(value) + PUNCTUATION for name, value in labels.items())
