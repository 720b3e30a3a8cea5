"""Sparklines, and the numbers of the last reports that they show."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite
from typing import NamedTuple

from sidestep.exposition.live.answers import EngineRow
from sidestep_tools import formatting
from sidestep_tools.top.columns import Entry

LENGTH = 240
"""Reports that are remembered: few terminals have more columns."""


class EngineSample(NamedTuple):
    """Numbers of an engine, or of all, at one report; in the order of ``TRENDS``."""

    generation: float | None = None
    prompt: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_cache: float | None = None
    ttft: float | None = None


class Trend(NamedTuple):
    """A number of an engine: its title, value and format, and how engines' values are combined."""

    title: str
    value: Callable[[EngineRow], float | None]
    text: Callable[[float | None], str]
    combine: Callable[[list[float]], float] = sum


TRENDS = (
    Trend("tokens/s out", lambda row: row.generation_tokens_per_second, formatting.rate),
    Trend("tokens/s in", lambda row: row.prompt_tokens_per_second, formatting.rate),
    Trend("running", lambda row: row.running, formatting.count),
    Trend("waiting", lambda row: row.waiting, formatting.count),
    Trend("KV cache", lambda row: row.kv_cache_usage, formatting.share, max),
    Trend("TTFT p95", lambda row: row.ttft.p95 if row.ttft else None, formatting.duration, max),
)


class History:
    """The last samples of each entry, and of all engines together."""

    def __init__(self) -> None:
        self.fleet: deque[EngineSample] = deque(maxlen=LENGTH)
        self.engines: dict[str, deque[EngineSample]] = {}

    def add(self, entries: Sequence[Entry]) -> None:
        """Remember a report; forget engines that are not in it."""
        before, self.engines = self.engines, {}
        for entry in entries:
            if entry.row is not None:
                kept = before.get(entry.key) or deque(maxlen=LENGTH)
                kept.append(_sample(entry.row) if entry.error is None else EngineSample())
                self.engines[entry.key] = kept
        self.fleet.append(totals(entries))


def totals(entries: Sequence[Entry]) -> EngineSample:
    """Return sums over all engines with current numbers, and their highest shares and latencies.

    Engines whose requests another one reports too are left out, as in an exporter's own sums.
    """
    rows = [entry.row for entry in entries if entry.row and entry.error is None]
    samples = [_sample(row) for row in rows if row.summed]
    found: list[float | None] = []
    for index, trend in enumerate(TRENDS):
        known = [value for sample in samples if (value := sample[index]) is not None]
        found.append(trend.combine(known) if known else None)
    return EngineSample(*found)


def _sample(row: EngineRow) -> EngineSample:
    return EngineSample(*(trend.value(row) for trend in TRENDS))


BLOCKS = " ▁▂▃▄▅▆▇█"
EIGHTHS = len(BLOCKS) - 1


def sparkline(values: Sequence[float | None], width: int, height: int = 1) -> list[str]:
    """Return the last ``width`` values as ``height`` lines, the newest at the right.

    The highest value fills all lines, and a zero is the lowest block. None is a blank, as is the time
    before the first value.
    """
    newest = list(values)[-width:] if width > 0 else []
    shown = [value if value is not None and isfinite(value) else None for value in newest]
    top = max((value for value in shown if value is not None), default=0.0)
    columns = []
    for value in shown:
        if value is None:
            columns.append(BLOCKS[0] * height)
            continue
        eighths = max(1, round(value / top * EIGHTHS * height)) if top > 0 else 1
        full, rest = divmod(min(eighths, EIGHTHS * height), EIGHTHS)
        column = BLOCKS[-1] * full + (BLOCKS[rest] if rest else "")
        columns.append(column.ljust(height))
    lines = ["".join(column[line] for column in columns) for line in range(height)]
    return [line.rjust(width) for line in reversed(lines)]
