"""The statistics log line of each engine: its row of ``/api/v1/live``, over the interval of the lines.

Engines on scraped pages have lines as well, without a row there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sidestep.catalog.page_reader import Reading, readings
from sidestep.exposition.live.answers import EngineRow, Percentiles
from sidestep.exposition.live.engine_rows import (
    Rows,
    ShownEngines,
    engine_row,
    has_requests,
    key_number,
    without_repeated_ranks,
)
from sidestep.exposition.live.increases import Increases
from sidestep.exposition.live.samples import LATENCIES, EngineSample, increase, read, zeroed
from sidestep.exposition.live.verdict import evaluate, state_text
from sidestep.metrics.computed_gauges import SetGauges
from sidestep.metrics.engine import Engine, distinct_names
from sidestep.metrics.recent_steps import EXTERNAL, MULTIMODAL, PREFIX, RecentSteps
from sidestep.metrics.registry import Registry
from sidestep.metrics.step_limits import binding_limit, limit_seconds
from sidestep.tracking.health.states import Health

log = logging.getLogger(__name__)

INTERVAL = 10.0
"""The engine's own interval in seconds; the legacy throughput gauges need it without log lines."""


class _Totals(NamedTuple):
    """An engine's totals at its last line."""

    engine: Engine
    sample: EngineSample
    drafted: float
    accepted: float
    limits: Mapping[str, float]


class Line(NamedTuple):
    """Numbers of one line.

    Attributes:
        more: Members of the line in JSON that the row does not have; None is left out.
    """

    row: EngineRow
    name: str
    more: Mapping[str, Any] = {}

    def text(self) -> str:
        """Return the line: rates with one decimal, without what does not apply."""
        row, more = self.row, self.more
        numbers = (
            ("prompt %.1f tokens/s", row.prompt_tokens_per_second),
            ("generation %.1f tokens/s", row.generation_tokens_per_second),
            ("running %.0f", row.running),
            ("waiting %.0f", row.waiting),
            ("deferred %.0f", more.get("deferred")),
            ("finished %.0f", row.finished or None),
            ("aborted %.0f", row.aborted or None),
            ("preemptions %.0f", row.preemptions or None),
        )
        parts = [form % number for form, number in numbers if number is not None]
        latencies = {"TTFT": row.ttft, "ITL": row.inter_token}
        parts += [_latency(name, found) for name, found in latencies.items() if found is not None]
        rates = {
            "KV cache": row.kv_cache_usage,
            "prefix cache hits": row.prefix_hit_rate,
            "external prefix cache hits": more.get("external_hit_rate"),
            "multimodal cache hits": more.get("mm_hit_rate"),
            "drafts accepted": more.get("draft_acceptance_rate"),
        }
        parts += [f"{name} {rate:.1%}" for name, rate in rates.items() if rate is not None]
        if row.attention or (row.state and row.level is None):
            parts.append(f"state {state_text(row)}")
        if more.get("limit"):
            parts.append(f"limit {more['limit']} {more['limit_share']:.0%}")
        return f"{self.name}: " + ", ".join(parts)

    def fields(self) -> dict[str, Any]:
        """Return the members of the line in JSON: what is known, by the names of ``EngineRow``.

        The row's ``level`` is ``state_level``: every line has a level of its own.
        """
        row = msgspec.to_builtins(self.row)
        found = {"event": "statistics", "state_level": row.pop("level", None), **row, **self.more}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def is_busy(self) -> bool:
        """True if the engine has worked since the last line, or needs attention."""
        row = self.row
        rates = row.prompt_tokens_per_second, row.generation_tokens_per_second
        if row.finished is None and rates == (None, None):
            return bool(row.running or row.waiting)
        return bool(any(rates) or row.finished or row.attention)


