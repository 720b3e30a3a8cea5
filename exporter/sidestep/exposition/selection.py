"""Selection of the engines that a page exposes in a family."""

from __future__ import annotations

from collections.abc import Sequence

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import Alias
from sidestep.catalog.slo import SLO_REQUESTS
from sidestep.exposition.families import Family
from sidestep.metrics.availability import update_availability
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry

FamilyPart = tuple[SlotAssignment | None, list[Engine]]
"""A dialect's slot assignment, None for a self-described family, and the engines with samples."""


class Selections:
    """Engines by what a row requires of them, cached until the registry changes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._version = -1
        self._engines: dict[tuple[str, bool, str], list[Engine]] = {}
        self._gone: list[Engine] = []

    def refresh(self) -> None:
        """Start a page: select again."""
        self._version = self._registry.version
        self._engines = {}
        engines = self._registry.engines.values()
        absent = [engine for engine in engines if engine.absent]
        self._gone = [*self._registry.retired.values(), *absent]

    def parts(self, family: Family) -> list[FamilyPart]:
        """Return the engines that have samples of ``family``, by dialect."""
        if family.assignments:
            return [
                (placed, self.of_row(placed, name)) for name, placed in family.assignments.items()
            ]
        engines = self._select("", live=family.kind == "gauge")
        return [(None, [engine for engine in engines if family.name in engine.open_families])]

    def of_row(self, placed: SlotAssignment, dialect: str) -> list[Engine]:
        """Return the engines of ``dialect`` that have samples of a row."""
        row = placed.row
        feature = row.feature if row.name in self._registry.layouts[dialect].gated else ""
        engines = self._select(dialect, live=row.kind == "gauge", feature=feature)
        if placed.storage == "sampled":
            name = stored_name(placed)
            return [engine for engine in engines if name in engine.open_families]
        if placed.storage == "keyed":
            slot = placed.slots[0]
            if row.name == SLO_REQUESTS:
                for engine in engines:
                    # Engines that have some are updated when the snapshot is made.
                    if not engine.keyed[slot]:
                        update_availability(engine)
            return [engine for engine in engines if engine.keyed[slot]]
        return engines

    def live(self, dialect: str) -> list[Engine]:
        """Return the engines of ``dialect`` that streams feed."""
        return self._select(dialect, live=True)

    def gone(self, placed: SlotAssignment | None, exposed: Sequence[Engine]) -> list[Engine]:
        """Return engines like ``exposed`` that have gone, but whose totals the registry retains."""
        self._update()
        if not self._gone:
            return []
        layouts = {engine.layout for engine in exposed}
        found = [engine for engine in self._gone if engine.layout in layouts]
        if placed is None or placed.row.name not in exposed[0].layout.gated:
            return found
        return [engine for engine in found if placed.row.feature in engine.description.features]

    def _select(self, dialect: str, *, live: bool, feature: str = "") -> list[Engine]:
        self._update()
        found = self._engines.get((dialect, live, feature))
        if found is None:
            layout = self._registry.layouts[dialect] if dialect else None
            found = self._engines[dialect, live, feature] = [
                engine
                for engine in self._registry.engines.values()
                if not engine.absent
                and (layout is None or engine.layout is layout)
                and (engine.live or not live)
                and (not feature or feature in engine.description.features)
            ]
        return found

    def _update(self) -> None:
        if self._version != self._registry.version:
            self.refresh()


def stored_name(placed: SlotAssignment) -> str:
    """Return the name under which an engine stores a family that Samples items feed."""
    source = placed.row.source
    return source.name if isinstance(source, Alias) else placed.row.name
