"""A batch engine under a changing load, simulated: where its knee is, and what its gauges say on the way there.

Requests arrive at random, wait, get a place in the batch if there is room for their KV, and one token a step.
A step takes longer the more it has to do. Where the KV cache is full the newest request loses its place
and is computed again, as vLLM's scheduler does it.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

Rate = Callable[[float], float]
"""Requests a second, by time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """An engine, and what it is asked for.

    Attributes:
        slots: Most requests in the batch.
        room: Tokens for which the KV cache has room.
        step: Seconds of a step with nothing to do, and more for each request and computed prompt token.
        prompt: Mean tokens of a prompt, and of an answer; lengths are exponential.
        chunk: Most prompt tokens of a step; a longer prompt has a step of its own.
    """

    slots: int = 64
    room: int = 200_000
    step: tuple[float, float, float] = (0.02, 0.0002, 0.00002)
    prompt: float = 500.0
    answer: float = 200.0
    chunk: int = 4096


class Look(NamedTuple):
    """What the engine tells, at a time: gauges, and totals since the begin."""

    time: float
    running: int
    waiting: int
    usage: float
    arrived: int
    finished: int
    generated: int
    prompted: int
    preempted: int


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One request: how long it is, and how far it has come."""

    prompt: int
    answer: int
    made: int = 0
    begun: int = 0
    """The step in which it got its place."""

    def held(self, step: int) -> int:
        """Tokens whose KV it holds in ``step``."""
        return self.prompt + self.made + step - self.begun


class Simulation:
    """One run; ``looks`` goes through it once."""

    def __init__(self, model: Model, rate: Rate, seed: int, *, backlog: bool = False) -> None:
        self.model = model
        self._rate = rate
        self._random = random.Random(seed)
        self._backlog = backlog
        """There is always one more: what the engine can do at most."""
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._ends: list[tuple[int, int, Request]] = []
        self._order = count()
        self._held = self._step = 0
        self._next = self._gap(0.0)
        self.arrived = self.finished = self.generated = self.prompted = self.preempted = 0
        self.asked = 0
        """Tokens that all who arrived want."""

    def looks(self, seconds: float, interval: float = 1.0) -> Iterator[Look]:
        """One an interval."""
        now, due = 0.0, interval
        while now < seconds:
            now += self._advance(now)
            while due <= min(now, seconds):
                yield self._look(due)
                due += interval

    def _gap(self, now: float) -> float:
        rate = self._rate(now)
        return now + (self._random.expovariate(rate) if rate > 0 else math.inf)

    def _request(self) -> Request:
        prompt, answer = (
            1 + int(self._random.expovariate(1 / mean))
            for mean in (self.model.prompt, self.model.answer)
        )
        return Request(min(prompt, self.model.room // 4), min(answer, self.model.room // 4))

    def _advance(self, now: float) -> float:
        """One step, or the wait for a request; the seconds it took."""
        while self._next <= now or (self._backlog and len(self._waiting) < self.model.slots):
            request = self._request()
            self._waiting.append(request)
            self.arrived += 1
            self.asked += request.answer
            self._next = self._gap(max(self._next, 0.0)) if not self._backlog else math.inf
        prompted = self._admit()
        if not self._running:
            return max(self._next - now, 1e-6)
        self._step += 1
        self._held += len(self._running)
        self.generated += len(self._running)
        base, each, token = self.model.step
        took = base + each * len(self._running) + token * prompted
        self._end()
        while self._held > self.model.room and len(self._running) > 1:
            self._preempt()
        return took

    def _admit(self) -> int:
        prompted = 0
        while self._waiting and len(self._running) < self.model.slots:
            request = self._waiting[0]
            tokens = request.prompt + request.made
            if self._held + tokens + len(self._running) > self.model.room:
                break
            if prompted and prompted + tokens > self.model.chunk:
                break
            self._waiting.popleft()
            request.begun = self._step
            self._held += tokens
            prompted += tokens
            self._running.append(request)
            end = self._step + request.answer - request.made
            heapq.heappush(self._ends, (end, next(self._order), request))
        self.prompted += prompted
        return prompted

    def _end(self) -> None:
        while self._ends and self._ends[0][0] <= self._step:
            end, _, request = heapq.heappop(self._ends)
            # One that lost its place has another end by now, if any.
            if request in self._running and end == request.begun + request.answer - request.made:
                self._running.remove(request)
                self._held -= request.held(self._step)
                self.finished += 1

    def _preempt(self) -> None:
        request = self._running.pop()
        self._held -= request.held(self._step)
        request.made += self._step - request.begun
        self._waiting.appendleft(request)
        self.preempted += 1

    def _look(self, time: float) -> Look:
        return Look(
            time,
            len(self._running),
            len(self._waiting),
            self._held / self.model.room,
            self.arrived,
            self.finished,
            self.generated,
            self.prompted,
            self.preempted,
        )


def knee(model: Model, seed: int = 1, seconds: float = 1200.0) -> float:
    """Requests a second that the engine finishes while there is always one more."""
    looks = list(Simulation(model, lambda _: 0.0, seed, backlog=True).looks(seconds))
    settled, last = looks[len(looks) // 4], looks[-1]
    return (last.finished - settled.finished) / (last.time - settled.time)


def ramp(low: float, high: float, seconds: float) -> Rate:
    """From one rate to another, in a straight line."""
    return lambda now: low + (high - low) * min(now / seconds, 1.0)