class StatsLog:
    """Makes the statistics lines, from the totals of each engine at its last line.

    Args:
        registry: The engines; what they have counted so far is in no line.
        pages: Returns the scraped pages by the names of their targets.
    """

    def __init__(
        self,
        registry: Registry,
        health: Callable[[Engine], Health | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        pages: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._registry = registry
        self._shown = ShownEngines(registry)
        self._health = health
        self._pages = pages
        self._readings: dict[str, tuple[float, Reading]] = {}
        """Reading at the last line of each engine on a scraped page, and its time, by identity."""
        self._clock = clock
        self._wall = wall
        self._last = clock()
        self._before = {engine.id: _totals(engine, self._last, None) for engine in registry}
        self._busy: set[str] = set()

    def lines(self) -> Iterator[tuple[int, Line]]:
        """Yield log level and numbers of each engine, and of all engines if there are several.

        A line is at debug level if the engine was idle, now and at the last line; that of a stalled
        engine is not.
        """
        self._shown.refresh()
        last, self._last = self._last, self._clock()
        before, self._before = self._before, {}
        for engine in self._registry.retired.values():
            if engine.id in before:
                self._before[engine.id] = before[engine.id]
        rows, summed = Rows(), []
        for engine, name in self._engines():
            known = before.get(engine.id)
            if known is not None and known.engine is not engine:
                known = None
            totals = _totals(engine, self._clock(), known)
            then = _started(known, totals, last)
            self._before[engine.id] = totals
            counted = increase([then.sample, totals.sample], LATENCIES)
            health = self._health(engine)
            row = engine_row(engine, name, totals.sample, counted, health, wall=self._wall())
            self._set_throughputs(engine, row)
            if not engine.live or not _has_numbers(row):
                continue
            (row,), _ = evaluate([row])
            # A stream's engine usually pushes its own statistics, too.
            if engine in self._shown.summed:
                rows.add(row, counted, is_summed=True)
                summed.append((then, totals))
            model = f", model {row.model}" if row.model else ""
            yield self._with_level(_line(row, f"engine {engine.id}{model}", [(then, totals)]))
        for line in self._page_lines():
            yield self._with_level(line)
        self._busy &= {*self._before, *self._readings, ""}
        total = rows.total() if len(summed) > 1 else None
        if total is not None:
            yield self._with_level(_line(total, total.engine, summed))

    def _set_throughputs(self, engine: Engine, row: EngineRow) -> None:
        """Set the legacy throughputs, which are gauges on the page."""
        found = {
            "prompt_throughput": row.prompt_tokens_per_second or 0.0,
            "generation_throughput": row.generation_tokens_per_second or 0.0,
        }
        gauges = engine.part(SetGauges)
        if gauges.values != found:
            gauges.values = found
            self._registry.touch(engine)

    def _engines(self) -> Iterator[tuple[Engine, str]]:
        """Yield the engines that may have a line, and their names."""
        shown = self._shown.engines
        ranks = {*without_repeated_ranks([engine for engine in shown if has_requests(engine)])}
        names = distinct_names(shown)
        for engine in shown:
            if engine in ranks or not has_requests(engine):
                yield engine, names[engine.id]

    def _page_lines(self) -> Iterator[Line]:
        before, self._readings = self._readings, {}
        now = self._clock()
        for target, text in self._pages().items():
            for reading in readings(text):
                identity = " ".join((target, reading.dialect, *reading.key))
                increases = Increases()
                if identity in before:
                    then, known = before[identity]
                    increases.add(known, then)
                increases.add(reading, now)
                self._readings[identity] = now, reading
                (row,), _ = evaluate([increases.row(identity, target, reading.key[0])])
                if _has_numbers(row):
                    model = f", model {row.model}" if row.model else ""
                    yield Line(row, f"page {target}{model}")

    def _with_level(self, line: Line) -> tuple[int, Line]:
        was_busy = line.row.id in self._busy
        if line.is_busy:
            self._busy.add(line.row.id)
            return logging.INFO, line
        self._busy.discard(line.row.id)
        return logging.INFO if was_busy else logging.DEBUG, line

    async def run(self, interval: float) -> None:
        """Log every ``interval`` seconds until cancelled; at 0, only update the legacy gauges."""
        while True:
            await asyncio.sleep(interval or INTERVAL)
            for level, line in self.lines():
                if interval:
                    log.log(level, "%s", line.text(), extra={"fields": line.fields()})
                # A line takes a fifth of a millisecond: other tasks run in between.
                await asyncio.sleep(0)


def _totals(engine: Engine, now: float, before: _Totals | None) -> _Totals:
    # Packed, since the engine goes on changing what was read.
    sample = read(engine, now).packed(None if before is None else before.sample)
    drafted, accepted = (key_number(engine, name) or 0 for name in ("drafted", "accepted"))
    return _Totals(engine, sample, drafted, accepted, limit_seconds(engine))


def _started(before: _Totals | None, totals: _Totals, last: float) -> _Totals:
    """Return the totals at the last line, with 0 for series that have begun since."""
    now = totals.sample
    if before is None:
        none = (math.nan,) * len(now.counters), ((),) * len(now.bounds), (None,) * len(now.counts)
        before = _Totals(totals.engine, EngineSample(last, (), *none), 0, 0, {})
    return before._replace(sample=zeroed(before.sample, now))


def _line(row: EngineRow, name: str, parts: Sequence[tuple[_Totals, _Totals]]) -> Line:
    engines = [now.engine for _, now in parts]
    deferred = [key_number(engine, "deferred") or 0 for engine in engines]
    drafted = sum(now.drafted - then.drafted for then, now in parts)
    accepted = sum(now.accepted - then.accepted for then, now in parts)
    # An engine's own log has the hit rate of its latest lookups; several dialects count these differently.
    recent = _hit_rate(engines, PREFIX) if len({e.layout.dialect for e in engines}) == 1 else None
    if recent is not None:
        row = msgspec.structs.replace(row, prefix_hit_rate=recent)
    seconds: Counter[str] = Counter()
    for then, now in parts:
        seconds.update(now.limits)
        seconds.subtract(then.limits)
    limit, share = binding_limit(seconds)
    more = {
        # Waiting requests that do not wait for capacity.
        "deferred": sum(deferred) or None,
        "external_hit_rate": _hit_rate(engines, EXTERNAL),
        "mm_hit_rate": _hit_rate(engines, MULTIMODAL),
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        # What kept requests waiting for most of the time in which any did.
        "limit": limit,
        "limit_share": share,
    }
    return Line(row, name, more)


def _hit_rate(engines: Sequence[Engine], window: int) -> float | None:
    windows = [engine.part(RecentSteps).hit_windows[window] for engine in engines]
    if not any(each.requests for each in windows):
        return None
    queries = sum(each.queries for each in windows)
    return sum(each.hits for each in windows) / queries if queries else 0.0


def _has_numbers(row: EngineRow) -> bool:
    """Return whether a line would have a number."""
    gauges = row.running, row.waiting, row.kv_cache_usage
    counters = row.prompt_tokens_per_second, row.generation_tokens_per_second, row.finished
    return any(number is not None for number in (*gauges, *counters, row.ttft, row.inter_token))


def _latency(name: str, found: Percentiles) -> str:
    return f"{name} {_duration(found.p50)} (p95 {_duration(found.p95)})"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
