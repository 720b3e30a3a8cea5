"""Snapshot of a family: the values of all engines at one moment, read afterwards.

Copying takes a fraction of a microsecond per series, writing takes longer. The writer can yield to
the event loop between series, and the family is still of one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TypeVar

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import Computed, Constant, Info
from sidestep.catalog.slo import SLO_REQUESTS
from sidestep.exposition.families import Family
from sidestep.exposition.selection import Selections, stored_name
from sidestep.metrics.availability import update_availability
from sidestep.metrics.computed_gauges import computed_gauge
from sidestep.metrics.engine import Engine, Key, Number
from sidestep.metrics.histogram import Histogram, State
from sidestep.metrics.registry import Registry

HistogramCopy = TypeVar("HistogramCopy")
"""Copy of what a page format needs of a histogram."""
Children = Sequence[tuple[Key, Number | HistogramCopy]]
"""Values by own label values."""
EngineSnapshot = tuple[Engine, Key, Children[HistogramCopy]]
"""One engine's part of a family: engine, own label names, and values."""
Values = Sequence[Number | HistogramCopy | None]
"""Values of slots, engine by engine; None: no sample."""

NUMBERS = frozenset({"scalars", "computed", "constant"})
"""``SlotAssignment.storage`` of rows that have a number or nothing for each of their label values."""


def histogram_state(histogram: Histogram) -> State:
    """Copy what a text page needs of a histogram."""
    return histogram.bounds, histogram.counts.copy(), histogram.sum, histogram.exemplars


def snapshot_family(
    registry: Registry, family: Family, copy: Callable[[Histogram], HistogramCopy]
) -> Iterator[EngineSnapshot[HistogramCopy]]:
    """Copy the values that all engines have of ``family`` now; yield them engine by engine."""
    found = [
        snapshot_engines(family, placed, engines, copy)
        for placed, engines in Selections(registry).parts(family)
    ]
    return (one for snapshots in found for one in snapshots)


def snapshot_engines(
    family: Family,
    placed: SlotAssignment | None,
    engines: Sequence[Engine],
    copy: Callable[[Histogram], HistogramCopy],
) -> Iterator[EngineSnapshot[HistogramCopy]]:
    """Copy the values that ``engines`` have of the family now; yield them engine by engine.

    Args:
        family: The family.
        placed: The slot assignment of the engines' dialect; None for a self-described family.
        engines: Engines of that dialect.
        copy: Copies what the page format needs of a histogram.
    """
    if placed is not None and is_in_slots(placed):
        return slot_snapshots(placed, engines, slot_values(placed, engines, copy))
    if placed is not None and placed.row.name == SLO_REQUESTS:
        for engine in engines:
            update_availability(engine)
    found = [(engine, *_stored(engine, family, placed, copy)) for engine in engines]
    return ((engine, names, [*values.items()]) for engine, names, values in found)


def is_in_slots(placed: SlotAssignment) -> bool:
    """Return whether ``slot_values`` has the values of the row."""
    return placed.storage in NUMBERS or placed.storage == "histogram"


def slot_values(
    placed: SlotAssignment, engines: Sequence[Engine], copy: Callable[[Histogram], HistogramCopy]
) -> Values[HistogramCopy]:
    """Copy the values of a row in slots, in the exposed unit."""
    row, slots = placed.row, placed.slots
    if placed.storage == "histogram":
        return [
            None if one is None else copy(one)
            for engine in engines
            for histograms in (engine.histograms,)
            for slot in slots
            for one in (histograms[slot],)
        ]
    values: list[Number | None]
    if isinstance(row.source, Computed):
        values = [computed_gauge(engine, row.source.name) for engine in engines]
    elif isinstance(row.source, Constant):
        values = [row.source.value] * len(engines)
    elif len(slots) == 1:
        slot = slots[0]
        values = [engine.values[slot] for engine in engines]
    else:
        chosen = itemgetter(*slots)
        values = [value for engine in engines for value in chosen(engine.values)]
    if row.unit_divisor != 1:
        return [None if value is None else value / row.unit_divisor for value in values]
    return values


def slot_snapshots(
    placed: SlotAssignment, engines: Sequence[Engine], values: Values[HistogramCopy]
) -> Iterator[EngineSnapshot[HistogramCopy]]:
    """Yield the ``values`` of a row in slots, engine by engine."""
    names, keys = placed.row.own_labels, placed.label_values
    for start, engine in zip(range(0, len(values), len(keys)), engines, strict=True):
        some = zip(keys, values[start : start + len(keys)], strict=True)
        yield engine, names, [(key, value) for key, value in some if value is not None]


def _stored(
    engine: Engine,
    family: Family,
    placed: SlotAssignment | None,
    copy: Callable[[Histogram], HistogramCopy],
) -> tuple[Key, Mapping[Key, Number | HistogramCopy]]:
    """Return own label names, and a copy of the values that are not in slots."""
    if placed is not None:
        row = placed.row
        if placed.storage == "keyed":
            values = engine.keyed[placed.slots[0]]
            if row.unit_divisor == 1:
                return row.own_labels, values.copy()
            return row.own_labels, {key: value / row.unit_divisor for key, value in values.items()}
        if isinstance(row.source, Info):
            # The next Hello replaces the labels.
            labels = engine.info.get(row.source.name)
            return ((), {}) if labels is None else (tuple(labels), {tuple(labels.values()): 1})
    found = engine.open_families.get(family.name if placed is None else stored_name(placed))
    # Two engines may describe one name differently; the page shows the first form. The senders of
    # a catalogued family may have labels besides the row's.
    if found is None or (
        placed is None and (found.kind, found.labels) != (family.kind, family.labels)
    ):
        return (), {}
    return found.labels, {
        key: copy(value) if isinstance(value, Histogram) else value
        for key, value in found.children.items()
    }
