"""Metric families of a scrape, and the labels of their series.

``selection`` finds the engines that have a family, ``family_snapshot`` reads their values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from itertools import chain

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import ENGINE_LABELS, OBSERVED, Combine, Kind
from sidestep.metrics.engine import Engine, Key
from sidestep.metrics.registry import Registry


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One metric family of the page.

    Attributes:
        labels: Own label names, as the first engine that has the family uses them.
        assignments: Slot assignment by dialect; empty for a self-described family.
    """

    name: str
    kind: Kind
    help: str
    labels: Key
    combine: Combine = "sum"
    assignments: Mapping[str, SlotAssignment] = dataclasses.field(default_factory=dict)


def families(registry: Registry, names: Collection[str] = ()) -> Iterator[Family]:
    """Yield the families in page order: all, or those that own one of the sample ``names``.

    Families of dialects that no engine uses are left out: they cannot have samples.
    """
    for family in chain(
        catalogue_families(registry, active_dialects(registry)), self_described_families(registry)
    ):
        if not names or has_sample_name(family.name, family.kind, names):
            yield family


def active_dialects(registry: Registry) -> frozenset[str]:
    """Return the dialects of the engines in the registry."""
    return frozenset(engine.layout.dialect for engine in registry.engines.values())


def catalogue_families(registry: Registry, dialects: Collection[str]) -> Iterator[Family]:
    """Yield the families of the catalogue that engines of ``dialects`` can have."""
    assignments: dict[str, dict[str, SlotAssignment]] = {}
    for layout in (layout for name, layout in registry.layouts.items() if name in dialects):
        for placed in layout.assignments:
            assignments.setdefault(placed.row.name, {})[layout.dialect] = placed
    for name, found_assignments in assignments.items():
        if registry.is_exposed(name):
            row = next(iter(found_assignments.values())).row
            yield Family(
                name, row.kind, row.exposed_help, row.own_labels, row.combine, found_assignments
            )


def self_described_families(registry: Registry) -> Iterator[Family]:
    """Yield the families that engines described themselves."""
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


def has_sample_name(family: str, kind: Kind, names: Collection[str]) -> bool:
    """Return whether one of the sample ``names`` belongs to ``family``, as in ``name[]``."""
    if family in names:
        return True
    if kind in OBSERVED:
        return any(f"{family}_{suffix}" in names for suffix in ("bucket", "count", "sum"))
    return kind == "counter" and family.removesuffix("_total") in names


def series_labels(engine: Engine, family: Family, names: Key, key: Key) -> dict[str, str]:
    """Return all labels of one series; ``names`` and ``key`` are its own label names and values."""
    placed = family.assignments.get(engine.layout.dialect)
    labels = dict(zip(names, key, strict=True))
    if placed is None:
        return {**labels, **engine.labels}
    if placed.row.omits_empty_labels:
        labels = {name: value for name, value in labels.items() if value}
    shown = {n: v for n, v in engine.labels.items() if _has_label(placed, n)}
    return {**labels, **shown}


def _has_label(placed: SlotAssignment, label: str) -> bool:
    return label in placed.row.labels or label not in ENGINE_LABELS


def is_shared(family: Family) -> bool:
    """Return whether engines can have equal labels, so that their series need aggregation."""
    rows = [placed.row for placed in family.assignments.values()]
    return any(not set(row.shared) <= set(row.labels) for row in rows)
