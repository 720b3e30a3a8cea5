"""Events of a vLLM front end's requests, where no tap in the engine's core sends them.

Runs in the publisher thread; see ``front_end_requests``.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sidestep.engines.items import Item
from sidestep.protocol.limits import printable
from sidestep.protocol.request_events import (
    RUNNING,
    Alive,
    Event,
    Finished,
    Iteration,
    Output,
    Preempted,
    Prompt,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep_adapters.publisher.request_identity import IdentityMaker, identity_maker
from sidestep_adapters.publisher.translate import client_count
from sidestep_adapters.vllm.description import Description
from sidestep_adapters.vllm.event_batches import batches, parallel_sample
from sidestep_adapters.vllm.front_end_requests import (
    PREEMPTED,
    QUEUED,
    SCHEDULED,
    Added,
    FrontEndLatencyItems,
    FrontEndRequests,
    Outputs,
    Request,
    Special,
    follow,
)


@dataclasses.dataclass(slots=True)
class _Step:
    """What is known of a step until its last output is recorded.

    Attributes:
        events: What has happened to its requests before it.
        later: What happened after it: ends, and next inputs of sessions.
        tokens: Of each request; empty: one each.
        begun: Numbers of requests that have had no event before it.
    """

    stamp: float
    wall: float
    received: float
    events: list[Event] = dataclasses.field(default_factory=list)
    numbers: list[int] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    prompts: list[Prompt] = dataclasses.field(default_factory=list)
    later: list[Event] = dataclasses.field(default_factory=list)
    begun: set[int] = dataclasses.field(default_factory=set)


class RequestEventItems(FrontEndRequests):
    """Maker of the events of requests, where no tap in the engine's core sends them.

    A request's first event is sent with its first output, since only then its engine is known.

    Args:
        engines: How many engines the front end has.
        process: Its number among ``processes`` front ends of the same engines.
        processes: How many there are.
        identities: Maker of the identities that are sent.
    """

    takes_outputs = True

    def __init__(
        self,
        fail: Callable[[str], None],
        engines: int,
        process: int,
        processes: int,
        identities: IdentityMaker,
    ) -> None:
        super().__init__(fail, process, processes)
        self._engines = engines
        self._process = process
        self._processes = processes
        self._identities = identities
        self._source = secrets.randbits(40)
        self._unplaced: set[int] = set()
        """Numbers of requests whose engine is unknown."""
        self._step: _Step | None = None
        self._left: dict[int, list[Event]] = {}
        self._clocks: dict[int, tuple[float, float]] = {}
        """By engine, its time at its last step, and the monotonic time here when it was received."""

    def clear(self) -> None:  # noqa: D102 - see the base
        super().clear()
        self._unplaced.clear()

    def added(self, added: Added) -> None:  # noqa: D102 - see the base
        is_new = added.number not in self._requests
        super().added(added)
        if is_new:
            self._unplaced.add(added.number)
            if added.client is not None and self._identities.is_on:
                identity = self._identities.make(*added.client)
                self._requests[added.number].identity = identity

    def outputs(self, outputs: Outputs) -> None:
        """Add outputs to their step."""
        step = self._step
        if step is None:
            step = self._step = _Step(outputs.stamp, outputs.wall, outputs.received)
        for special in outputs.special:
            request = self._requests.get(special.number or 0)
            if request is not None:
                self._apply_special(step, request, special)
        self._add_tokens(step, outputs)
        for number, reason in outputs.ended:
            request = self._remove(number)
            if request is not None:
                step.later.append(self._finished(request, outputs.stamp, outputs.wall, reason))

    def _add_tokens(self, step: _Step, outputs: Outputs) -> None:
        requests = self._requests
        known = [number for number in outputs.numbers if number in requests]
        tokens = outputs.tokens
        if tokens and len(known) < len(outputs.numbers):
            pairs = zip(outputs.numbers, tokens, strict=True)
            tokens = [count for number, count in pairs if number in requests]
        if tokens:
            for number, count in zip(known, tokens, strict=True):
                requests[number].tokens += count
        else:
            for number in known:
                requests[number].tokens += 1
        if tokens or step.tokens:
            step.tokens = step.tokens or [1] * len(step.numbers)
            step.tokens += tokens or [1] * len(known)
        step.numbers += known
        if self._unplaced:
            new = self._unplaced.intersection(known) - step.begun
            step.begun |= new
            for request in map(requests.__getitem__, new):
                if request.queued is None and request.arrival:
                    if not self.dropped:
                        self._fail("a request has no event of its queueing")
                    step.events.insert(0, self._queued_since(request, step.stamp, step.wall))

    def _apply_special(self, step: _Step, request: Request, special: Special) -> None:
        follow(request, special)
        number = request.added.number
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

    def _remove(self, number: int) -> Request | None:
        self._unplaced.discard(number)
        return self._requests.pop(number, None)

    def _queued(self, request: Request, stamp: float, arrival: float) -> Queued:
        added = request.added
        event = Queued(added.number, stamp, arrival, request.prompt_tokens)
        event.adapter = printable(added.adapter or "")
        if added.samples > 1:
            event.group, event.sample = parallel_sample(added.name)
            event.samples = added.samples
        event.identity, event.max_tokens = request.identity, client_count(added.max_tokens)
        event.transfer = added.transfer
        return event

    def _queued_since(self, request: Request, stamp: float, wall: float) -> Queued:
        """Return the event of a request that was queued when it arrived; ``stamp`` is at ``wall``."""
        waited = max(wall - request.arrival, 0.0)
        return self._queued(request, max(stamp - waited, 0.0), request.arrival)

    def _finished(self, request: Request, stamp: float, wall: float, reason: int) -> Finished:
        event = Finished(request.added.number, stamp, wall, reason, request.prompt_tokens)
        event.generation_tokens = request.tokens
        event.preemptions = request.preemptions
        event.max_tokens = client_count(request.added.max_tokens)
        event.corrupted = request.is_corrupted
        event.cached_tokens = client_count(request.added.cached)
        event.transfer = request.added.transfer
        return event

    def step_ended(self, engine: int, is_slice: bool) -> None:
        """Make the items of the step, and of requests that have left since the step before."""
        self._has_ended_step = True
        step, self._step = self._step, None
        if step is not None:
            self._clocks[engine] = step.stamp, step.received
            for number in step.begun:
                self._place(number, engine)
            output = Output(step.stamp, step.numbers, step.tokens)
            # Which requests the engine's batch had, only its core knows.
            done = Iteration(step.stamp, step.stamp, step.wall, [output], [], prompts=step.prompts)
            done.is_slice = is_slice
            self._add(engine, [*step.events, done, *step.later])
        self._add_left()

    def _place(self, number: int, engine: int) -> None:
        self._unplaced.discard(number)
        request = self._requests.get(number)
        if request is not None:
            request.engine = engine

    def _add_left(self) -> None:
        left, self._left = self._left, {}
        for engine, events in left.items():
            self._add(engine, events)

    def left(
        self, requests: Iterable[tuple[int, int]], reason: int, now: float, wall: float
    ) -> None:
        """End requests; after the step that is being recorded, which may have outputs of them."""
        for number, index in requests:
            request = self._remove(number)
            if request is None:
                continue
            engine = max(request.engine if request.engine >= 0 else index, 0)
            stamp = self._engine_time(engine, now)
            events = self._left.setdefault(engine, [])
            has_begun = request.engine >= 0 or (self._step and number in self._step.begun)
            if not has_begun and request.arrival:
                events.append(self._queued_since(request, stamp, wall))
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
                    if request.engine == engine
                ],
            )
        made, self._items = self._items, []
        return made

    def _alive(self, request: Request, stamp: float) -> Alive:
        added = request.added
        event = Alive(added.number, stamp, RUNNING, request.arrival, request.prompt_tokens)
        event.adapter = printable(added.adapter or "")
        event.identity, event.max_tokens = request.identity, client_count(added.max_tokens)
        event.transfer = added.transfer
        return event

    def skip(self) -> None:
        """Forget the step; requests that began in it begin with their next outputs."""
        self._step = None
        self._add_left()

    def resync(self, states: Mapping[str, Any]) -> list[Item]:
        """Restart the stream of events with the requests that the front end has now."""
        items, ended, begun = self._compare(states)
        for number, (name, state) in begun.items():
            lost = Added(number, name, 0.0, state.prompt_len, state.lora_name, None, 0, None, None)
            self.added(lost)
            self._requests[number].is_answered = not state.is_prefilling
        for request in ended:
            self._unplaced.discard(request.added.number)
        self.skip()
        items += self.items()
        self._source = secrets.randbits(40)
        alive = self.current_state()
        with_requests = {item.engine for item in alive}
        now = time.monotonic()
        alive += [
            self._item(engine, self._engine_time(engine, now), [])
            for engine in self._clocks
            if engine not in with_requests
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
            parts = batches(events, self._lose)
            self._items += [self._item(engine, stamp, some) for some in parts]

    def _lose(self, problem: str) -> None:
        self._fail(problem)
        self.dropped += 1

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
