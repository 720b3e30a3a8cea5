"""The last ten minutes of an engine, or of all engines as one, within a fixed amount of memory."""

from __future__ import annotations

import math
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import add

from sidestep.catalog.buckets import Bounds
from sidestep.exposition.aggregated_series import common_bounds, rebucketed
from sidestep.exposition.live.answers import WINDOW
from sidestep.exposition.live.samples import (
    COUNTERS,
    HISTOGRAMS,
    Counts,
    EngineSample,
    Increase,
    Numbers,
    zeroed,
)
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
        found = 0
        for sample in reversed(self.samples):
            found += 1
            if sample.at <= now - WINDOW:
                break
        return [*islice(self.samples, len(self.samples) - found, None)]


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
                each if own == shared else _rebucketed(own, each, shared)
                for own, each in found.items()
            ]
            bounds.append(shared)
            counts.append([*map(sum, zip(*summed, strict=True))] if shared else None)
        return Increase(0.0, self._counters, tuple(bounds), tuple(counts))


def _rebucketed(own: Bounds, counts: Sequence[float], bounds: Bounds) -> Sequence[float]:
    # Large counts are held as floats.
    return rebucketed(own, [*map(int, counts)], bounds)


class TotalHistory(SampleHistory):
    """Samples of all engines as one, whose totals are the sums of what each has counted since then.

    An engine that is gone stays in the past, and one that has come is not in it.
    """

    def add(self, now: float, gauges: Numbers, added: Increase) -> None:
        """Add a sample of the gauges of all engines, and of what they have ``added`` since the last one."""
        counters, bounds, counts = added.counters, added.bounds, added.counts
        if self.samples:
            last = self.samples[-1] = zeroed(self.samples[-1], added)
            counters = [*map(_sum, last.counters, counters)]
            bounds = [new or then for new, then in zip(bounds, last.bounds, strict=True)]
            counts = [
                then if new is None or then is None else [*map(add, then, new)]
                for new, then in zip(counts, last.counts, strict=True)
            ]
        self.append(EngineSample(now, gauges, counters, tuple(bounds), tuple(counts)))


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
