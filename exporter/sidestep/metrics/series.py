"""Readers of single series of an engine, by family and label value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.dialect import ALL_VALUES, Series
from sidestep.catalog.layout import Layout, SlotAssignment
from sidestep.catalog.row import Computed
from sidestep.metrics.computed_gauges import computed_gauge
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Number
from sidestep.metrics.histogram import Histogram

NumberReader = Callable[[Engine], Number | None]
Buckets = tuple[Bounds, Sequence[int]]
"""Upper bounds without +Inf, and counts per bucket, not cumulative, the last for +Inf."""
BucketReader = Callable[[Engine], Buckets | None]


def number_reader(layout: Layout, series: Series | None) -> NumberReader:
    """Return the function that reads ``series`` of engines with ``layout``; None: no sample.

    The number of a histogram is that of its observations.
    """
    if series is None:
        return lambda _: None
    assignment = layout.find(series.family)
    row = assignment.row
    if isinstance(row.source, Computed):
        name = row.source.name
        return lambda engine: computed_gauge(engine, name)
    key = (series.value,) if series.value or row.own_labels else ()
    if assignment.storage == "sampled":
        return lambda engine: _sampled(engine, row.name, key)
    if series.value == ALL_VALUES:
        return lambda engine: _sum(engine.values[slot] for slot in assignment.slots)
    return _slot_reader(assignment, key)


def _slot_reader(assignment: SlotAssignment, key: tuple[str, ...]) -> NumberReader:
    """Return the function that reads the child ``key`` of a row with slots."""
    closed = assignment.row.closed
    slot = assignment.slots[closed.index(key[0]) if closed else 0]
    if assignment.storage == "histogram":
        return lambda engine: _number(engine.histograms[slot])
    if assignment.storage == "keyed":
        return lambda engine: engine.keyed[slot].get(key)
    return lambda engine: engine.values[slot]


def sum_reader(layout: Layout, several: Sequence[Series]) -> NumberReader:
    """Return the function that reads the sum of several series; None: none of them has a sample."""
    readers = [number_reader(layout, series) for series in several]
    if len(readers) == 1:
        return readers[0]
    return lambda engine: _sum(read(engine) for read in readers)


def either_reader(one: NumberReader, other: NumberReader) -> NumberReader:
    """Return the function that reads ``other`` where ``one`` has no sample."""

    def reader(engine: Engine) -> Number | None:
        found = one(engine)
        return other(engine) if found is None else found

    return reader


@functools.cache
def request_readers(layout: Layout) -> tuple[NumberReader, NumberReader]:
    """Return the functions that read how many requests run, and how many wait."""
    key = layout.tables.key_series
    running, waiting, load_running, load_waiting = (
        number_reader(layout, series)
        for series in (key.running, key.waiting, key.load_running, key.load_waiting)
    )
    return either_reader(running, load_running), either_reader(waiting, load_waiting)


def requests(engine: Engine) -> Number:
    """Return how many requests run or wait by the engine's gauges; 0 where it has none."""
    return sum(read(engine) or 0 for read in request_readers(engine.layout))


def bucket_reader(layout: Layout, family: str | None) -> BucketReader:
    """Return the function that reads the buckets of a histogram, summed over its labels.

    It returns None where there is no sample, and may return the counts that the engine goes on
    changing.
    """
    if family is None:
        return lambda _: None
    assignment = layout.find(family)
    if assignment.storage == "histogram":
        slots = assignment.slots
        return lambda engine: _buckets(engine.histograms[slot] for slot in slots)
    name = assignment.row.name

    def read(engine: Engine) -> Buckets | None:
        found = engine.open_families.get(name)
        return None if found is None else _buckets(found.children.values())

    return read


def _buckets(children: Iterable[Number | Histogram | None]) -> Buckets | None:
    # The children of one family have the same bounds.
    found = [child for child in children if isinstance(child, Histogram)]
    if not found:
        return None
    if len(found) == 1:
        return found[0].bounds, found[0].counts
    return found[0].bounds, [*map(sum, zip(*(each.counts for each in found), strict=True))]


def _sampled(engine: Engine, family: str, key: tuple[str, ...]) -> Number | None:
    found = engine.open_families.get(family)
    if found is None:
        return None
    if ALL_VALUES in key:
        return sum(_number(child) or 0 for child in found.children.values())
    return _number(found.children.get(key))


def _sum(numbers: Iterable[Number | None]) -> Number | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _number(child: Number | Histogram | None) -> Number | None:
    return sum(child.counts) if isinstance(child, Histogram) else child
