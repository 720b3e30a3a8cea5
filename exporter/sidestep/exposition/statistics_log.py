"""The statistics log line of each engine, from the key series of its dialect."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from sidestep.exposition.key_numbers import has_requests, key_number, without_repeated_ranks
from sidestep.metrics.engine import Engine
from sidestep.metrics.hit_window import EXTERNAL, MULTIMODAL, PREFIX
from sidestep.metrics.registry import Registry
from sidestep.tracking.health.states import EngineState, Health

log = logging.getLogger(__name__)

INTERVAL = 10.0
"""The engine's own interval in seconds; the legacy throughput gauges need it without log lines."""
UNREMARKABLE = frozenset({EngineState.OK, EngineState.IDLE})
"""States that a line does not mention."""


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
        return cls(*(key_number(engine, field.name) or 0 for field in dataclasses.fields(cls)))

    def since(self, before: _Totals) -> _Totals:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(before), strict=True)
        return _Totals(*(now - then for now, then in pairs))


@dataclasses.dataclass(slots=True)
class Line:
    """Numbers of one line; ``engines`` is how many engines they cover.

    Attributes:
        state: State of the engine, unless it is ok or idle.
        reason: Why it is stalled or slow.
        seconds: For how long it has been.
    """

    who: str
    engines: int
    prompt_throughput: float
    generation_throughput: float
    running: float
    waiting: float
    deferred: float
    preemptions: float
    kv_cache_usage: float | None
    prefix_hit_rate: float | None
    external_hit_rate: float | None
    mm_hit_rate: float | None
    draft_acceptance_rate: float | None
    state: str | None = None
    reason: str | None = None
    seconds: float | None = None

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
        rates = {
            "KV cache": self.kv_cache_usage,
            "prefix cache hits": self.prefix_hit_rate,
            "external prefix cache hits": self.external_hit_rate,
            "multimodal cache hits": self.mm_hit_rate,
            "drafts accepted": self.draft_acceptance_rate,
        }
        parts += [f"{name} {rate:.1%}" for name, rate in rates.items() if rate is not None]
        if self.state:
            why = f" ({self.reason}, {self.seconds:.0f} s)" if self.reason else ""
            parts.append(f"state {self.state}{why}")
        return f"{self.who}: " + ", ".join(parts)


class StatsLog:
    """Running totals at the last line, by engine.

    Args:
        health: Returns the health of an engine; None where it is not known.
    """

    def __init__(
        self, registry: Registry, health: Callable[[Engine], Health | None] = lambda _: None
    ) -> None:
        self.registry = registry
        self._health = health
        self._before: dict[str, _Totals] = {}
        self._busy: set[str] = set()

    def lines(self, interval: float) -> list[tuple[int, Line]]:
        """Return log level and numbers of each engine, and of all engines if there are several.

        A line is at debug level if the engine was idle, now and at the last line; that of a stalled
        engine is not.
        """
        found: list[tuple[int, Line]] = []
        self.registry.version += 1  # the legacy throughputs are gauges on the page
        engines = without_repeated_ranks(
            [
                engine
                for engine in self.registry.engines.values()
                if engine.live and has_requests(engine)
            ]
        )
        differences: list[_Totals] = []
        for engine in engines:
            totals = _Totals.of(engine)
            difference = totals.since(self._before.get(engine.id, _Totals()))
            self._before[engine.id] = totals
            if not engine.federated:
                engine.computed["prompt_throughput"] = difference.prompt / interval
                engine.computed["generation_throughput"] = difference.generation / interval
            differences.append(difference)
            line = _line(f"engine {_name(engine)}", [engine], difference, interval)
            self._add_state(line, engine)
            found.append((self._level(engine.id, line), line))
        known = self.registry.engines.keys() | self.registry.retired.keys()
        if len(self._before) > 2 * len(known):
            self._before = {name: t for name, t in self._before.items() if name in known}
            self._busy &= {*known, ""}
        # A stream's engine usually pushes its own statistics, too.
        summed = [
            (engine, difference)
            for engine, difference in zip(engines, differences, strict=True)
            if not engine.layout.tables.has_own_namespace
        ]
        if len(summed) > 1:
            engines, differences = map(list, zip(*summed, strict=True))
            sums = zip(*map(dataclasses.astuple, differences), strict=True)
            line = _line(f"{len(engines)} engines", engines, _Totals(*map(sum, sums)), interval)
            found.append((self._level("", line), line))
        return found

    def _add_state(self, line: Line, engine: Engine) -> None:
        health = self._health(engine)
        if health is None or health.state in UNREMARKABLE:
            return
        line.state = health.state.value
        if health.reason is not None:
            line.reason, line.seconds = health.reason.value, health.age

    def _level(self, name: str, line: Line) -> int:
        was_busy = name in self._busy
        if line.prompt_throughput or line.generation_throughput or line.reason:
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


def _name(engine: Engine) -> str:
    return engine.id if engine.layout.tables.has_own_namespace else engine.name


def _line(name: str, engines: Sequence[Engine], since: _Totals, interval: float) -> Line:
    def total(name: str) -> float:
        return sum(key_number(engine, name) or 0 for engine in engines)

    def rate(window: int) -> float | None:
        windows = [engine.hit_windows[window] for engine in engines]
        if not any(w.requests for w in windows):
            return None
        queries = sum(w.queries for w in windows)
        return sum(w.hits for w in windows) / queries if queries else 0.0

    usages = [
        u for u in (key_number(engine, "kv_cache_usage") for engine in engines) if u is not None
    ]
    return Line(
        who=name,
        engines=len(engines),
        prompt_throughput=since.prompt / interval,
        generation_throughput=since.generation / interval,
        running=total("running"),
        waiting=total("waiting"),
        deferred=total("deferred"),
        preemptions=since.preemptions,
        kv_cache_usage=sum(usages) / len(usages) if usages else None,
        prefix_hit_rate=rate(PREFIX),
        external_hit_rate=rate(EXTERNAL),
        mm_hit_rate=rate(MULTIMODAL),
        draft_acceptance_rate=since.accepted / since.drafted if since.drafted else None,
    )
