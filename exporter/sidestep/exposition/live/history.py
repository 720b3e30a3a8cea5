"""The last ten minutes of an engine, or of all engines as one, within a fixed amount of memory."""

from __future__ import annotations

import math
import sys
from array import array
from collections import deque
from collections.abc import Iterable
from itertools import islice

from sidestep.catalog.buckets import Bounds
from sidestep.exposition.live.rows import WINDOW
from sidestep.exposition.live.samples import COUNTERS, HISTOGRAMS, Counts, Increase, Numbers, Sample
from sidestep.metrics.engine import Engine

INTERVAL = 5.0
"""Seconds between two samples."""
SPAN = 600.0
"""Seconds that are kept."""
MAX_SAMPLES = int(SPAN / INTERVAL) + 1
MIN_SAMPLES = int(WINDOW / INTERVAL) + 2
MAX_BYTES = 240_000
"""Bytes of an engine's samples. Default bounds need less; with more buckets, fewer samples are kept."""


class History:
    """Samples of one engine, the oldest first.

    Attributes:
        engine: The engine; another one with its identity has a history of its own.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine
        self.samples: deque[Sample] = deque()

    def append(self, sample: Sample) -> None:
        """Add a compact copy of ``sample``, and remove those that are too many or too old."""
        samples = self.samples
        packed = sample.packed(samples[-1] if samples else None)
        samples.append(packed)
        most = min(MAX_SAMPLES, max(MAX_BYTES // _size(packed), MIN_SAMPLES))
        while len(samples) > most:
            samples.popleft()

    def window(self, now: float) -> list[Sample]:
        """Return the samples of the last ``WINDOW`` seconds, and the last one before."""
        found = 0
        for sample in reversed(self.samples):
            found += 1
            if sample.at <= now - WINDOW:
                break
        return [*islice(self.samples, len(self.samples) - found, None)]


def _size(sample: Sample) -> int:
    """Return the bytes of a sample that shares nothing."""
    parts = [sample.gauges, sample.counters, *(each for each in sample.counts if each is not None)]
    return sum(map(sys.getsizeof, [*parts, sample, sample.counts, sample.at]))


class Merged:
    """What several engines have counted in the same time.

    Attributes:
        counters: Sums, one for each of ``COUNTERS``; NaN: not known.
        bounds: Upper bounds for each of ``HISTOGRAMS``.
        counts: Observations per bucket, likewise; None: no engine has the histogram, or the
            engines' bounds differ.
    """

    def __init__(self) -> None:
        self.counters = [math.nan] * len(COUNTERS)
        self.bounds: list[Bounds] = [()] * len(HISTOGRAMS)
        self.counts: list[Counts] = [None] * len(HISTOGRAMS)
        self._differs: set[int] = set()

    def add(self, one: Increase) -> None:
        """Add what one engine has counted."""
        self.counters = [*map(_sum, self.counters, one.counters)]
        for index, counts in enumerate(one.counts):
            if counts is None or index in self._differs:
                continue
            known, bounds = self.counts[index], one.bounds[index]
            if known is None:
                self.bounds[index], self.counts[index] = bounds, counts
            elif self.bounds[index] == bounds:
                self.counts[index] = [a + b for a, b in zip(known, counts, strict=True)]
            else:
                self._differs.add(index)
                self.bounds[index], self.counts[index] = (), None


class TotalHistory(History):
    """Samples of all engines as one, whose totals are the sums of what each has counted since then.

    An engine that is gone stays in the past, and one that has come is not in it.
    """

    def add(self, now: float, gauges: Numbers, merged: Merged) -> None:
        """Add a sample.

        Args:
            now: Monotonic time.
            gauges: Those of all engines as one.
            merged: What the engines have counted since the last sample.
        """
        if not self.samples:
            merged = Merged()
        else:
            self.samples[-1] = last = _started(self.samples[-1], merged)
            merged.add(Increase(0.0, last.counters, last.bounds, last.counts))
        bounds, counts = tuple(merged.bounds), tuple(merged.counts)
        self.append(Sample(now, gauges, merged.counters, bounds, counts))


def _started(last: Sample, merged: Merged) -> Sample:
    """Return the last sample with a total of 0 for what it does not have and is counted now.

    A histogram whose bounds have changed has no counts before.
    """
    counters = [
        0.0 if math.isnan(then) and not math.isnan(added) else then
        for then, added in zip(last.counters, merged.counters, strict=True)
    ]
    counts = [
        then
        if new is None or (then is not None and last.bounds[index] == merged.bounds[index])
        else array("d", bytes(8 * len(new)))
        for index, (then, new) in enumerate(zip(last.counts, merged.counts, strict=True))
    ]
    bounds = [
        then if new is None else merged.bounds[index]
        for index, (then, new) in enumerate(zip(last.bounds, merged.counts, strict=True))
    ]
    return last._replace(counters=array("d", counters), bounds=tuple(bounds), counts=tuple(counts))


def _sum(known: float, added: float) -> float:
    """Return the sum of the numbers that are known."""
    if math.isnan(added):
        return known
    return added if math.isnan(known) else known + added


def merged_gauges(samples: Iterable[Sample]) -> Numbers:
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
