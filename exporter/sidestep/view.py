"""What a scrape sees: families, and per family the children of all engines.

Where an engine keeps a row's series. JSON and combined families read through
it; the text page reads the two common places itself, for speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from sidestep.availability import settle
from sidestep.catalogue.model import (
    ENGINE_LABELS,
    OBSERVED,
    Combine,
    Constant,
    Info,
    Kind,
    Reading,
    Row,
    Same,
)
from sidestep.catalogue.objectives import REQUESTS
from sidestep.combining import combined_histograms, combined_numbers, combined_states
from sidestep.engine import Engine, Key, Number
from sidestep.histogram import Histogram, State
from sidestep.plan import Placed
from sidestep.readings import reading
from sidestep.registry import Registry

Child = tuple[Key, Number | Histogram]
"""Own label values, and the series."""


class Copy(NamedTuple):
    """What one engine has of a family at one moment: its look, own label names, and children."""

    engine: Engine
    looks: int
    names: Key
    children: Sequence[tuple[Key, Number | State]]


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
    places: Mapping[str, Placed] = dataclasses.field(default_factory=dict)


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
    places: dict[str, dict[str, Placed]] = {}
    for layout in (layout for name, layout in registry.layouts.items() if name in dialects):
        for placed in layout.placed:
            places.setdefault(placed.row.name, {})[layout.dialect] = placed
    for name, found_places in places.items():
        if registry.shows(name):
            row = next(iter(found_places.values())).row
            yield Family(
                name, row.kind, row.exposed_help, row.own_labels, row.combine, found_places
            )


def described(registry: Registry) -> Iterator[Family]:
    """Those that engines described themselves."""
    if not registry.open_families:
        return
    sampled = {name for layout in registry.layouts.values() for name in layout.sampled}
    seen: set[str] = set()
    for engine in registry.engines.values():
        for found in engine.open.values():
            if found.name in sampled or found.name in seen:
                continue
            seen.add(found.name)
            if registry.shows(found.name):
                yield Family(found.name, found.kind, found.help, found.labels)


def owns(family: str, kind: Kind, names: Collection[str]) -> bool:
    """Whether one of the sample ``names`` belongs to ``family``, as in ``name[]``."""
    if family in names:
        return True
    if kind in OBSERVED:
        return any(f"{family}_{suffix}" in names for suffix in ("bucket", "count", "sum"))
    return kind == "counter" and family.removesuffix("_total") in names


def showing(registry: Registry, dialect: str, placed: Placed) -> list[Engine]:
    """The engines that may have samples of a dialect's row: asked once, not per engine."""
    return having(present(registry, dialect, *asked(registry, dialect, placed)), placed)


def asked(registry: Registry, dialect: str, placed: Placed) -> tuple[bool, str]:
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


def having(engines: list[Engine], placed: Placed) -> list[Engine]:
    """Those of ``engines`` that have children of a row."""
    match placed.where:
        case "sampled":
            name = stored(placed)
            return [engine for engine in engines if name in engine.open]
        case "keyed":
            slot = placed.slots[0]
            if placed.row.name == REQUESTS:
                for engine in engines:
                    settle(engine)
            return [engine for engine in engines if engine.keyed[slot]]
    return engines


def children(engine: Engine, family: Family) -> Iterable[Child]:
    """The series of ``engine`` in ``family``; none where it has no sample yet."""
    if engine.absent or (family.kind == "gauge" and not engine.live):
        return ()
    return stored_children(engine, family)


def stored_children(engine: Engine, family: Family) -> Iterable[Child]:  # noqa: PLR0911
    """Likewise, also of one that is not shown now."""
    if not family.places:
        found = engine.open.get(family.name)
        # Two engines may describe one name differently; the first one's form stands.
        if found is None or (found.kind, found.labels) != (family.kind, family.labels):
            return ()
        return found.children.items()
    placed = family.places.get(engine.layout.dialect)
    if placed is None:
        return ()
    if placed.where == "sampled":
        found = engine.open.get(stored(placed))
        return () if found is None else found.children.items()
    if placed.row.name in engine.layout.gated and placed.row.feature not in engine.features:
        return ()
    if placed.where == "scalars":
        found_values = zip(placed.values_of_label, placed.slots, strict=True)
        values = engine.values
        found_scalars = [(key, v) for key, slot in found_values if (v := values[slot]) is not None]
        return _in_unit(found_scalars, placed.row)
    if placed.where == "histogram":
        found_histograms = zip(placed.values_of_label, placed.slots, strict=True)
        histograms = engine.histograms
        return [(key, h) for key, slot in found_histograms if (h := histograms[slot]) is not None]
    if placed.where == "keyed":
        if placed.row.name == REQUESTS:
            settle(engine)
        return _in_unit(engine.keyed[placed.slots[0]].items(), placed.row)
    return _computed(engine, placed)


