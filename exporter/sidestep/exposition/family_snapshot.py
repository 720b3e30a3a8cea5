"""Snapshot of a family: the values of all engines at one moment, read afterwards.

Copying takes a fraction of a microsecond per series, writing takes longer. The writer can yield to
the event loop between series, and the family is still of one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import TypeVar, cast

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import OBSERVED, Computed, Constant, Info
from sidestep.catalog.slo import SLO_REQUESTS
from sidestep.exposition.aggregate import Aggregator, aggregate_values
from sidestep.exposition.families import (
    Family,
    engines_of_row,
    present_engines,
    series_labels,
    stored_name,
)
from sidestep.metrics.availability import update_availability
from sidestep.metrics.computed_gauges import computed_gauge
from sidestep.metrics.engine import Engine, Key, Number, OpenFamily
from sidestep.metrics.histogram import Histogram, State
from sidestep.metrics.registry import Registry

PER_SLICE = 50
"""Series to aggregate before yielding to the event loop: some microseconds each."""

HistogramCopy = TypeVar("HistogramCopy")
"""Copy of what a page format needs of a histogram."""
Children = Sequence[tuple[Key, Number | HistogramCopy]]
"""Values by own label values."""
EngineSnapshot = tuple[Engine, int, Key, Children[HistogramCopy]]
"""One engine's part of a family: engine, its label version, own label names, and values."""
Labels = tuple[tuple[str, str], ...]
"""Label pairs, sorted by name."""

NUMERIC = frozenset({"scalars", "computed", "constant"})
"""``SlotAssignment.storage`` of rows that have a number or nothing for each of their label values."""


def histogram_state(histogram: Histogram) -> State:
    """Copy what a text page needs of a histogram."""
    return histogram.bounds, histogram.counts.copy(), histogram.sum


def row_numbers(placed: SlotAssignment, engines: Sequence[Engine]) -> list[Number | None]:
    """Return the stored numbers of a ``NUMERIC`` row, engine by engine."""
    slots, source = placed.slots, placed.row.source
    if placed.storage == "scalars":
        if len(slots) == 1:
            slot = slots[0]
            return [engine.values[slot] for engine in engines]
        chosen = itemgetter(*slots)
        return [value for engine in engines for value in chosen(engine.values)]
    if isinstance(source, Computed):
        return [computed_gauge(engine, source.name) for engine in engines]
    assert isinstance(source, Constant)
    return [source.value] * len(engines)


def row_histograms(
    placed: SlotAssignment, engines: Sequence[Engine], copy: Callable[[Histogram], HistogramCopy]
) -> list[HistogramCopy | None]:
    """Return copies of the histograms of a row, engine by engine."""
    slots = placed.slots
    return [
        None if one is None else copy(one)
        for engine in engines
        for histograms in (engine.histograms,)
        for one in [histograms[slot] for slot in slots]
    ]


def snapshot_engines(
    family: Family,
    placed: SlotAssignment | None,
    engines: Sequence[Engine],
    copy: Callable[[Histogram], HistogramCopy],
) -> Iterator[EngineSnapshot[HistogramCopy]]:
    """Copy the values that ``engines`` have of ``family`` now; yield them engine by engine.

    Args:
        family: The family.
        placed: The slot assignment of the engines' dialect; None for a self-described family.
        engines: Engines of that dialect that have the family.
        copy: Copies what the page format needs of a histogram.
    """
    label_versions = [engine.label_version for engine in engines]
    if placed is not None and (placed.storage in NUMERIC or placed.storage == "histogram"):
        values: Sequence[Number | HistogramCopy | None]
        if placed.storage == "histogram":
            values = row_histograms(placed, engines, copy)
        else:
            values = row_numbers(placed, engines)
        return _slot_snapshots(placed, engines, label_versions, values)
    if placed is not None and placed.storage == "keyed":
        if placed.row.name == SLO_REQUESTS:
            for engine in engines:
                update_availability(engine)
        slot = placed.slots[0]
        stored = [engine.keyed[slot].copy() for engine in engines]
        return _keyed_snapshots(placed, engines, label_versions, stored)
    if placed is not None and isinstance(placed.row.source, Info):
        info_name = placed.row.source.name
        return _info_snapshots(
            engines, label_versions, [engine.info.get(info_name) for engine in engines]
        )
    if placed is None:
        return _open_snapshots(
            engines, label_versions, [_open_family(engine, family) for engine in engines], copy
        )
    name = stored_name(placed)
    return _open_snapshots(
        engines, label_versions, [engine.open_families.get(name) for engine in engines], copy
    )


