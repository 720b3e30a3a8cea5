"""The last ten minutes of an engine or of all as one, within a fixed amount of memory, and their charts."""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from sidestep.catalog.buckets import Bounds
from sidestep.exposition.aggregated_series import common_bounds, rebucketed
from sidestep.exposition.live.answers import WINDOW, HeatMap, Percentiles
from sidestep.exposition.live.samples import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LATENCIES,
    Counts,
    EngineSample,
    Increase,
    Numbers,
    increase,
    zeroed,
)
from sidestep.exposition.live.time_spent import TimeHistory
from sidestep.metrics.engine import Engine

INTERVAL = 5.0
"""Seconds between two samples."""
SPAN = 600.0
"""Seconds that are kept."""
MAX_SAMPLES = int(SPAN / INTERVAL) + 1
MIN_SAMPLES = int(WINDOW / INTERVAL) + 2
MAX_BYTES = 240_000
"""Bytes of an engine's samples. Default bounds need less; with more buckets, fewer samples are kept."""


class SampleHistory:
    """Samples of one engine, the oldest first.

    Attributes:
        engine: The engine; another one with its identity has a history of its own.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine
        self.samples: deque[EngineSample] = deque()
        self.time = TimeHistory(MAX_SAMPLES - 1)

    def append(self, sample: EngineSample) -> None:
        """Add a compact copy of ``sample``, and remove those that are too many or too old."""
        samples = self.samples
        packed = sample.packed(samples[-1] if samples else None)
        samples.append(packed)
        most = min(MAX_SAMPLES, max(MAX_BYTES // _size(packed), MIN_SAMPLES))
        while len(samples) > most:
            samples.popleft()

    def window(self, now: float) -> list[EngineSample]:
        """Return the samples of the last ``WINDOW`` seconds, and the last one before."""
        found: list[EngineSample] = []
        for sample in reversed(self.samples):
            found.append(sample)
            if sample.at <= now - WINDOW:
                break
        return found[::-1]


def _size(sample: EngineSample) -> int:
    """Return the bytes of a sample that shares nothing."""
    parts = [sample.gauges, sample.counters, *(each for each in sample.counts if each is not None)]
    return sum(map(sys.getsizeof, [*parts, sample, sample.counts, sample.at]))


class Merged:
    """Sum of what several engines have counted in the same time."""

    def __init__(self) -> None:
        self._counters: Numbers = [math.nan] * len(COUNTERS)
        self._buckets: list[dict[Bounds, Sequence[float]]] = [{} for _ in HISTOGRAMS]

    def add(self, one: Increase) -> None:
        """Add what one engine has counted."""
        self._counters = [*map(_sum, self._counters, one.counters)]
        for found, bounds, counts in zip(self._buckets, one.bounds, one.counts, strict=False):
            if counts is not None:
                known = found.get(bounds)
                found[bounds] = counts if known is None else [*map(add, known, counts)]

    def total(self) -> Increase:
        """Return the sum; histograms have the bounds that all engines have, which keeps it exact."""
        bounds: list[Bounds] = []
        counts: list[Counts] = []
        for found in self._buckets:
            shared = common_bounds(found) if found else ()
            summed = [
                # Large counts are held as floats.
                each if own == shared else rebucketed(own, [*map(int, each)], shared)
                for own, each in found.items()
            ]
            bounds.append(shared)
            counts.append([*map(sum, zip(*summed, strict=True))] if shared else None)
        return Increase(0.0, self._counters, tuple(bounds), tuple(counts))


class TotalHistory(SampleHistory):
    """Samples of all engines as one, whose totals are the sums of what each has counted since then.

    An engine that is gone stays in the past, and one that has come is not in it.
    """

    def add(self, now: float, gauges: Numbers, added: Increase, *, has_engines: bool) -> None:
        """Add a sample of the gauges of all engines, and of what they have ``added`` since the last one.

        If no engine's increase is known, as while a backlog arrives, rates begin anew at this sample.
        """
        counters, bounds, counts = added.counters, added.bounds, added.counts
        caught_up_at = 0.0
        if self.samples:
            last = self.samples[-1] = zeroed(self.samples[-1], added)
            is_known = any(bounds) or not all(map(math.isnan, counters))
            caught_up_at = last.caught_up_at if is_known or not has_engines else now
            counters = [*map(_sum, last.counters, counters)]
            bounds = [new or then for new, then in zip(bounds, last.bounds, strict=True)]
            counts = [
                then if new is None or then is None else [*map(add, then, new)]
                for new, then in zip(counts, last.counts, strict=True)
            ]
        self.append(EngineSample(now, gauges, counters, tuple(bounds), tuple(counts), caught_up_at))


def _sum(known: float, added: float) -> float:
    """Return the sum of the numbers that are known."""
    if math.isnan(added):
        return known
    return added if math.isnan(known) else known + added


def merged_gauges(samples: Iterable[EngineSample]) -> Numbers:
    """Return the gauges of all engines as one: requests add up, usage is the mean, saturation the most."""
    columns = [
        [each for each in column if not math.isnan(each)]
        for column in zip(*(sample.gauges for sample in samples), strict=True)
    ]
    if not any(columns):
        return array("d", [math.nan] * 4)
    running, waiting, usage, saturation = columns
    return [
        sum(running) if running else math.nan,
        sum(waiting) if waiting else math.nan,
        sum(usage) / len(usage) if usage else math.nan,
        max(saturation, default=math.nan),
    ]


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


def histogram_quantile(
    quantile: float, bounds: Sequence[float], counts: Sequence[float]
) -> float | None:
    """Return the quantile, as PromQL computes it; None without observations.

    Args:
        quantile: More than 0, and 1 at most.
        bounds: Upper bounds of the buckets in ascending order, without +Inf.
        counts: Observations per bucket, not cumulative; the last is that of +Inf.
    """
    cumulative = [*accumulate(counts)]
    total = cumulative[-1]
    if not bounds or total <= 0:
        return None
    rank = quantile * total
    bucket = bisect_left(cumulative, rank, 0, len(bounds))
    if bucket == len(bounds):
        return bounds[-1]
    end = bounds[bucket]
    if bucket == 0:
        if end <= 0:
            return end
        start, before = 0.0, 0.0
    else:
        start, before = bounds[bucket - 1], cumulative[bucket - 1]
    return start + (end - start) * ((rank - before) / counts[bucket])
