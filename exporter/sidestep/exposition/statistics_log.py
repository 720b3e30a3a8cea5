"""The log publisher: the line that vLLM's own stat logger prints, from the exporter."""

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
"""The engine's own; over which the throughput gauges of old are, where no line is logged."""


@dataclasses.dataclass(slots=True)
class _Totals:
    """Running totals at the last line; the line itself is about the difference."""

    prompt: float = 0.0
    generation: float = 0.0
    preemptions: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    @classmethod
    def of(cls, engine: Engine) -> _Totals:
        computed = engine.layout.find("vllm:prompt_tokens_by_source_total").slots[0]
        return cls(
            # Computed ones only: what came out of a cache was not worked on.
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
    """One line's numbers; ``engines`` is how many engines they cover."""

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
        """For people: rates with one decimal, only what applies."""
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
    """Keeps the totals of the last line, per engine."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._before: dict[str, _Totals] = {}
        self._busy: set[str] = set()

    def lines(self, interval: float) -> list[tuple[int, Line]]:
        """Log level and numbers of each engine, and of all where there are several.

        A line of an engine that had nothing to do, now and the last time, is for debugging.
        """
        found: list[tuple[int, Line]] = []
        self.registry.version += 1  # the throughputs of old are gauges on the page
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
            self._before = {who: t for who, t in self._before.items() if who in known}
            self._busy &= {*known, ""}
        if len(engines) > 1:
            sums = zip(*map(dataclasses.astuple, differences), strict=True)
            line = _line(f"{len(engines)} engines", engines, _Totals(*map(sum, sums)), interval)
            found.append((self._level("", line), line))
        return found

    def _level(self, who: str, line: Line) -> int:
        was_busy = who in self._busy
        if line.prompt_throughput or line.generation_throughput:
            self._busy.add(who)
            return logging.INFO
        self._busy.discard(who)
        return logging.INFO if was_busy else logging.DEBUG

    async def run(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Log every ``interval`` seconds until cancelled; at 0 only the old gauges are kept up."""
        last = clock()
        while True:
            await asyncio.sleep(interval or INTERVAL)
            now = clock()
            lines = self.lines(now - last)
            for level, line in lines if interval else ():
                log.log(level, "%s", line.text(), extra={"fields": dataclasses.asdict(line)})
            last = now


def _line(who: str, engines: Sequence[Engine], since: _Totals, interval: float) -> Line:
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
        who=who,
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
