"""The numbers of sparklines: a few of each engine, and of all engines, in the last reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sidestep.exposition.live.rows import EngineRow
from sidestep_tools.top import formatting
from sidestep_tools.top.columns import Entry

LENGTH = 240
"""Reports that are remembered; no terminal is much wider."""


class EngineSample(NamedTuple):
    """Numbers of an engine, or of all, at one report."""

    generation: float | None
    prompt: float | None
    running: float | None
    waiting: float | None
    kv_cache: float | None
    ttft: float | None


class Trend(NamedTuple):
    """A line of the details: its title, and a function that formats its numbers."""

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
        """Remember a report, and forget the engines that are not in it."""
        before, self.engines = self.engines, {}
        for entry in entries:
            if entry.row is not None:
                kept = before.get(entry.key) or deque(maxlen=LENGTH)
                kept.append(_unknown() if entry.error is not None else _sample(entry.row))
                self.engines[entry.key] = kept
        self.fleet.append(totals(entries))


def totals(entries: Sequence[Entry]) -> EngineSample:
    """Return sums over the engines that answered; for shares and latencies, the highest."""
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