def _slot_snapshots(
    placed: SlotAssignment,
    engines: Sequence[Engine],
    label_versions: Sequence[int],
    values: Sequence[Number | HistogramCopy | None],
) -> Iterator[EngineSnapshot[HistogramCopy]]:
    names, keys, per = placed.row.own_labels, placed.label_values, placed.row.unit_divisor
    width = len(keys)
    for at, (engine, label_version) in enumerate(zip(engines, label_versions, strict=True)):
        some = zip(keys, values[at * width : (at + 1) * width], strict=True)
        children = [(key, value) for key, value in some if value is not None]
        yield engine, label_version, names, children if per == 1 else _scaled(children, per)


def _keyed_snapshots(
    placed: SlotAssignment,
    engines: Sequence[Engine],
    label_versions: Sequence[int],
    values_by_engine: Sequence[Mapping[Key, Number]],
) -> Iterator[EngineSnapshot[HistogramCopy]]:
    names, per = placed.row.own_labels, placed.row.unit_divisor
    for engine, label_version, values in zip(
        engines, label_versions, values_by_engine, strict=True
    ):
        children: Children[HistogramCopy] = [*values.items()]
        yield engine, label_version, names, children if per == 1 else _scaled(children, per)


def _info_snapshots(
    engines: Sequence[Engine],
    label_versions: Sequence[int],
    infos: Sequence[Mapping[str, str] | None],
) -> Iterator[EngineSnapshot[HistogramCopy]]:
    """Yield info metrics: their values are in the labels, which the next Hello replaces."""
    for engine, label_version, labels in zip(engines, label_versions, infos, strict=True):
        if labels is None:
            yield engine, label_version, (), []
        else:
            yield engine, label_version, tuple(labels), [(tuple(labels.values()), 1)]


def _scaled(children: Children[HistogramCopy], per: int) -> Children[HistogramCopy]:
    """Convert stored numbers to the exposed unit; only plain numbers are stored in another unit."""
    return [(k, value / per) for k, value in children if isinstance(value, int | float)]


def _open_family(engine: Engine, family: Family) -> OpenFamily | None:
    """Return the family that ``engine`` described itself, if it has the form of ``family``."""
    found = engine.open_families.get(family.name)
    # Two engines may describe one name differently; the page shows the first form.
    if found is None or (found.kind, found.labels) != (family.kind, family.labels):
        return None
    return found


def _open_snapshots(
    engines: Sequence[Engine],
    label_versions: Sequence[int],
    found: Sequence[OpenFamily | None],
    copy: Callable[[Histogram], HistogramCopy],
) -> Iterator[EngineSnapshot[HistogramCopy]]:
    """Yield families that Samples items feed; their senders may have labels besides the row's."""
    values_by_engine: list[tuple[Key, Mapping[Key, Number | HistogramCopy]]] = []
    for one in found:
        if one is None:
            values_by_engine.append(((), {}))
        elif one.kind in OBSERVED:
            children = one.children.items()
            values_by_engine.append(
                (one.labels, {k: copy(v) for k, v in children if isinstance(v, Histogram)})
            )
        else:
            # All are numbers: a family accepts only samples of its kind.
            values_by_engine.append((one.labels, cast("dict[Key, Number]", one.children.copy())))
    return (
        (engine, label_version, names, [*values.items()])
        for engine, label_version, (names, values) in zip(
            engines, label_versions, values_by_engine, strict=True
        )
    )


def snapshot_family(
    registry: Registry, family: Family, copy: Callable[[Histogram], HistogramCopy]
) -> Iterator[EngineSnapshot[HistogramCopy]]:
    """Copy the values that all engines have of ``family`` now."""
    found: list[Iterator[EngineSnapshot[HistogramCopy]]] = []
    if not family.assignments:
        all_engines = present_engines(registry, "", live=family.kind == "gauge")
        some = [engine for engine in all_engines if family.name in engine.open_families]
        found.append(snapshot_engines(family, None, some, copy))
    for dialect, placed in family.assignments.items():
        found.append(
            snapshot_engines(family, placed, engines_of_row(registry, dialect, placed), copy)
        )
    return chain.from_iterable(found)


def aggregate_snapshot(
    family: Family,
    found: Iterable[EngineSnapshot[HistogramCopy]],
    aggregate: Aggregator[HistogramCopy],
) -> Iterator[tuple[Labels, Number | HistogramCopy] | None]:
    """Yield one series per label set; None asks the caller to yield to the event loop."""
    groups: dict[Labels, list[Number | HistogramCopy]] = {}
    spent = 0
    for engine, _, names, children in found:
        for key, value in children:
            labels = series_labels(engine, family, names, key)
            groups.setdefault(tuple(sorted(labels.items())), []).append(value)
            spent += 1
            if not spent % PER_SLICE:
                yield None
    for pairs, values in groups.items():
        one = yield from aggregate_values(values, family.combine, aggregate)
        yield pairs, one
