"""Simulated engines that report progress, and an exporter that evaluates their health each second."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from random import Random
from typing import NamedTuple

from sidestep.protocol.messages import CORE, FRONT_END
from sidestep.protocol.progress import ASLEEP, OVERDUE, STARTING, Progress
from sidestep.tracking.health.machine import HealthTracker, Presence, Process, Thresholds

STEP, SCHEDULE, NO_STEPS, NO_OUTPUT, PUBLISHER, QUEUE = (
    "step", "schedule", "no_steps", "no_output", "publisher", "queue",
)  # fmt: skip
WEDGES = (STEP, SCHEDULE, NO_STEPS, NO_OUTPUT, PUBLISHER, QUEUE)
"""Names of the wedges; one in ``schedule`` is an open step whose tokens are not known yet."""

RARE = 0.002
"""Share of the steps after which an adapter is loaded, where one is."""


class Profile(NamedTuple):
    """How long an engine's steps take.

    Attributes:
        base: Seconds of a step without tokens.
        per_token: Seconds per token scheduled.
        per_context: Seconds per token scheduled and thousand tokens before it.
        most_tokens: Most tokens of a step.
        most_running: Most requests that run at a time.
        compile: Most seconds for which the first step of a size compiles; once a restart.
        spread: Steps take up to so many times as long as usual.
        preempted: Share of the steps that preempt a request.
        drafts: Draft tokens per request and step.
        load: Most seconds between two steps in which an adapter is loaded; rare.
    """

    base: float
    per_token: float
    per_context: float
    most_tokens: int
    most_running: int = 64
    compile: float = 0.0
    spread: float = 1.5
    preempted: float = 0.0
    drafts: int = 0
    load: float = 0.0


class Request(NamedTuple):
    """A request: when it arrives, its tokens, and until when it waits for a grammar or a transfer."""

    at: float
    prompt: int
    output: int
    blocked: float = 0.0
    front_end: int = 0


@dataclasses.dataclass
class FrontEnd:
    """State of one front end: requests that it owes, their prompts without output, and answers."""

    owed: int = 0
    prompt_tokens: int = 0
    since: float = 0.0
    answers: int = 0
    longest: float = 0.0
    longest_tokens: int = 0

    def answer(self, now: float) -> None:
        """Receive an answer of the core."""
        self.answers += 1
        if self.owed:
            if now - self.since > self.longest:
                self.longest, self.longest_tokens = now - self.since, self.prompt_tokens
            self.since = now

    def progress(self, now: float, not_before: float) -> Progress:
        """Return what the front end's publisher reports at ``now``."""
        age = max(now - max(self.since, not_before), 0.0) if self.owed else None
        report = Progress(
            0,
            self.answers,
            self.owed,
            step_age=age,
            step_tokens=self.prompt_tokens if age is not None and age >= OVERDUE else 0,
            longest=self.longest,
            longest_tokens=self.longest_tokens if self.longest >= OVERDUE else 0,
        )
        self.longest = 0.0
        return report


