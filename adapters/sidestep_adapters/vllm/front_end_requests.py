"""Requests of a vLLM front end, from what its output processor is given; runs in the publisher thread.

The event loop only hands over ids, counts and times (see ``output_hook``). Here they become the items
that make vLLM's statistics unnecessary: all events of the requests or, where the engine's core sends
those, the latencies that users see. Needs no vLLM itself.
"""

from __future__ import annotations

import abc
import dataclasses
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sidestep.engines.items import Item
from sidestep.engines.vllm.wire import FrontEndLatencies, VllmStep
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.limits import printable
from sidestep.protocol.request_events import (
    RUNNING,
    Alive,
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
from sidestep_adapters.publisher.request_identity import IdentityMaker, identity_maker
from sidestep_adapters.vllm.description import Description
from sidestep_adapters.vllm.event_batches import batches, parallel_sample
from sidestep_adapters.vllm.stats import split

QUEUED, SCHEDULED, PREEMPTED = 1, 2, 3
"""vLLM's ``EngineCoreEventType``."""
ABORT, STOP = map(FINISH_REASONS.index, ("abort", "stop"))
MAX_RECORDS = 1 << 19
"""Most outputs and other records that wait: 60 MB, or 10 s of a busy front end.

The publisher takes them several times a second.
"""


class Added(NamedTuple):
    """A request that the front end has accepted, or the next input of a session.

    Attributes:
        arrival: Unix time.
        samples: How many parallel samples its prompt has; 0: it is no sample.
        cached: Cached prompt tokens that another engine has reported; None: none has.
        client: Its client's id, cache salt, trace headers and priority, where they may be sent.
    """

    name: str
    arrival: float
    prompt_tokens: int
    adapter: str | None
    max_tokens: int | None
    samples: int
    cached: int | None
    client: tuple[str, str | None, Mapping[str, str] | None, int] | None


class Special(NamedTuple):
    """An output with more than tokens: a request's first one, or one after a preemption.

    Attributes:
        events: Types and times of what happened to the request in the engine's scheduler.
        is_first: Whether it is the first output of its prompt, or of a session's next input.
        prompt_tokens: Tokens of its prompt; of a session, with all inputs so far. 0: it has left.
        prompt: Those computed, found in the engine's cache, and in an external one; None: unknown.
        corrupted: Whether its logits contained a NaN.
    """

    name: str
    events: Sequence[tuple[int, float]]
    is_first: bool
    prompt_tokens: int
    prompt: tuple[int, int, int] | None
    corrupted: bool


class Outputs(NamedTuple):
    """Outputs of an engine's step, or of a part of it.

    Attributes:
        stamp: The engine's time of the step.
        wall: Unix time at which the front end received the step.
        received: Its monotonic time then.
        ended: Requests that have ended, and indexes into ``FINISH_REASONS``.
    """

    stamp: float
    wall: float
    received: float
    names: Sequence[str]
    tokens: Sequence[int]
    special: Sequence[Special]
    ended: Sequence[tuple[str, int]]


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request that has not ended.

    Attributes:
        arrivals: Unix time of its arrival; of a session, also of the inputs that still wait. 0.0:
            unknown.
        prompt_tokens: Tokens of its prompt; of a session, with all inputs so far.
        number: Its number in events; 0: none has been sent.
        engine: Index of its engine; -1: unknown.
        queued: Engine's time of its entry into the queue; None: unknown.
        scheduled: Engine's time of its first entry into the batch.
        is_answered: Whether its prompt, or a session's current input, has had an output.
    """

    added: Added
    arrivals: deque[float]
    prompt_tokens: int
    identity: Identity | None = None
    number: int = 0
    engine: int = -1
    tokens: int = 0
    preemptions: int = 0
    queued: float | None = None
    scheduled: float | None = None
    is_answered: bool = False
    is_corrupted: bool = False

    @property
    def arrival(self) -> float:
        """Unix time of the arrival of the current input."""
        return self.arrivals[0]


class FrontEndRequests(abc.ABC):
    """The requests of one front end, and what the event loop has recorded of them.

    Args:
        fail: Called inside ``except`` with a description of the problem.

    Attributes:
        records: Functions that apply what was recorded, and their arguments.
        dropped: Records dropped so far because too many waited.
    """

    def __init__(self, fail: Callable[[str], None]) -> None:
        self.records: deque[tuple[Callable[..., None], Any, int]] = deque()
        self.dropped = 0
        self._recorded = self._taken = 0
        self._is_full = False
        self._fail = fail
        self._requests: dict[str, Request] = {}
        self._items: list[Item] = []
        self._has_ended_step = False

    def __len__(self) -> int:
        return len(self.records)

    def record(self, apply: Callable[..., None], *args: Any, size: int = 1) -> None:
        """Record that ``apply`` is to be called; on the event loop.

        After too many, all are dropped until none waits, so that one gap is left instead of several.
        """
        if self._is_full or self._recorded - self._taken > MAX_RECORDS:
            self._is_full = True
            self.dropped += 1
            return
        self._recorded += size
        self.records.append((apply, args, size))

    def clear(self) -> None:
        """Forget everything; in a forked child it belongs to the parent."""
        self.records.clear()
        self._taken, self._is_full = self._recorded, False
        self._requests.clear()
        self.skip()
        self._items.clear()

    def close(self) -> None:
        """Discard all records, and accept no more."""
        self.clear()
        self._is_full = True

    def items(self) -> list[Item]:
        """Return the items of what was recorded, until the end of a step."""
        self._has_ended_step = False
        while self.records and not self._has_ended_step:
            apply, args, size = self.records.popleft()
            self._taken += size
            try:
                apply(*args)
            except Exception:  # noqa: BLE001 - an invalid value drops its own record only
                self._fail("a front end's record could not be read")
                self.dropped += 1
        if self._is_full and not self.records:
            self.skip()
            self._is_full = False
        made, self._items = self._items, []
        return made

    def added(self, added: Added) -> None:
        """Apply an accepted request, or the next input of a session."""
        known = self._requests.get(added.name)
        if known is None:
            arrivals = deque([added.arrival])
            self._requests[added.name] = Request(added, arrivals, added.prompt_tokens)
        else:
            known.arrivals.append(added.arrival)
            known.added = added

    @abc.abstractmethod
    def outputs(self, outputs: Outputs) -> None:
        """Apply outputs of a step."""

    @abc.abstractmethod
    def step_ended(self, engine: int, is_slice: bool) -> None:
        """Apply the end of the step of ``engine``; ``is_slice``: another front end has more of it."""

    @abc.abstractmethod
    def left(self, names: Iterable[tuple[str, int]], reason: int, now: float, wall: float) -> None:
        """Apply the end of requests without an output.

        Args:
            names: The requests, and indexes of their engines; -1: unknown.
            reason: Index into ``FINISH_REASONS``.
            now: Monotonic time.
            wall: Unix time.
        """

    def periodic_items(self) -> list[Item]:
        """Return items about once a second."""
        return []

    def current_state(self) -> list[Item]:
        """Return the items that a restarted exporter needs."""
        return []

    @abc.abstractmethod
    def skip(self) -> None:
        """Forget the step that is being recorded, since records are missing."""

    def resync(self, states: Mapping[str, Any]) -> list[Item]:
        """Return items after some were dropped; ``states`` has the front end's requests by name."""
        items, _, _ = self._compare(states)
        return items

    def _compare(
        self, states: Mapping[str, Any]
    ) -> tuple[list[Item], list[Request], dict[str, Any]]:
        """Return the items of all records, and find the requests of which some were dropped.

        Returns:
            The items; the requests whose end was dropped, which are forgotten; the states of those
            whose beginning was.
        """
        # The event loop goes on: only what was so before the waiting records is no longer to come.
        known, before, items = list(self._requests), dict(states), []
        while self.records:
            items += self.items()
        ended = [name for name in known if name not in before and name in self._requests]
        begun = {name: state for name, state in before.items() if name not in self._requests}
        return (
            items,
            [self._requests.pop(name) for name in ended],
            {name: state for name, state in begun.items() if name in states},
        )


class FrontEndLatencyItems(FrontEndRequests):
    """Maker of the latencies that users see, where the engine's core sends all else."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        super().__init__(fail)
        self._latencies: FrontEndLatencies | None = None

    def outputs(self, outputs: Outputs) -> None:
        """Note first tokens and ends."""
        wall = outputs.wall
        found = self._latencies
        if found is None:
            found = self._latencies = FrontEndLatencies(wall, [], [], [])
        for special in outputs.special:
            request = self._requests.get(special.name)
            if request is None:
                # vLLM ignores outputs after a client has left.
                continue
            _follow(request, special)
            if special.is_first:
                found.time_to_first_tokens.append(wall - request.arrival)
        for name, _ in outputs.ended:
            request = self._requests.pop(name, None)
            if request is not None:
                waited = (request.scheduled or 0.0) - (request.queued or 0.0)
                found.e2e_latencies.append(wall - request.arrival)
                found.queue_times.append(max(waited, 0.0))

    def step_ended(self, engine: int, is_slice: bool) -> None:  # noqa: ARG002 - see the base
        """Make the step's item, unless nobody has waited for its outputs."""
        self._has_ended_step = True
        found, self._latencies = self._latencies, None
        if found is not None and (found.time_to_first_tokens or found.e2e_latencies):
            step = VllmStep(engine, time.monotonic(), time.time(), front_end=found)
            self._items += split(step)

    def left(self, names: Iterable[tuple[str, int]], reason: int, now: float, wall: float) -> None:  # noqa: ARG002 - see the base
        """Forget requests whose clients have left: they have no latencies."""
        for name, _ in names:
            self._requests.pop(name, None)

    def skip(self) -> None:
        """Forget the latencies of the step."""
        self._latencies = None


def _follow(request: Request, special: Special) -> None:
    """Apply what happened to a request in the scheduler, as vLLM's front end does."""
    request.prompt_tokens = special.prompt_tokens or request.prompt_tokens
    if special.is_first:
        if request.is_answered and len(request.arrivals) > 1:
            # A session continues with its next input.
            request.arrivals.popleft()
        request.is_answered = True
    for kind, stamp in special.events:
        if kind == QUEUED:
            request.queued = stamp
        elif kind == SCHEDULED and request.scheduled is None:
            request.scheduled = stamp
        elif kind == PREEMPTED:
            request.preemptions += 1


@dataclasses.dataclass(slots=True)
class _Step:
    """What is known of a step until its last output is recorded.

    Attributes:
        events: What has happened to its requests before it.
        later: What happened after it: ends, and next inputs of sessions.
        begun: Requests that have had no event before it.
    """

    stamp: float
    wall: float
    received: float
    events: list[Event] = dataclasses.field(default_factory=list)
    numbers: list[int] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    prompts: list[Prompt] = dataclasses.field(default_factory=list)
    later: list[Event] = dataclasses.field(default_factory=list)
    begun: list[Request] = dataclasses.field(default_factory=list)


class RequestEventItems(FrontEndRequests):
    """Maker of the events of requests, where no tap in the engine's core sends them.

    A request's first event is sent with its first output, since only then its engine is known.

    Args:
        fail: See the base class.
        engines: How many engines the front end has.
        process: Its number among ``processes`` front ends of the same engines.
        processes: How many there are.
        identities: Maker of the identities that are sent.
    """

    def __init__(
        self,
        fail: Callable[[str], None],
        engines: int,
        process: int,
        processes: int,
        identities: IdentityMaker,
    ) -> None:
        super().__init__(fail)
        self._engines = engines
        self._process = process
        self._processes = processes
        self._identities = identities
        self._source = secrets.randbits(40)
        self._last_number = 0
        self._step: _Step | None = None
        self._left: dict[int, list[Event]] = {}
        self._clocks: dict[int, tuple[float, float]] = {}
        """By engine, its time at its last step, and the monotonic time here when it was received."""

    def outputs(self, outputs: Outputs) -> None:
        """Add outputs to their step."""
        step, requests = self._step, self._requests
        if step is None:
            step = self._step = _Step(outputs.stamp, outputs.wall, outputs.received)
        for special in outputs.special:
            request = requests.get(special.name)
            if request is not None:
                self._apply_special(step, request, special)
        numbers, tokens = step.numbers, step.tokens
        for name, count in zip(outputs.names, outputs.tokens, strict=True):
            request = requests.get(name)
            if request is not None:
                request.tokens += count
                numbers.append(request.number or self._begin(step, request))
                tokens.append(count)
        for name, reason in outputs.ended:
            request = requests.pop(name, None)
            if request is not None:
                step.later.append(self._finished(request, outputs.stamp, outputs.wall, reason))

    def _apply_special(self, step: _Step, request: Request, special: Special) -> None:
        _follow(request, special)
        number = request.number or self._begin(step, request)
        for index, (kind, stamp) in enumerate(special.events):
            if kind == QUEUED and (index or not special.is_first):
                # With the last output of a session's input, its next one is queued already.
                following = [*request.arrivals, 0.0][1]
                step.later.append(self._queued(request, stamp, following))
            elif kind == QUEUED:
                step.events.append(self._queued(request, stamp, request.arrival))
            elif kind == SCHEDULED:
                step.events.append(Scheduled(number, stamp))
            elif kind == PREEMPTED:
                step.events.append(Preempted(number, stamp))
        request.is_corrupted |= special.corrupted
        if special.is_first and special.prompt is not None:
            step.prompts.append(Prompt(number, *special.prompt))

    def _begin(self, step: _Step | None, request: Request) -> int:
        """Give a request its number, from which its process is known."""
        self._last_number += 1
        request.number = self._last_number * self._processes + self._process
        client = request.added.client
        if client is not None and self._identities.is_on:
            request.identity = self._identities.make(*client)
        if step is not None:
            step.begun.append(request)
        return request.number

    def _queued(self, request: Request, stamp: float, arrival: float) -> Queued:
        added = request.added
        event = Queued(request.number, stamp, arrival, request.prompt_tokens)
        event.adapter = printable(added.adapter or "")
        if added.samples > 1:
            event.group, event.sample = parallel_sample(added.name)
            event.samples = added.samples
        event.identity, event.max_tokens = request.identity, added.max_tokens
        return event

    def _finished(self, request: Request, stamp: float, wall: float, reason: int) -> Finished:
        event = Finished(request.number, stamp, wall, reason, request.prompt_tokens)
        event.generation_tokens = request.tokens
        event.preemptions = request.preemptions
        event.max_tokens = request.added.max_tokens
        event.corrupted = request.is_corrupted
        event.cached_tokens = request.added.cached
        return event

    def step_ended(self, engine: int, is_slice: bool) -> None:
        """Make the items of the step, and of requests that have left since the step before."""
        self._has_ended_step = True
        step, self._step = self._step, None
        if step is not None:
            self._clocks[engine] = step.stamp, step.received
            for request in step.begun:
                request.engine = engine
            even = step.tokens.count(1) == len(step.tokens)
            output = Output(step.stamp, step.numbers, [] if even else step.tokens)
            # Which requests the engine's batch had, only its core knows.
            done = Iteration(step.stamp, step.stamp, step.wall, [output], [], prompts=step.prompts)
            done.is_slice = is_slice
            self._add(engine, [*step.events, done, *step.later])
        self._add_left()

    def _add_left(self) -> None:
        left, self._left = self._left, {}
        for engine, events in left.items():
            self._add(engine, events)

    def left(self, names: Iterable[tuple[str, int]], reason: int, now: float, wall: float) -> None:
        """End requests; after the step that is being recorded, which may have outputs of them."""
        for name, index in names:
            request = self._requests.pop(name, None)
            if request is None:
                continue
            engine = max(request.engine if request.engine >= 0 else index, 0)
            stamp = self._engine_time(engine, now)
            events = self._left.setdefault(engine, [])
            if not request.number:
                self._begin(None, request)
                if request.arrival:
                    waited = max(wall - request.arrival, 0.0)
                    queued = self._queued(request, max(stamp - waited, 0.0), request.arrival)
                    events.append(queued)
            events.append(self._finished(request, stamp, wall, reason))
        if self._step is None:
            self._add_left()

    def periodic_items(self) -> list[Item]:
        """Return items that advance the exporter's clocks of idle engines."""
        now = time.monotonic()
        return [self._item(engine, self._engine_time(engine, now), []) for engine in self._clocks]

    def current_state(self) -> list[Item]:
        """Return the requests in flight, for an exporter that did not receive their events."""
        now = time.monotonic()
        for engine in range(self._engines):
            stamp = self._engine_time(engine, now)
            self._add(
                engine,
                [
                    self._alive(request, stamp)
                    for request in self._requests.values()
                    if request.number and request.engine == engine
                ],
            )
        made, self._items = self._items, []
        return made

    def _alive(self, request: Request, stamp: float) -> Alive:
        added = request.added
        event = Alive(request.number, stamp, RUNNING, request.arrival, request.prompt_tokens)
        event.adapter = printable(added.adapter or "")
        event.identity, event.max_tokens = request.identity, added.max_tokens
        return event

    def skip(self) -> None:
        """Forget the step; requests that began in it begin with their next outputs."""
        step, self._step = self._step, None
        if step is not None:
            for request in step.begun:
                request.number = 0
        self._add_left()

    def resync(self, states: Mapping[str, Any]) -> list[Item]:
        """Restart the stream of events with the requests that the front end has now."""
        items, ended, begun = self._compare(states)
        for name, state in begun.items():
            lost = Added(name, 0.0, state.prompt_len, state.lora_name, None, 0, None, None)
            answered = not state.is_prefilling
            self._requests[name] = Request(
                lost, deque([0.0]), state.prompt_len, is_answered=answered
            )
        self.skip()
        items += self.items()
        self._source = secrets.randbits(40)
        alive = self.current_state()
        told = {item.engine for item in alive}
        now = time.monotonic()
        alive += [
            self._item(engine, self._engine_time(engine, now), [])
            for engine in self._clocks
            if engine not in told
        ]
        for item in alive:
            if isinstance(item, RequestEvents) and item.engine in self._clocks:
                item.unseen = sum(request.engine == item.engine for request in ended)
        return [*items, *alive]

    def _engine_time(self, engine: int, now: float) -> float:
        """Return the time of an engine, whose host may be another one, at the monotonic time ``now``."""
        stamp, at = self._clocks.get(engine, (now, now))
        return stamp + max(now - at, 0.0)

    def _add(self, engine: int, events: Sequence[Event]) -> None:
        if events:
            stamp = self._engine_time(engine, time.monotonic())
            self._items += [self._item(engine, stamp, some) for some in batches(events)]

    def _item(self, engine: int, stamp: float, events: list[Event]) -> RequestEvents:
        item = RequestEvents(engine, stamp, self._source, events)
        item.process, item.processes = self._process, self._processes
        return item


def front_end_requests(description: Description, fail: Callable[[str], None]) -> FrontEndRequests:
    """Return the maker of what a front end sends of its requests."""
    if description.role == "front_end":
        return FrontEndLatencyItems(fail)
    number, count = description.api_server, description.api_servers
    return RequestEventItems(fail, len(description.engines), number, count, identity_maker())
