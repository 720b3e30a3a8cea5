"""What a scrape sees: families, who has them, and the labels of what they have.

What engines have of one is read through ``copies``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from itertools import chain

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import ENGINE_LABELS, OBSERVED, Alias, Combine, Kind
from sidestep.catalog.slo import SLO_REQUESTS
from sidestep.metrics.availability import update_availability
from sidestep.metrics.engine import Engine, Key
from sidestep.metrics.registry import Registry


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One family of the page.

    Attributes:
        labels: Own label names, as the first who has the family has them.
        places: Where engines keep it, by dialect; empty for one that described itself.
    """

    name: str
    kind: Kind
    help: str
    labels: Key
    combine: Combine = "sum"
    places: Mapping[str, SlotAssignment] = dataclasses.field(default_factory=dict)


def families(registry: Registry, names: Collection[str] = ()) -> Iterator[Family]:
    """Families in page order, all or those that own one of the sample ``names``.

    Those of dialects that no engine speaks are left out: they can have no sample.
    """
    for family in chain(catalogued(registry, spoken(registry)), described(registry)):
        if not names or owns(family.name, family.kind, names):
            yield family


def spoken(registry: Registry) -> frozenset[str]:
    """Dialects of the engines that are there."""
    return frozenset(engine.layout.dialect for engine in registry.engines.values())


def catalogued(registry: Registry, dialects: Collection[str]) -> Iterator[Family]:
    """The families of the catalogue that engines of ``dialects`` can have."""
    places: dict[str, dict[str, SlotAssignment]] = {}
    for layout in (layout for name, layout in registry.layouts.items() if name in dialects):
        for placed in layout.assignments:
            places.setdefault(placed.row.name, {})[layout.dialect] = placed
    for name, found_places in places.items():
        if registry.is_exposed(name):
            row = next(iter(found_places.values())).row
            yield Family(
                name, row.kind, row.exposed_help, row.own_labels, row.combine, found_places
            )


def described(registry: Registry) -> Iterator[Family]:
    """Those that engines described themselves."""
    if not registry.quota.families:
        return
    sampled = {name for layout in registry.layouts.values() for name in layout.sampled_rows}
    seen: set[str] = set()
    for engine in registry.engines.values():
        for found in engine.open_families.values():
            if found.name in sampled or found.name in seen:
                continue
            seen.add(found.name)
            if registry.is_exposed(found.name):
                yield Family(found.name, found.kind, found.help, found.labels)


def owns(family: str, kind: Kind, names: Collection[str]) -> bool:
    """Whether one of the sample ``names`` belongs to ``family``, as in ``name[]``."""
    if family in names:
        return True
    if kind in OBSERVED:
        return any(f"{family}_{suffix}" in names for suffix in ("bucket", "count", "sum"))
    return kind == "counter" and family.removesuffix("_total") in names


def showing(registry: Registry, dialect: str, placed: SlotAssignment) -> list[Engine]:
    """The engines that may have samples of a dialect's row: asked once, not per engine."""
    return having(present(registry, dialect, *asked(registry, dialect, placed)), placed)


def asked(registry: Registry, dialect: str, placed: SlotAssignment) -> tuple[bool, str]:
    """Whether engines must be alive to show a row, and the option that they must have."""
    row = placed.row
    hidden = row.feature if row.name in registry.layouts[dialect].gated else ""
    return row.kind == "gauge", hidden


def present(registry: Registry, dialect: str, live: bool, feature: str = "") -> list[Engine]:
    """The engines of a dialect, or of all, that are there, alive where wanted, with this option where any."""
    engines = registry.engines.values()
    if dialect:
        layout = registry.layouts[dialect]
        found = [engine for engine in engines if engine.layout is layout and not engine.absent]
    else:
        found = [engine for engine in engines if not engine.absent]
    if live:
        found = [engine for engine in found if engine.live]
    if feature:
        found = [engine for engine in found if feature in engine.features]
    return found


def having(engines: list[Engine], placed: SlotAssignment) -> list[Engine]:
    """Those of ``engines`` that have children of a row."""
    match placed.storage:
        case "sampled":
            name = stored(placed)
            return [engine for engine in engines if name in engine.open_families]
        case "keyed":
            slot = placed.slots[0]
            if placed.row.name == SLO_REQUESTS:
                for engine in engines:
                    # Those that have some are settled when they are copied.
                    if not engine.keyed[slot]:
                        update_availability(engine)
            return [engine for engine in engines if engine.keyed[slot]]
    return engines


def stored(placed: SlotAssignment) -> str:
    """The name under which an engine keeps a family that Samples items feed."""
    source = placed.row.source
    return source.name if isinstance(source, Alias) else placed.row.name


def labels_with(engine: Engine, family: Family, names: Key, key: Key) -> dict[str, str]:
    """All labels of one child whose own ones are ``names``."""
    placed = family.places.get(engine.layout.dialect)
    labels = dict(zip(names, key, strict=True))
    if placed is None:
        return {**labels, **engine.labels}
    if placed.row.omits_empty_labels:
        labels = {name: value for name, value in labels.items() if value}
    shown = {n: v for n, v in engine.labels.items() if _is_shown(placed, n)}
    return {**labels, **shown}


def _is_shown(placed: SlotAssignment, label: str) -> bool:
    return label in placed.row.labels or label not in ENGINE_LABELS


def is_shared(family: Family) -> bool:
    """Whether engines can have the same labels here, so that their series must be combined."""
    rows = [placed.row for placed in family.places.values()]
    return any(not set(row.shared) <= set(row.labels) for row in rows)