def copy_of(engine: Engine, family: Family) -> Copy:
    """What ``engine`` has of ``family`` now, also where it is not shown."""
    found: list[tuple[Key, Number | State]] = [
        (key, value.state if isinstance(value, Histogram) else value)
        for key, value in stored_children(engine, family)
    ]
    return Copy(engine, engine.looks, own_names(engine, family), found)


def copies(registry: Registry, family: Family) -> list[Copy]:
    """What all engines show of ``family`` now."""
    found: list[Engine] = []
    if not family.places:
        everyone = present(registry, "", live=family.kind == "gauge")
        found = [engine for engine in everyone if family.name in engine.open]
    for dialect, placed in family.places.items():
        found += showing(registry, dialect, placed)
    return [copy_of(engine, family) for engine in found]


def combined_of(
    family: Family, found: Iterable[Copy]
) -> Iterator[tuple[dict[str, str], Number | State] | None]:
    """What all engines have of ``family``, one a label set; None where a turn may be due."""
    groups: dict[tuple[tuple[str, str], ...], list[Number | State]] = {}
    for engine, _, names, children in found:
        for key, value in children:
            labels = labels_with(engine, family, names, key)
            groups.setdefault(tuple(sorted(labels.items())), []).append(value)
            yield None
    for pairs, values in groups.items():
        states = [value for value in values if isinstance(value, tuple)]
        numbers = [value for value in values if not isinstance(value, tuple)]
        one = combined_states(states) if states else combined_numbers(numbers, family.combine)
        yield dict(pairs), one


def _in_unit(found: Iterable[tuple[Key, Number]], row: Row) -> Iterable[Child]:
    return found if row.per == 1 else [(key, value / row.per) for key, value in found]


def _computed(engine: Engine, placed: Placed) -> Iterable[Child]:
    source = placed.row.source
    if isinstance(source, Info):
        return [((), 1)] if source.name in engine.info else ()
    (value,) = read_values(placed, (engine,))
    return () if value is None else [((), value)]


def read_values(placed: Placed, engines: Sequence[Engine]) -> list[Number | None]:
    """What a row has for each of ``engines`` that is computed for a page, or always the same."""
    source = placed.row.source
    if isinstance(source, Reading):
        return [reading(engine, source.name) for engine in engines]
    assert isinstance(source, Constant)
    return [source.value] * len(engines)


def stored(placed: Placed) -> str:
    """The name under which an engine keeps a family that Samples items feed."""
    source = placed.row.source
    return source.name if isinstance(source, Same) else placed.row.name


def own_names(engine: Engine, family: Family) -> Key:
    """Label names that tell ``engine``'s children apart."""
    placed = family.places.get(engine.layout.dialect)
    if placed is None:
        return family.labels
    if placed.where == "sampled" and (found := engine.open.get(stored(placed))) is not None:
        # Its sender may have labels beside the row's.
        return found.labels
    return placed.row.own_labels


def labels_of(engine: Engine, family: Family, key: Key) -> dict[str, str]:
    """All labels of one child."""
    return labels_with(engine, family, own_names(engine, family), key)


def labels_with(engine: Engine, family: Family, names: Key, key: Key) -> dict[str, str]:
    """All labels of one child whose own ones are ``names``."""
    placed = family.places.get(engine.layout.dialect)
    labels = dict(zip(names, key, strict=True))
    if placed is None:
        return {**labels, **engine.labels}
    if placed.row.unless_empty:
        labels = {name: value for name, value in labels.items() if value}
    shown = {n: v for n, v in engine.labels.items() if _is_shown(placed, n)}
    match placed.row.source:
        case Info(name):
            return {**engine.info.get(name, {}), **labels, **shown}
    return {**labels, **shown}


def _is_shown(placed: Placed, label: str) -> bool:
    return label in placed.row.labels or label not in ENGINE_LABELS


def is_shared(family: Family) -> bool:
    """Whether engines can have the same labels here, so that their series must be combined."""
    rows = [placed.row for placed in family.places.values()]
    return any(not set(row.shared) <= set(row.labels) for row in rows)


def combined(registry: Registry, family: Family) -> list[tuple[dict[str, str], Number | Histogram]]:
    """The children of all engines, one a label set, combined by the family's rule."""
    groups: dict[tuple[tuple[str, str], ...], list[Number | Histogram]] = {}
    for engine in registry.engines.values():
        for key, value in children(engine, family):
            labels = tuple(sorted(labels_of(engine, family, key).items()))
            groups.setdefault(labels, []).append(value)
    return [(dict(labels), _combine(values, family.combine)) for labels, values in groups.items()]


def _combine(values: list[Number | Histogram], rule: Combine) -> Number | Histogram:
    histograms = [value for value in values if isinstance(value, Histogram)]
    if histograms:
        return combined_histograms(histograms)
    numbers = [value for value in values if not isinstance(value, Histogram)]
    return combined_numbers(numbers, rule)
