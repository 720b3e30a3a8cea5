"""Sparklines, and the numbers of the last reports that they show."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite
from typing import NamedTuple

from sidestep.exposition.live.rows import EngineRow
from sidestep_tools.top import formatting
from sidestep_tools.top.columns import Entry

LENGTH = 240
"""Reports that are remembered: few terminals have more columns."""


class EngineSample(NamedTuple):
    """Numbers of an engine, or of all, at one report."""

    generation: float | None
    prompt: float | None
    running: float | None
    waiting: float | None
    kv_cache: float | None
    ttft: float | None


class Trend(NamedTuple):
    """A line of the details: its title, and how its numbers are written."""

    title: str
    name: str
    text: Callable[[float | None], str]


TRENDS = (
    Trend("tokens/s out", "generation", formatting.rate),
    Trend("tokens/s in", "prompt", formatting.rate),
    Trend("running", "running", formatting.count),
    Trend("waiting", "waiting", formatting.count),
    Trend("KV cache", "kv_cache", formatting.share),
    Trend("TTFT p95", "ttft", formatting.duration),
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
                kept.append(_unknown() if entry.error is not None else _sample(entry.row))
                self.engines[entry.key] = kept
        self.fleet.append(totals(entries))


def totals(entries: Sequence[Entry]) -> EngineSample:
    """Return sums over all engines with current numbers, and their highest shares and latencies."""
    samples = [_sample(entry.row) for entry in entries if entry.row and entry.error is None]

    def known(name: str) -> list[float]:
        values = (getattr(sample, name) for sample in samples)
        return [value for value in values if value is not None]

    def total(name: str) -> float | None:
        values = known(name)
        return sum(values) if values else None

    return EngineSample(
        total("generation"),
        total("prompt"),
        total("running"),
        total("waiting"),
        max(known("kv_cache"), default=None),
        max(known("ttft"), default=None),
    )


def _sample(row: EngineRow) -> EngineSample:
    return EngineSample(
        row.generation_tokens_per_second,
        row.prompt_tokens_per_second,
        row.running,
        row.waiting,
        row.kv_cache_usage,
        None if row.ttft is None else row.ttft.p95,
    )


def _unknown() -> EngineSample:
    return EngineSample(None, None, None, None, None, None)


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
