"""The charts of a history: numbers and heat maps by interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sidestep.catalog.buckets import Bounds
from sidestep.exposition.live.answers import WINDOW, HeatMap, Percentiles
from sidestep.exposition.live.samples import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LATENCIES,
    Counts,
    EngineSample,
    Increase,
    increase,
)
from sidestep.metrics.quantile import histogram_quantile

SERIES = (
    *GAUGES,
    "prompt_tokens_per_second",
    "generation_tokens_per_second",
    "prefix_hit_rate",
    "finished",
    "aborted",
    "preemptions",
    *(f"{name}_{quantile}" for name in LATENCIES for quantile in ("p50", "p95", "p99")),
)


def known(number: float) -> float | None:
    """Return a number; None for NaN."""
    return None if math.isnan(number) else number


def counted(one: Increase) -> dict[str, float | None]:
    """Return the numbers of an ``EngineRow`` that follow from what was counted, in the order of ``SERIES``."""
    found = dict(zip(COUNTERS, one.counters, strict=True))
    return {
        "prompt_tokens_per_second": known(found["prompt_tokens"] / one.seconds),
        "generation_tokens_per_second": known(found["generation_tokens"] / one.seconds),
        "prefix_hit_rate": hit_rate(one),
        **{name: known(found[name]) for name in ("finished", "aborted", "preemptions")},
    }


def hit_rate(one: Increase) -> float | None:
    """Return the share of the looked-up tokens that were found; None without lookups."""
    looked_up, found = (one.counters[COUNTERS.index(name)] for name in ("looked_up", "found"))
    return known(found / looked_up) if looked_up > 0 else None


def percentiles(bounds: Bounds, counts: Counts) -> Percentiles | None:
    """Return the percentiles of a histogram; None without observations."""
    if counts is None or not (count := sum(counts)):
        return None
    p50, p95, p99 = (histogram_quantile(q, bounds, counts) for q in (0.5, 0.95, 0.99))
    if p50 is None or p95 is None or p99 is None:
        return None
    return Percentiles(p50, p95, p99, count)


class Point(NamedTuple):
    """One interval.

    Attributes:
        at: Monotonic time of its end.
        numbers: One for each of ``SERIES``.
        counts: Observations per bucket for each of ``HISTOGRAMS``; None: not known.
    """

    at: float
    numbers: Sequence[float | None]
    counts: Sequence[Counts]


def charts(samples: Sequence[EngineSample]) -> tuple[list[Point], list[HeatMap]]:
    """Return the intervals between ``samples``, and their heat maps."""
    found = [*points(samples)]
    return found, [*heatmaps(samples, found)]


def points(samples: Sequence[EngineSample]) -> Iterator[Point]:
    """Yield the intervals between ``samples``; percentiles are those of the minute before."""
    start = 0
    for end in range(1, len(samples)):
        last = samples[end]
        while start < end - 1 and (
            samples[start + 1].at <= last.at - WINDOW
            or samples[start].caught_up_at != last.caught_up_at
        ):
            start += 1
        interval = increase(samples[end - 1 : end + 1])
        minute = increase(samples[start : end + 1], LATENCIES)
        if interval is None or minute is None or interval.seconds <= 0:
            continue
        numbers = [*map(known, last.gauges), *counted(interval).values()]
        for bounds, counts in zip(minute.bounds, minute.counts, strict=False):
            found = percentiles(bounds, counts)
            numbers += (None,) * 3 if found is None else (found.p50, found.p95, found.p99)
        current = samples[-1].bounds
        counted_now = [
            counts if last.bounds[index] == current[index] else None
            for index, counts in enumerate(interval.counts)
        ]
        yield Point(last.at, numbers, counted_now)


def heatmaps(samples: Sequence[EngineSample], found: Sequence[Point]) -> Iterator[HeatMap]:
    """Yield the heat maps of the histograms that the last sample has."""
    for index, name in enumerate(HISTOGRAMS):
        bounds = samples[-1].bounds[index] if samples else ()
        if bounds:
            none = [0] * (len(bounds) + 1)
            columns = (point.counts[index] for point in found)
            # Whole numbers are shorter.
            counts = [none if each is None else [*map(int, each)] for each in columns]
            yield HeatMap(name=name, bounds=[*bounds], counts=counts)
