"""A simulated engine whose steps, waits and preemptions are known, and where its requests' time went."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from hypothesis import strategies as st

from schedulers import ABORT, WALL
from sidestep.protocol.request_events import (
    LIMITS,
    Event,
    Finished,
    Iteration,
    Output,
    Preempted,
    Prompt,
    Queued,
    Scheduled,
)

LENGTH = 1
SLOTS = 3
"""Most requests of a batch."""
BEFORE_OUTPUT = 2e-5
"""Seconds by which an engine notes the end of a request before the output of its last step."""


class Turn(NamedTuple):
    """One turn of the engine: what has happened before its step, and how long the step takes."""

    arrivals: int
    chunks: int
    tokens: int
    aborted: int
    preempted: int
    limit: int
    gap: float
    seconds: float


turns = st.lists(
    st.builds(
        Turn,
        st.integers(0, 2),
        st.integers(1, 3),
        st.integers(1, 4),
        st.integers(0, 12),
        st.integers(0, 6),
        st.integers(1, len(LIMITS) - 1),
        st.sampled_from([0.001, 0.001, 0.002, 0.02, 3.0]),
        st.floats(0.005, 0.1),
    ),
    max_size=20,
)


@dataclasses.dataclass(eq=False)
class Simulated:
    """A request and all times of its life, by the engine's clock; ``arrival`` is a Unix time."""

    number: int
    arrival: float
    queued: float
    chunks: int
    tokens: int
    joined: list[float] = dataclasses.field(default_factory=list)
    left: list[float] = dataclasses.field(default_factory=list)
    outputs: list[float] = dataclasses.field(default_factory=list)
    ended: float = 0.0
    is_aborted: bool = False
    missing: int = 0
    """Chunks that are to be computed before its next output."""

    @property
    def e2e(self) -> float:
        """Its end-to-end latency."""
        return WALL + self.ended - self.arrival


@dataclasses.dataclass(eq=False)
class Step:
    """A step; it ends later than it is made."""

    started: float
    limit: int
    batch: list[Simulated]
    served: list[Simulated]
    ended: float = 0.0


class Simulation:
    """An engine that schedules a step after, or with ``is_pipelined`` before, the end of the one before."""

    def __init__(self, *, is_pipelined: bool = False, has_limits: bool = True) -> None:
        self.events: list[Event] = []
        self.requests: list[Simulated] = []
        self.steps: list[Step] = []
        self.waiting: list[Simulated] = []
        self.running: list[Simulated] = []
        self.now = 1000.0
        self._is_pipelined = is_pipelined
        self._has_limits = has_limits
        self._open: list[Step] = []
        self._turns = 0

    def run(self, chosen: Sequence[Turn]) -> list[Event]:
        """Run all turns, then until all requests have ended; return the events."""
        for turn in chosen:
            self.turn(turn)
        while self.waiting or self.running or self._open:
            self.turn(Turn(0, 1, 1, 99, 99, 1, 0.001, 0.01))
        return self.events

    def turn(self, turn: Turn) -> None:
        """Let requests arrive and end, then schedule a step and end the oldest one."""
        for _ in range(turn.arrivals):
            self.now += 0.0003
            self._ask(turn)
        alive = [*self.waiting, *self.running]
        if turn.aborted < len(alive):
            self.now += 0.0002
            self._end(alive[turn.aborted], self.now, ABORT)
        self.now += turn.gap
        step = self._schedule(turn)
        if step.batch:
            self._open.append(step)
        if len(self._open) > self._is_pipelined or not step.batch:
            self.now += turn.seconds
            for each in self._open[:1]:
                self._open.remove(each)
                self._finish(each)

    def _ask(self, turn: Turn) -> None:
        number = len(self.requests) + 1
        request = Simulated(number, WALL + self.now - 0.004, self.now, turn.chunks, turn.tokens)
        self.requests.append(request)
        self.waiting.append(request)
        self.events.append(Queued(number, self.now, request.arrival, 10 * turn.chunks))

    def _schedule(self, turn: Turn) -> Step:
        now = self.now
        if turn.preempted < len(self.running):
            request = self.running.pop(turn.preempted)
            request.left.append(now)
            self.waiting.insert(0, request)
            self.events.append(Preempted(request.number, now))
        elif self.waiting and len(self.running) < SLOTS:
            request = self.waiting.pop(0)
            request.joined.append(now)
            request.missing = request.chunks
            self.running.append(request)
            self.events.append(Scheduled(request.number, now))
        # Now and then the prompt of a request gets no tokens.
        self._turns += 1
        batch = [r for r in self.running if not r.missing or (r.number + self._turns) % 3]
        for request in batch:
            request.missing = max(request.missing - 1, 0)
        step = Step(
            now, turn.limit if self.waiting else 0, batch, [r for r in batch if not r.missing]
        )
        if batch:
            self.steps.append(step)
        return step

    def _finish(self, step: Step) -> None:
        now = step.ended = self.now
        served = [request for request in step.served if request in self.running]
        prompts = [Prompt(each.number, 10, 0) for each in served if not each.outputs]
        for request in served:
            request.outputs.append(now)
        numbers = [request.number for request in served]
        self.events.append(
            Iteration(
                step.started,
                now,
                WALL + now,
                [Output(now, numbers)] if served else [],
                [request.number for request in step.batch],
                [1 if request in step.served else 10 for request in step.batch],
                prompts=prompts,
                limit=step.limit if self._has_limits else None,
            )
        )
        for request in served:
            if len(request.outputs) >= request.tokens:
                self._end(request, now - BEFORE_OUTPUT, LENGTH)

    def _end(self, request: Simulated, stamp: float, reason: int) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        request.ended, request.is_aborted = stamp, reason == ABORT
        done = len(request.outputs)
        self.events.append(Finished(request.number, stamp, WALL + stamp, reason, 10, done))

    def queue(self, request: Simulated) -> dict[str, float]:
        """Return how long each limit held while a request was in the queue, from the steps' times."""
        until = request.joined[0] if request.joined else request.ended
        edges = [*(step.started for step in self.steps), float("inf")]
        found: defaultdict[str, float] = defaultdict(float)
        for step, (since, later) in zip(self.steps, pairwise(edges), strict=True):
            found[LIMITS[step.limit]] += max(min(later, until) - max(since, request.queued), 0.0)
        found["unknown"] = until - request.queued - sum(found.values())
        return {limit: seconds for limit, seconds in found.items() if seconds > 1e-6}

    def preempted(self, request: Simulated) -> float:
        """Return how long a request was out of the batch after preemptions."""
        back = [*request.joined[1:], request.ended]
        return sum(until - since for since, until in zip(request.left, back, strict=False))

    def prefill(self, request: Simulated) -> float:
        """Return the time of the steps with a request's prompt until its first output."""
        first = min(request.outputs, default=request.ended)
        total, before = 0.0, 0.0
        for step in self.steps:
            begin = max(step.started, before)
            if request in step.batch and step.ended <= first:
                total += step.ended - max(begin, request.joined[0])
            before = step.ended
        return total
