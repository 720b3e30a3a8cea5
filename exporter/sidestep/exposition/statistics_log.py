"""The statistics log line of each engine, as vLLM's own stat logger prints it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from sidestep.metrics.computed_gauges import scalar
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry

log = logging.getLogger(__name__)

INTERVAL = 10.0
"""The engine's own interval in seconds; the legacy throughput gauges need it without log lines."""


@dataclasses.dataclass(slots=True)
class _Totals:
    """Running totals at the last line; a line shows differences."""

    prompt: float = 0.0
    generation: float = 0.0
    preemptions: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    @classmethod
    def of(cls, engine: Engine) -> _Totals:
        computed = engine.layout.find("vllm:prompt_tokens_by_source_total").slots[0]
        return cls(
            # Computed tokens only, without those from a cache.
            prompt=engine.values[computed] or 0,
            generation=scalar(engine, "vllm:generation_tokens_total"),
            preemptions=scalar(engine, "vllm:num_preemptions_total"),
            drafted=scalar(engine, "vllm:spec_decode_num_draft_tokens_total"),
            accepted=scalar(engine, "vllm:spec_decode_num_accepted_tokens_total"),
        )

    def since(self, before: _Totals) -> _Totals:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(before), strict=True)
        return _Totals(*(now - then for now, then in pairs))


@dataclasses.dataclass(slots=True)
class Line:
    """Numbers of one line; ``engines`` is how many engines they cover."""

    who: str
    engines: int
    prompt_throughput: float
    generation_throughput: float
    running: float
    waiting: float
    deferred: float
    preemptions: float
    kv_cache_usage: float
    prefix_hit_rate: float | None
    external_hit_rate: float | None
    mm_hit_rate: float | None
    draft_acceptance_rate: float | None

    def text(self) -> str:
        """Return the line: rates with one decimal, without what does not apply."""
        parts = [
            f"prompt {self.prompt_throughput:.1f} tokens/s",
            f"generation {self.generation_throughput:.1f} tokens/s",
            f"running {self.running:.0f}",
            f"waiting {self.waiting:.0f}",
        ]
        if self.deferred:
            parts.append(f"deferred {self.deferred:.0f}")
        if self.preemptions:
            parts.append(f"preemptions {self.preemptions:.0f}")
        parts.append(f"KV cache {self.kv_cache_usage:.1%}")
        rates = {
            "prefix cache hits": self.prefix_hit_rate,
            "external prefix cache hits": self.external_hit_rate,
            "multimodal cache hits": self.mm_hit_rate,
            "drafts accepted": self.draft_acceptance_rate,
        }
        parts += [f"{name} {rate:.1%}" for name, rate in rates.items() if rate is not None]
        return f"{self.who}: " + ", ".join(parts)


class StatsLog:
    """Running totals at the last line, by engine."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._before: dict[str, _Totals] = {}
        self._busy: set[str] = set()

    def lines(self, interval: float) -> list[tuple[int, Line]]:
        """Return log level and numbers of each engine, and of all engines if there are several.

        A line is at debug level if the engine was idle, now and at the last line.
        """
        found: list[tuple[int, Line]] = []
        self.registry.version += 1  # the legacy throughputs are gauges on the page
        engines = [
            e for e in self.registry.engines.values() if e.live and e.layout.dialect == "vllm"
        ]
        differences: list[_Totals] = []
        for engine in engines:
            totals = _Totals.of(engine)
            difference = totals.since(self._before.get(engine.id, _Totals()))
            self._before[engine.id] = totals
            engine.throughput = (difference.prompt / interval, difference.generation / interval)
            differences.append(difference)
            line = _line(f"engine {engine.labels['engine']}", [engine], difference, interval)
            found.append((self._level(engine.id, line), line))
        known = self.registry.engines.keys() | self.registry.retired.keys()
        if len(self._before) > 2 * len(known):
            self._before = {name: t for name, t in self._before.items() if name in known}
            self._busy &= {*known, ""}
        if len(engines) > 1:
            sums = zip(*map(dataclasses.astuple, differences), strict=True)
            line = _line(f"{len(engines)} engines", engines, _Totals(*map(sum, sums)), interval)
            found.append((self._level("", line), line))
        return found

    def _level(self, name: str, line: Line) -> int:
        was_busy = name in self._busy
        if line.prompt_throughput or line.generation_throughput:
            self._busy.add(name)
            return logging.INFO
        self._busy.discard(name)
        return logging.INFO if was_busy else logging.DEBUG

    async def run(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Log every ``interval`` seconds until cancelled; at 0, only update the legacy gauges."""
        last = clock()
        while True:
            await asyncio.sleep(interval or INTERVAL)
            now = clock()
            lines = self.lines(now - last)
            for level, line in lines if interval else ():
                log.log(level, "%s", line.text(), extra={"fields": dataclasses.asdict(line)})
            last = now


def _line(name: str, engines: Sequence[Engine], since: _Totals, interval: float) -> Line:
    def total(name: str) -> float:
        return sum(scalar(engine, name) for engine in engines)

    def rate(window: str) -> float | None:
        windows = [getattr(engine, window) for engine in engines]
        if not any(w.requests for w in windows):
            return None
        queries = sum(w.queries for w in windows)
        return float(sum(w.hits for w in windows) / queries) if queries else 0.0

    deferred = [engine.layout.find("vllm:num_requests_waiting_by_reason") for engine in engines]
    return Line(
        who=name,
        engines=len(engines),
        prompt_throughput=since.prompt / interval,
        generation_throughput=since.generation / interval,
        running=total("vllm:num_requests_running"),
        waiting=total("vllm:num_requests_waiting"),
        deferred=sum(
            engine.values[placed.slots[1]] or 0
            for engine, placed in zip(engines, deferred, strict=True)
        ),
        preemptions=since.preemptions,
        kv_cache_usage=total("vllm:kv_cache_usage_perc") / len(engines),
        prefix_hit_rate=rate("prefix_hits"),
        external_hit_rate=rate("external_hits"),
        mm_hit_rate=rate("mm_hits"),
        draft_acceptance_rate=since.accepted / since.drafted if since.drafted else None,
    )