@dataclasses.dataclass
class Core:
    """Process that runs steps; ``advance`` runs it up to a moment."""

    profile: Profile
    random: Random
    requests: Iterator[Request]
    wedge: str = ""
    wedged_at: float = math.inf
    healed_at: float = math.inf

    def __post_init__(self) -> None:
        """Start without requests."""
        self.front_ends: defaultdict[int, FrontEnd] = defaultdict(FrontEnd)
        self.asleep_until = self.frozen_until = 0.0
        self.unlucky: list[Request] = []
        self.next = next(self.requests, None)
        self.restart(0.0, 0.0)

    def restart(self, now: float, until: float) -> None:
        """Replace the process by one that starts up until ``until`` and has no requests."""
        self.waiting: deque[tuple[Request, int]] = deque()
        self.prefilling: tuple[Request, int] | None = None
        self.running: list[tuple[int, int, Request]] = []
        self.count = self.steps = self.tokens_since_output = self.compiled = 0
        self.known_tokens = 0
        self.sizes: set[int] = set()
        self.started: float | None = None
        self.ends = math.inf
        self.tokens = self.chunk = 0
        self.progressed_at = self.output_at = now
        self.free_at = until
        self.starts_until = until
        self.longest, self.longest_tokens = 0.0, 0
        for front_end in self.front_ends.values():
            front_end.owed = front_end.prompt_tokens = 0

    @property
    def unfinished(self) -> int:
        """Requests that the core has."""
        return len(self.waiting) + len(self.running) + (self.prefilling is not None)

    def is_wedged(self, now: float, kind: str) -> bool:
        """Return whether this wedge holds at ``now``."""
        return self.wedge == kind and self.wedged_at <= now < self.healed_at

    def advance(self, until: float) -> None:
        """Run all that happens before ``until``."""
        now = self.free_at
        while True:
            if self.started is None:
                self._accept(min(now, until))
                if now > until:
                    return
                if not self._begin(now):
                    now = self._later(now, until)
                    self.free_at = now
                    if now >= until:
                        self._accept(until)
                        return
                    continue
            self._accept(min(self.ends, until))
            if self.ends > until:
                return
            self._end()
            now = self.free_at

    def _later(self, now: float, until: float) -> float:
        """Return when a step can begin at the earliest, if none can at ``now``."""
        candidates = [self.asleep_until, self.healed_at]
        if self.next is not None:
            candidates.append(self.next.at)
        candidates += [request.blocked for request, _ in self.waiting]
        return min([until, *(each for each in candidates if each > now)])

    def visible_since(self, now: float) -> float | None:
        """Return since when the wedge can be seen; None: it cannot yet."""
        if not self.wedged_at <= now < self.healed_at:
            return None
        is_hung = self.started is not None and self.ends >= self.healed_at
        is_late = self.tokens_since_output > 2 * self.known_tokens
        is_seen, since = {
            STEP: (is_hung, self.started),
            SCHEDULE: (is_hung, self.started),
            NO_STEPS: (
                self.started is None and self.unfinished > 0,
                max(self.progressed_at, self.wedged_at),
            ),
            NO_OUTPUT: (is_late, now),
            PUBLISHER: (True, self.wedged_at),
            QUEUE: (
                bool(self.unlucky) and not self.unfinished,
                max([self.progressed_at, *(each.at for each in self.unlucky[:1])]),
            ),
        }[self.wedge]
        return since if is_seen else None

    def _accept(self, now: float) -> None:
        if self.unlucky and now >= self.healed_at:
            self.waiting.extend((request, request.prompt) for request in self.unlucky)
            self.known_tokens += sum(each.prompt + each.output for each in self.unlucky)
            self.progressed_at = self.output_at = self.healed_at
            self.unlucky.clear()
        while (request := self.next) is not None and request.at <= now:
            self.next = next(self.requests, None)
            front_end = self.front_ends[request.front_end]
            if not front_end.owed:
                front_end.since = request.at
            front_end.owed += 1
            front_end.prompt_tokens += request.prompt
            if self.is_wedged(request.at, QUEUE):
                self.unlucky.append(request)
                continue
            if not self.unfinished:
                self.progressed_at = self.output_at = request.at
                self.tokens_since_output = 0
            self.known_tokens += request.prompt + request.output
            self.waiting.append((request, request.prompt))

    def _begin(self, now: float) -> bool:
        """Schedule a step at ``now``; return whether there was anything to run."""
        if self.is_wedged(now, NO_STEPS) or now < self.asleep_until:
            return False
        profile = self.profile
        self._preempt()
        self._admit(now)
        decodes = len(self.running) * (1 + profile.drafts)
        self.chunk = 0
        if self.prefilling is not None:
            self.chunk = max(1, min(self.prefilling[1], profile.most_tokens - decodes))
        tokens = decodes + self.chunk
        if not tokens:
            return False
        seconds = profile.base + tokens * profile.per_token
        if self.prefilling is not None:
            context = self.prefilling[0].prompt - self.prefilling[1] + self.chunk / 2
            seconds += profile.per_context * self.chunk * max(context, 0) / 1000
        seconds *= self.random.uniform(1, profile.spread)
        if (size := tokens.bit_length()) not in self.sizes:
            self.sizes.add(size)
            self.compiled += 1
            # Those of the first steps are the longest.
            limit = profile.compile if self.steps < 5 else profile.compile / 2
            seconds += self.random.uniform(0, limit)
        self.started, self.ends, self.tokens = now, now + seconds, tokens
        if self.is_wedged(now, STEP) or self.is_wedged(now, SCHEDULE):
            self.tokens = 0 if self.wedge == SCHEDULE else tokens
            self.ends = max(self.healed_at, self.ends)
        return True

    def _preempt(self) -> None:
        if self.running and self.random.random() < self.profile.preempted:
            _, _, request = self.running.pop()
            heapq.heapify(self.running)
            self.waiting.appendleft((request, request.prompt + request.output // 2))
            self.front_ends[request.front_end].prompt_tokens += request.prompt

    def _admit(self, now: float) -> None:
        if self.prefilling is None and len(self.running) < self.profile.most_running:
            for index, (request, tokens) in enumerate(self.waiting):
                if request.blocked <= now:
                    del self.waiting[index]
                    self.prefilling = request, tokens
                    break

    def _end(self) -> None:
        assert self.started is not None
        seconds = self.ends - self.started
        if seconds > self.longest:
            self.longest, self.longest_tokens = seconds, self.tokens
        self.steps += 1
        self.progressed_at = self.free_at = self.ends
        if self.profile.load and self.random.random() < RARE:
            self.free_at += self.random.uniform(0, self.profile.load)
        self.started = None
        self.tokens_since_output += self.tokens
        for number, front_end in self.front_ends.items():
            # The first front end gets the statistics of each step, others only output.
            if number == 0 or self.running:
                front_end.answer(self.ends)
        if self.is_wedged(self.ends, NO_OUTPUT):
            return
        if self.prefilling is not None:
            request, left = self.prefilling
            self.prefilling = None if left <= self.chunk else (request, left - self.chunk)
            if self.prefilling is None:
                self.front_ends[request.front_end].prompt_tokens -= request.prompt
                self.count += 1
                steps = max(1, request.output // (1 + self.profile.drafts // 2))
                heapq.heappush(self.running, (self.steps + steps, self.count, request))
        if self.running:
            self.output_at = self.ends
            self.tokens_since_output = 0
        while self.running and self.running[0][0] <= self.steps:
            request = heapq.heappop(self.running)[2]
            self.known_tokens -= request.prompt + request.output
            self.front_ends[request.front_end].owed -= 1

    def progress(self, now: float) -> Progress:
        """Return what the core's publisher reports at ``now``."""
        is_open = self.started is not None
        has_requests = bool(self.unfinished)
        is_late = self.tokens_since_output > 2 * max(self.known_tokens, 1)
        # A publisher that was stopped itself blames nobody for that time.
        ages = [now - max(at, self.frozen_until) for at in (self.started or 0, self.progressed_at)]
        condition = STARTING if now < self.starts_until else ASLEEP * (now < self.asleep_until)
        report = Progress(
            0,
            self.steps,
            self.unfinished,
            sum(request.blocked > now for request, _ in self.waiting),
            max(ages[0], 0.0) if is_open else None,
            self.tokens if is_open else 0,
            max(ages[1], 0.0) if has_requests and not is_open else None,
            now - max(self.output_at, self.frozen_until) if has_requests and is_late else None,
            self.longest,
            self.longest_tokens,
            condition,
        )
        self.longest, self.longest_tokens = 0.0, 0
        return report


class Verdict(NamedTuple):
    """Result of an evaluation."""

    at: float
    state: str
    reason: str


class Publisher:
    """Thread of one process that sends heartbeats."""

    def __init__(self, name: str, role: str, random: Random, number: int = 0) -> None:
        self.name = name
        self.role = role
        self.number = number
        self.random = random
        self.due = random.random()
        self.seen_at = -math.inf

    def beat(self, progress: Progress, now: float) -> None:
        """Plan the next heartbeat: earlier if progress is overdue, and never exactly on time."""
        ages = (progress.step_age, progress.waiting_age, progress.output_age)
        is_overdue = any(age is not None and age >= OVERDUE for age in ages)
        late = self.random.random() * 0.3
        if self.random.random() < 0.01:
            late += self.random.random() * 2
        self.due = now + (0.25 if is_overdue else 1.0) + late


def watch(
    core: Core,
    seconds: float,
    *,
    front_ends: int = 0,
    has_core: bool = True,
    pauses: Iterable[tuple[float, float]] = (),
    restarts: Iterable[tuple[float, float]] = (),
    sleeps: Iterable[tuple[float, float]] = (),
) -> Iterator[Verdict]:
    """Run a simulated engine and yield what the exporter says of it each second.

    Args:
        core: The engine.
        seconds: How long.
        front_ends: Front ends that report progress as well.
        has_core: Whether the core reports.
        pauses: When the engine's machine stops, and for how long: no process runs.
        restarts: When the core is replaced, and how long the new one starts up.
        sleeps: When the engine is put to sleep, once idle, and for how long.
    """
    random = core.random
    limits = Thresholds()
    tracker = HealthTracker()
    publishers = [Publisher("core", CORE, random)] if has_core else []
    publishers += [Publisher(f"front/{n}", FRONT_END, random, n) for n in range(front_ends)]
    plan = sorted(
        [(at, "pause", long) for at, long in pauses]
        + [(at, "restart", long) for at, long in restarts]
        + [(at, "sleep", long) for at, long in sleeps]
    )
    evaluation = random.random()
    while evaluation < seconds:
        publisher = min(publishers, key=lambda each: each.due)
        now = min(publisher.due, evaluation)
        core.advance(now)
        if plan and plan[0][0] <= now:
            _, kind, long = plan.pop(0)
            if kind == "restart":
                core.restart(now, now + long)
            elif kind == "sleep" and not core.unfinished and core.started is None:
                core.asleep_until = now + long
            elif kind == "pause":
                core.free_at = max(core.free_at, now) + long
                core.ends += long
                core.frozen_until = now + long
                for each in publishers:
                    each.due += long
                publisher = min(publishers, key=lambda each: each.due)
                continue
        if now == evaluation:
            processes = [
                Process(each.name, each.role, each.seen_at)
                for each in publishers
                if each.seen_at > -math.inf
            ]
            presence = Presence.CONNECTED if processes else Presence.EXPECTED
            health = tracker.health(presence, processes, limits, None, now)
            yield Verdict(now, health.state.value, health.reason.value if health.reason else "")
            evaluation += 1.0
            continue
        if core.is_wedged(now, PUBLISHER) and publisher is publishers[0]:
            publisher.due = core.healed_at
            core.frozen_until = core.healed_at
            continue
        progress = (
            core.progress(now)
            if publisher.role == CORE
            else core.front_ends[publisher.number].progress(now, core.frozen_until)
        )
        publisher.beat(progress, now)
        publisher.seen_at = now
        tracker.report(Process(publisher.name, publisher.role, now), progress, limits, now)
