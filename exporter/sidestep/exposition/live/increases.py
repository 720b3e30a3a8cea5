"""What the replicas of a page have counted in the last minute, from one reading to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from sidestep.catalog.page_reader import Reading
from sidestep.exposition.live.rows import WINDOW, EngineRow, Percentiles
from sidestep.metrics.quantile import histogram_quantile

MAX_READINGS = 512
"""Most readings of a replica that are kept."""


class _Counted(NamedTuple):
    """Totals at one time, which never decrease: a counter that was reset goes on from its last value."""

    at: float
    counters: Mapping[str, float]
    histograms: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]


class Increases:
    """Readings of one replica over the last minute."""

    def __init__(self) -> None:
        self._counted: deque[_Counted] = deque()
        self._last: Reading | None = None

    def add(self, reading: Reading, at: float) -> None:
        """Add a reading of monotonic time ``at``."""
        last, counted = self._last, self._counted
        counters = dict(reading.counters)
        histograms = dict(reading.histograms)
        if last is not None and counted:
            for name, value in reading.counters.items():
                before = last.counters.get(name)
                if before is not None:
                    # As in PromQL, a decrease is a reset to 0.
                    more = value - before if value >= before else value
                    counters[name] = counted[-1].counters[name] + more
            for name, (bounds, counts) in reading.histograms.items():
                known = last.histograms.get(name)
                if known is not None and known[0] == bounds:
                    is_reset = counts[-1] < known[1][-1]
                    base = (0.0,) * len(counts) if is_reset else known[1]
                    total = counted[-1].histograms[name][1]
                    histograms[name] = (
                        bounds,
                        tuple(t + c - b for t, c, b in zip(total, counts, base, strict=True)),
                    )
        counted.append(_Counted(at, counters, histograms))
        self._last = reading
        # The last reading from before the window is its start.
        while len(counted) > MAX_READINGS or counted[min(1, len(counted) - 1)].at <= at - WINDOW:
            counted.popleft()

    def row(self, identity: str, name: str, model: str) -> EngineRow:
        """Return the last reading as a row; what was counted is not known before the second one."""
        reading = self._last
        assert reading is not None
        first, last = self._counted[0], self._counted[-1]
        seconds = last.at - first.at

        def increase(name: str) -> float | None:
            if seconds <= 0 or name not in first.counters or name not in last.counters:
                return None
            return last.counters[name] - first.counters[name]

        def rate(name: str) -> float | None:
            found = increase(name)
            return None if found is None else found / seconds

        looked_up, found = increase("looked_up"), increase("found")
        return EngineRow(
            id=identity,
            engine=name,
            model=model,
            dialect=reading.dialect,
            state=reading.state,
            reason=reading.reason,
            stalled_seconds=reading.stalled,
            step_age=reading.step_age,
            running=reading.gauges.get("running"),
            waiting=reading.gauges.get("waiting"),
            kv_cache_usage=reading.gauges.get("kv_cache_usage"),
            prompt_tokens_per_second=rate("prompt"),
            generation_tokens_per_second=rate("generation"),
            prefix_hit_rate=found / looked_up if looked_up and found is not None else None,
            finished=increase("finished"),
            aborted=increase("aborted"),
            preemptions=increase("preemptions"),
            ttft=_percentiles(first, last, "ttft"),
            inter_token=_percentiles(first, last, "inter_token"),
            e2e=_percentiles(first, last, "e2e"),
        )


def _percentiles(first: _Counted, last: _Counted, name: str) -> Percentiles | None:
    if name not in first.histograms or name not in last.histograms:
        return None
    (bounds, before), (now_bounds, now) = first.histograms[name], last.histograms[name]
    if bounds != now_bounds:
        return None
    cumulative: Sequence[float] = [b - a for a, b in zip(before, now, strict=True)]
    counts = [cumulative[0], *(b - a for a, b in pairwise(cumulative))]
    p50, p95, p99 = (histogram_quantile(q, bounds, counts) for q in (0.5, 0.95, 0.99))
    if p50 is None or p95 is None or p99 is None:
        return None
    return Percentiles(p50, p95, p99, cumulative[-1])
