"""Samples of what the live page shows of an engine, and their differences over time."""

from __future__ import annotations

import dataclasses
import functools
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.dialect import Series
from sidestep.catalog.layout import Layout
from sidestep.catalog.row import Row
from sidestep.metrics.computed_gauges import computed_gauge
from sidestep.metrics.engine import Engine
from sidestep.metrics.series import (
    BucketReader,
    NumberReader,
    bucket_reader,
    either_reader,
    number_reader,
    request_readers,
    sum_reader,
)

GAUGES = ("running", "waiting", "kv_cache_usage", "saturation")
COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "preemptions",
    "looked_up",
    "found",
    "finished",
    "aborted",
)
LATENCIES = ("ttft", "inter_token", "e2e")
HISTOGRAMS = (*LATENCIES, "kv_lifetime", "kv_idle", "kv_reuse_gap")

Numbers = Sequence[float]
Counts = Sequence[float] | None
"""Counts per bucket, not cumulative, the last for +Inf; None: no sample."""


class EngineSample(NamedTuple):
    """An engine's series at one time.

    Attributes:
        at: Monotonic time, in seconds.
        gauges: One number for each of ``GAUGES``; NaN: no sample.
        counters: Totals, likewise for ``COUNTERS``.
        bounds: Upper bounds for each of ``HISTOGRAMS``; empty where there is no sample.
        counts: Total observations per bucket, likewise.
        caught_up_at: The engine's ``caught_up_at``; totals compare only with those of the same one.
    """

    at: float
    gauges: Numbers
    counters: Numbers
    bounds: Sequence[Bounds]
    counts: Sequence[Counts]
    caught_up_at: float = 0.0

    def packed(self, last: EngineSample | None) -> EngineSample:
        """Return a compact copy; it shares what has not changed since ``last``."""
        if last is None:
            last = EngineSample(0.0, (), (), (), (None,) * len(self.counts))
        return EngineSample(
            self.at,
            _shared(array("d", self.gauges), last.gauges),
            _shared(array("d", self.counters), last.counters),
            last.bounds if self.bounds == last.bounds else self.bounds,
            tuple(
                None if counts is None else _shared(packed_counts(counts), before)
                for counts, before in zip(self.counts, last.counts, strict=True)
            ),
            self.caught_up_at,
        )


def packed_counts(counts: Numbers) -> array[Any]:
    """Return counts in four bytes each, or in eight if one does not fit."""
    try:
        return array("I", counts)
    except (OverflowError, TypeError):
        return array("d", counts)


def _shared(made: array[Any], before: Counts) -> Numbers:
    """Return ``before`` if it is the same."""
    # As bytes, since a NaN equals no other.
    is_same = isinstance(before, array) and made.tobytes() == before.tobytes()
    return before if is_same and before is not None else made


class Readers:
    """Readers of key numbers and a sample's series, for all engines with one layout."""

    def __init__(self, layout: Layout) -> None:
        tables = layout.tables
        key = tables.key_series
        self.running = None if key.running is None else layout.find(key.running.family).row
        self.key: Mapping[str, NumberReader] = {
            field.name: number_reader(layout, series)
            for field in dataclasses.fields(key)
            if isinstance(series := getattr(key, field.name), Series)
        }
        """Readers of the numbers that are single series."""
        single = (key.running, key.waiting, key.prompt, key.generation, key.load_running)
        named = [*filter(None, single), *key.finished, *key.aborted, *key.looked_up]
        families = {**tables.latencies, **key.kv_blocks}
        self.rows = [
            layout.find(name).row
            for name in dict.fromkeys(
                (*(series.family for series in named), *map(families.get, HISTOGRAMS))
            )
            if name is not None
        ]
        """An engine is shown if it can have one of these rows."""
        used, capacity, usage = (
            number_reader(layout, series)
            for series in (key.kv_tokens, key.kv_capacity, key.kv_cache_usage)
        )
        self.gauges: list[NumberReader] = [
            *request_readers(layout),
            either_reader(usage, _ratio(used, capacity)),
        ]
        self.counters: list[NumberReader] = [
            *(
                number_reader(layout, series)
                for series in (key.prompt, key.generation, key.preemptions)
            ),
            *(
                sum_reader(layout, several)
                for several in (key.looked_up, key.found, key.finished, key.aborted)
            ),
        ]
        self.buckets: list[BucketReader] = [
            bucket_reader(layout, families.get(name)) for name in HISTOGRAMS
        ]

    @staticmethod
    @functools.cache
    def of(layout: Layout) -> Readers:
        """Return the readers of a layout, made once."""
        return Readers(layout)


