"""A simulated engine that one thing at a time makes slow: the events of its core, in the order of time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from exporters import Start, until
from schedulers import WALL
from sidestep.app.exporter import Exporter
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.request_events import (
    LIMITS,
    Event,
    Finished,
    Identity,
    Iteration,
    Output,
    Preempted,
    Prompt,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep_adapters.publisher.publisher import Publisher

START = 1000.0
LENGTH = FINISH_REASONS.index("length")
NONE, SLOTS, TOKENS, KV_BLOCKS, LORA = map(
    LIMITS.index, ("none", "slots", "tokens", "kv_blocks", "lora")
)


@dataclasses.dataclass
class Load:
    """An engine and its requests; by default it is well.

    Attributes:
        interval: Mean seconds between two arrivals.
        prompt: Tokens of a prompt.
        long_prompt: Tokens of every tenth prompt.
        output: Tokens of an answer.
        front_end: Seconds from an arrival to the queue.
        slots: Most requests of a batch.
        budget: Most tokens of a step.
        capacity: Tokens that the KV cache holds.
        adapters: Most adapters of a batch, of two that requests have in turn; 0: there are none.
        per_token: Seconds that a prompt's token takes.
        stall: Seconds for which nothing happens after every hundredth step.
    """

    requests: int = 60
    interval: float = 0.2
    prompt: int = 200
    long_prompt: int = 200
    output: int = 40
    front_end: float = 0.002
    slots: int = 64
    budget: int = 8192
    capacity: int = 1_000_000
    adapters: int = 0
    per_token: float = 0.00001
    stall: float = 0.0


INFO = EngineInfo(
    "e", "vllm", {"engine": "0", "model_name": "m"}, features=["engine_core", "request_events"]
)


@asynccontextmanager
async def fed(start: Start, load: Load, **settings: Any) -> AsyncIterator[str]:
    """Run an exporter that has the events of an engine; yield its address."""
    async with start(**settings) as exporter, connected(exporter, load):
        yield exporter.url.removesuffix("/metrics")


@asynccontextmanager
async def connected(
    exporter: Exporter, load: Load, info: EngineInfo = INFO
) -> AsyncIterator[Publisher]:
    """Push the events of an engine, which is connected until the end of the block."""
    publisher = Publisher(exporter.endpoints[0], info.id, [info], flush_interval=0.01)
    for item in SlowEngine(load).items():
        publisher.push(item)
    await until(lambda: publisher.drained)
    yield publisher
    await asyncio.to_thread(publisher.close)


@dataclasses.dataclass
class Asked:
    """A request."""

    number: int
    arrival: float
    prompt: int
    output: int
    adapter: str
    computed: int = 0
    generated: int = 0
    preemptions: int = 0

    @property
    def missing(self) -> int:
        """Tokens to compute before its next output."""
        return self.prompt + self.generated - self.computed


class SlowEngine:
    """Runs all requests of a load."""

    def __init__(self, load: Load, seed: int = 1) -> None:
        self._load = load
        self._random = Random(seed)
        self._now = START
        self._waiting: deque[Asked] = deque()
        self._running: list[Asked] = []
        self._steps = 0

    def items(self, size: int = 50) -> Iterator[RequestEvents]:
        """Yield the events in items."""
        events = [*self.events()]
        for at in range(0, len(events), size):
            yield RequestEvents(0, START, 1, events[at : at + size])

    def events(self) -> Iterator[Event]:
        """Yield the events of all requests."""
        coming = deque(self._asked())
        while coming or self._waiting or self._running:
            if not self._waiting and not self._running:
                self._now = max(self._now, coming[0].arrival + self._load.front_end)
            while coming and coming[0].arrival + self._load.front_end <= self._now:
                asked = coming.popleft()
                self._waiting.append(asked)
                yield Queued(
                    asked.number,
                    asked.arrival + self._load.front_end,
                    WALL + asked.arrival,
                    asked.prompt,
                    asked.adapter,
                    identity=Identity(f"req-{asked.number}"),
                )
            yield from self._step()

    def _asked(self) -> Iterator[Asked]:
        at = START
        for number in range(1, self._load.requests + 1):
            at += self._random.expovariate(1 / self._load.interval)
            is_long = number % 10 == 0
            prompt = self._load.long_prompt if is_long else self._load.prompt
            adapter = f"a{number % 2}" if self._load.adapters else ""
            yield Asked(number, at, prompt, self._load.output, adapter)

    @property
    def _held(self) -> int:
        return sum(each.prompt + each.generated for each in self._running)

    def _step(self) -> Iterator[Event]:
        load, started = self._load, self._now
        has_preempted = False
        while self._held + len(self._running) > load.capacity and len(self._running) > 1:
            victim = self._running.pop()
            victim.computed = 0
            victim.preemptions += 1
            self._waiting.appendleft(victim)
            has_preempted = True
            yield Preempted(victim.number, started)
        batch: dict[int, int] = {}
        left = load.budget
        for each in self._running:
            tokens = min(each.missing, left)
            if tokens:
                batch[each.number] = tokens
                left -= tokens
        limit = NONE
        while self._waiting:
            limit = KV_BLOCKS if has_preempted else self._limit(self._waiting[0], left)
            if limit != NONE:
                break
            each = self._waiting.popleft()
            self._running.append(each)
            batch[each.number] = min(each.missing, left)
            left -= batch[each.number]
            yield Scheduled(each.number, started)
        fresh = [each for each in self._running if each.missing > 1 or not each.generated]
        prefilled = sum(batch.get(each.number, 0) for each in fresh)
        self._now += 0.01 + 0.0002 * len(batch) + load.per_token * prefilled
        yield from self._end(started, batch, limit)
        self._steps += 1
        self._now += 0.0005
        if load.stall and self._steps % 100 == 0:
            self._now += load.stall

    def _limit(self, asked: Asked, left: int) -> int:
        load = self._load
        if len(self._running) >= load.slots:
            return SLOTS
        if left <= 0:
            return TOKENS
        loaded = {each.adapter for each in self._running} | {asked.adapter}
        if load.adapters and len(loaded) > load.adapters:
            return LORA
        if self._held + asked.prompt + asked.generated + 16 > load.capacity:
            return KV_BLOCKS
        return NONE

    def _end(self, started: float, batch: dict[int, int], limit: int) -> Iterator[Event]:
        served: list[Asked] = []
        prompts: list[Prompt] = []
        for each in self._running:
            each.computed += batch.get(each.number, 0)
            if each.number in batch and each.missing <= 0:
                if not each.generated:
                    prompts.append(Prompt(each.number, each.prompt))
                each.generated += 1
                served.append(each)
        stamp = self._now
        yield Iteration(
            started,
            stamp,
            WALL + stamp,
            [Output(stamp, [each.number for each in served])] if served else [],
            [*batch],
            [*batch.values()],
            prompts=prompts,
            limit=limit,
        )
        for each in served:
            if each.generated >= each.output:
                self._running.remove(each)
                yield Finished(
                    each.number,
                    stamp,
                    WALL + stamp,
                    LENGTH,
                    each.prompt,
                    each.generated,
                    each.preemptions,
                )
