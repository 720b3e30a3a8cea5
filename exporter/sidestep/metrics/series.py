"""Readers of single series of an engine, by family and label value."""

from __future__ import annotations

from collections.abc import Callable

from sidestep.catalog.dialect import ALL_VALUES, Series
from sidestep.catalog.layout import Layout
from sidestep.catalog.model import Computed
from sidestep.metrics.computed_gauges import computed_gauge
from sidestep.metrics.engine import Engine, Number
from sidestep.metrics.histogram import Histogram

NumberReader = Callable[[Engine], Number | None]


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
    key = (series.value,) if row.own_labels else ()
    if assignment.storage == "sampled":
        return lambda engine: _sampled(engine, row.name, key)
    index = row.closed.index(series.value) if row.closed else 0
    slot = assignment.slots[index]
    if assignment.storage == "histogram":
        return lambda engine: _number(engine.histograms[slot])
    if assignment.storage == "keyed":
        return lambda engine: engine.keyed[slot].get(key)
    return lambda engine: engine.values[slot]


def _sampled(engine: Engine, family: str, key: tuple[str, ...]) -> Number | None:
    found = engine.open_families.get(family)
    if found is None:
        return None
    if ALL_VALUES in key:
        return sum(_number(child) or 0 for child in found.children.values())
    return _number(found.children.get(key))


def _number(child: Number | Histogram | None) -> Number | None:
    return sum(child.counts) if isinstance(child, Histogram) else child