def _ratio(part: NumberReader, whole: NumberReader) -> NumberReader:
    """Return the function that divides one number by another; None: one of them is not known."""

    def reader(engine: Engine) -> float | None:
        divisor, dividend = whole(engine), part(engine)
        return dividend / divisor if divisor and dividend is not None else None

    return reader


def can_have(engine: Engine, row: Row) -> bool:
    """Return whether the engine has the option and the labels of ``row``."""
    is_enabled = not row.feature or row.feature in engine.description.features
    return is_enabled and engine.labels.keys() >= set(row.shared)


def is_shown(engine: Engine) -> bool:
    """Return whether the engine can have any of a sample's series."""
    return any(can_have(engine, row) for row in Readers.of(engine.layout).rows)


def read(engine: Engine, now: float) -> EngineSample:
    """Return the engine's sample at ``now``; its counts can be the engine's own lists, which change later.

    An engine that has stopped, or is silent, has no gauges: the last ones are out of date.
    """
    readers = Readers.of(engine.layout)
    if engine.live and engine.is_up:
        saturation = computed_gauge(engine, "saturation")
        gauges = [_number(reader(engine)) for reader in readers.gauges]
        gauges.append(_number(saturation))
    else:
        gauges = [math.nan] * len(GAUGES)
    buckets = [reader(engine) for reader in readers.buckets]
    return EngineSample(
        now,
        gauges,
        [_number(reader(engine)) for reader in readers.counters],
        tuple(() if found is None else found[0] for found in buckets),
        tuple(None if found is None else found[1] for found in buckets),
        engine.feeds.caught_up_at,
    )


def _number(found: float | None) -> float:
    return math.nan if found is None else found


class Increase(NamedTuple):
    """The increase from one sample to another.

    Attributes:
        seconds: The time between them.
        counters: One number for each of ``COUNTERS``; NaN: not known.
        bounds: Upper bounds for each of ``HISTOGRAMS``.
        counts: Observations per bucket, likewise; None: not known.
    """

    seconds: float
    counters: Numbers
    bounds: Sequence[Bounds]
    counts: Sequence[Counts]


def increase(
    samples: Sequence[EngineSample], histograms: Sequence[str] = HISTOGRAMS
) -> Increase | None:
    """Return what was counted from the first sample to the last; None for fewer than two.

    A series that begins later counts from its first sample on, as in PromQL, and so does a
    histogram whose bounds have changed. Nothing is known if a backlog was delivered in between: it
    has been counted while the exporter was away.

    Args:
        samples: Of one engine, the oldest first.
        histograms: The first of ``HISTOGRAMS``, which are to be read.
    """
    if len(samples) <= 1:
        return None
    first, last = samples[0], samples[-1]
    if first.caught_up_at != last.caught_up_at:
        unknown = [math.nan] * len(COUNTERS), last.bounds, [None] * len(histograms)
        return Increase(last.at - first.at, *unknown)
    counters = [now - then for now, then in zip(last.counters, first.counters, strict=True)]
    if math.isnan(sum(counters)):
        for index, found in enumerate(counters):
            if math.isnan(found):
                counters[index] = _late_increase([each.counters[index] for each in samples])
    return Increase(
        last.at - first.at,
        counters,
        last.bounds,
        [_counted(samples, index) for index in range(len(histograms))],
    )


def zeroed(before: EngineSample, now: EngineSample | Increase) -> EngineSample:
    """Return ``before`` with totals of 0 for series that have begun since.

    So has a histogram whose bounds have changed.
    """
    counters = array("d", before.counters)
    for index, number in enumerate(now.counters):
        if math.isnan(counters[index]) and not math.isnan(number):
            counters[index] = 0.0
    bounds, counts = [*before.bounds], [*before.counts]
    for index, found in enumerate(now.counts):
        if found is not None and bounds[index] != now.bounds[index]:
            bounds[index] = now.bounds[index]
            counts[index] = packed_counts([0] * len(found))
    return before._replace(counters=counters, bounds=tuple(bounds), counts=tuple(counts))


def _late_increase(numbers: Sequence[float]) -> float:
    known = [number for number in numbers[:-1] if not math.isnan(number)]
    return numbers[-1] - known[0] if known else math.nan


def _counted(samples: Sequence[EngineSample], index: int) -> Counts:
    last = samples[-1]
    bounds, counts = last.bounds[index], last.counts[index]
    if counts is None:
        return None
    # The loop ends at the first sample, except for the minute after a change of bounds.
    for sample in samples[:-1]:
        before = sample.counts[index]
        if before is not None and sample.bounds[index] == bounds:
            return [now - then for now, then in zip(counts, before, strict=True)]
    return None
