"""A simulation of a batch engine under changing load: what it can serve, and what it reports up to there.

Requests arrive at random, wait until batch, step budget and KV cache have capacity, and get one token a step. Prompts are
computed in chunks, first come, first served, with what decodes leave of a step's budget. A step takes longer the more it
computes. When the KV cache is full, the newest request is preempted, as by vLLM's scheduler.
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
"""Requests a second at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mix:
    """Requests.

    Attributes:
        prompt: Mean tokens of a prompt; lengths are lognormal.
        answer: Mean tokens of an answer.
        cached: Share of a prompt that the prefix cache has.
        spread: Standard deviation of the lengths' logarithm.
    """

    prompt: float = 500.0
    answer: float = 200.0
    cached: float = 0.0
    spread: float = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """An engine.

    Attributes:
        slots: Most requests in the batch.
        room: Capacity of the KV cache in tokens.
        step: Seconds of an empty step, per request, and per computed prompt token.
        budget: Most tokens of a step.
    """

    slots: int = 64
    room: int = 200_000
    step: tuple[float, float, float] = (0.02, 0.0002, 0.00002)
    budget: int = 2048


class Look(NamedTuple):
    """Gauges of the engine at a time, and totals since the start.

    ``begun`` are requests with a first token, ``steps`` those that generated tokens, and ``stamp``
    is the end of the last step.
    """

    time: float
    running: int
    waiting: int
    usage: float
    arrived: int
    begun: int
    finished: int
    generated: int
    prompted: int
    preempted: int
    steps: int
    stamp: float


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request: its lengths and its progress."""

    prompt: int
    answer: int
    left: int
    """Prompt tokens, and tokens generated before a preemption, that are yet to be computed."""
    made: int = 0
    begun: int = 0
    """Step before its decode began, or went on."""

    @property
    def end(self) -> int:
        """Its last step."""
        return self.begun + self.answer - self.made


class Simulation:
    """One run of the simulation, which ``looks`` iterates over once."""

    def __init__(
        self,
        model: Model,
        mix: Mix | Callable[[float], Mix],
        rate: Rate,
        seed: int,
        *,
        backlog: bool = False,
    ) -> None:
        self.model = model
        self._mix = mix if callable(mix) else lambda _: mix
        self._rate = rate
        self._random = random.Random(seed)
        self._backlog = backlog
        """True if a request always waits, which shows the engine's capacity."""
        self._waiting: deque[Request] = deque()
        self._prefill: deque[Request] = deque()
        self._batch: dict[Request, None] = {}
        """The requests in prefill and in decode, oldest first."""
        self._ends: list[tuple[int, int, Request]] = []
        self._order = count()
        self._held = self._step = self._decoding = 0
        self._stamp = 0.0
        self._next = self._gap(0.0)
        self.arrived = self.begun = self.finished = self.generated = self.prompted = 0
        self.preempted = self.steps = 0
        self.asked = 0
        """Tokens that all requests so far will generate."""

    def looks(self, seconds: float, interval: float = 1.0) -> Iterator[Look]:
        """Yield the engine's state once an interval."""
        now, due = 0.0, interval
        while now < seconds:
            now += self._advance(now)
            while due <= min(now, seconds):
                yield self._look(due)
                due += interval

    def _gap(self, now: float) -> float:
        rate = self._rate(now)
        return now + (self._random.expovariate(rate) if rate > 0 else math.inf)

    def _length(self, mean: float, spread: float) -> int:
        length = mean * math.exp(self._random.gauss(-spread * spread / 2, spread))
        return max(1, min(round(length), self.model.room // 4))

    def _arrive(self, now: float) -> None:
        mix = self._mix(now)
        prompt = max(1, round(self._length(mix.prompt, mix.spread) * (1 - mix.cached)))
        request = Request(prompt, self._length(mix.answer, mix.spread), prompt)
        self._waiting.append(request)
        self.arrived += 1
        self.asked += request.answer

    def _advance(self, now: float) -> float:
        """Run one step, or wait for a request; return the seconds that passed."""
        while self._backlog and len(self._waiting) < self.model.slots:
            self._arrive(now)
        while not self._backlog and self._next <= now:
            self._arrive(self._next)
            self._next = self._gap(self._next)
        computed = self._schedule()
        if not self._batch:
            return max(self._next - now, 1e-6)
        self._step += 1
        self._held += self._decoding
        self.generated += self._decoding
        self.steps += self._decoding > 0
        base, each, token = self.model.step
        took = base + each * len(self._batch) + token * computed
        self._stamp = now + took
        self._end()
        while self._held > self.model.room and len(self._batch) > 1:
            self._preempt()
        return took

    def _schedule(self) -> int:
        """Return the prompt tokens of the next step; requests whose prompt it ends decode in it, too."""
        budget = self.model.budget - self._decoding
        left = budget
        while left > 0 and (self._prefill or self._admit()):
            request = self._prefill[0]
            tokens = min(request.left, left)
            request.left -= tokens
            left -= tokens
            if not request.left:
                self._prefill.popleft()
                request.begun = self._step
                self.begun += not request.made
                self._decoding += 1
                heapq.heappush(self._ends, (request.end, next(self._order), request))
        self.prompted += budget - left
        return budget - left

    def _admit(self) -> bool:
        if not self._waiting or len(self._batch) >= self.model.slots:
            return False
        request = self._waiting[0]
        if self._batch and self._held + request.left + len(self._batch) > self.model.room:
            return False
        self._held += request.left
        self._batch[request] = None
        self._prefill.append(self._waiting.popleft())
        return True

    def _end(self) -> None:
        while self._ends and self._ends[0][0] <= self._step:
            end, _, request = heapq.heappop(self._ends)
            # A preempted request ends later than this entry says.
            if request in self._batch and not request.left and end == request.end:
                del self._batch[request]
                self._decoding -= 1
                self._held -= request.prompt + request.answer
                self.finished += 1

    def _preempt(self) -> None:
        request, _ = self._batch.popitem()
        if request.left:
            self._prefill.remove(request)
        else:
            request.made += self._step - request.begun
            self._decoding -= 1
        request.left = request.prompt + request.made
        self._held -= request.left
        self._waiting.appendleft(request)
        self.preempted += 1

    def _look(self, time: float) -> Look:
        return Look(
            time,
            len(self._batch),
            len(self._waiting),
            self._held / self.model.room,
            self.arrived,
            self.begun,
            self.finished,
            self.generated,
            self.prompted,
            self.preempted,
            self.steps,
            self._stamp,
        )


def knee(model: Model, mix: Mix, seconds: float = 1200.0) -> float:
    """Return how many requests a second the engine finishes at full load."""
    looks = list(Simulation(model, mix, lambda _: 0.0, 1, backlog=True).looks(seconds, 10.0))
    settled, last = looks[len(looks) // 4], looks[-1]
    return (last.finished - settled.finished) / (last.time - settled.time)
