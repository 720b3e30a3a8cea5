"""Increases of what the replicas of a page count, over the last minute."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import Any

from sidestep.catalog.page_reader import Reading
from sidestep.exposition.live.answers import WINDOW, EngineRow
from sidestep.exposition.live.engine_rows import counted_fields
from sidestep.exposition.live.history import known
from sidestep.exposition.live.samples import HISTOGRAMS, LATENCIES, Counts, EngineSample, increase

MAX_READINGS = 512
"""Most readings of a replica that are kept."""
GAUGES = ("running", "waiting", "kv_cache_usage")
COUNTERS = ("prompt", "generation", "preemptions", "looked_up", "found", "finished", "aborted")
"""Names that a reading has for the gauges and counters of a sample, in their order."""


class Increases:
    """Readings of one replica over the last minute."""

    def __init__(self) -> None:
        self._samples: deque[EngineSample] = deque()
        """Totals, which never decrease: a counter that was reset goes on from its last value."""
        self._read: EngineSample | None = None
        self._reading: Reading | None = None

    def add(self, reading: Reading, at: float) -> None:
        """Add a reading of monotonic time ``at``."""
        samples, before = self._samples, self._read
        read = total = _sample(reading, at)
        if before is not None:
            total = _continued(samples[-1], before, read)
        samples.append(total)
        self._reading, self._read = reading, read
        # The last reading from before the window is its start.
        while len(samples) > MAX_READINGS or samples[min(1, len(samples) - 1)].at <= at - WINDOW:
            samples.popleft()

    def row(self, identity: str, name: str, model: str) -> EngineRow:
        """Return the last reading as a row; what was counted is not known before the second one."""
        reading = self._reading
        assert reading is not None
        first, last = self._samples[0], self._samples[-1]
        found = increase([first, last], LATENCIES) if last.at > first.at else None
        gauges: dict[str, Any] = dict(zip(GAUGES, map(known, last.gauges), strict=True))
        return EngineRow(
            id=identity,
            engine=name,
            model=model,
            dialect=reading.dialect,
            state=reading.state,
            reason=reading.reason,
            stalled_seconds=reading.stalled,
            step_age=reading.step_age,
            **gauges,
            **counted_fields(found),
        )


def _sample(reading: Reading, at: float) -> EngineSample:
    found = [reading.histograms.get(name) for name in HISTOGRAMS]
    return EngineSample(
        at,
        [reading.gauges.get(name, math.nan) for name in GAUGES],
        [reading.counters.get(name, math.nan) for name in COUNTERS],
        [() if one is None else one[0] for one in found],
        [None if one is None else [b - a for a, b in pairwise((0.0, *one[1]))] for one in found],
    )


def _continued(total: EngineSample, before: EngineSample, now: EngineSample) -> EngineSample:
    """Return the totals that follow ``total`` if ``before`` and ``now`` are two readings.

    As in PromQL, a decrease is a reset to 0.
    """
    counters = [
        read if math.isnan(last) else known + (read - last if read >= last else read)
        for known, last, read in zip(total.counters, before.counters, now.counters, strict=True)
    ]
    counts: list[Counts] = []
    for index, read in enumerate(now.counts):
        last, known = before.counts[index], total.counts[index]
        if (
            read is None
            or last is None
            or known is None
            or before.bounds[index] != now.bounds[index]
        ):
            counts.append(read)
        else:
            base = [0.0] * len(read) if sum(read) < sum(last) else last
            counts.append([k + r - b for k, r, b in zip(known, read, base, strict=True)])
    return now._replace(counters=counters, counts=counts)
