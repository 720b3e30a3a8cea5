"""Requests of a vLLM front end, from what its output processor is given; runs in the publisher thread.

The event loop only hands over numbers, counts and times (see ``output_hook``). Here they become the items
that make vLLM's statistics unnecessary: all events of the requests or, where the engine's core sends
those, the latencies that users see. Needs no vLLM itself.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sidestep.engines.items import Item
from sidestep.engines.vllm.wire import FrontEndLatencies, VllmStep
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.request_events import WHOLE, Identity
from sidestep_adapters.vllm.stats import split

QUEUED, SCHEDULED, PREEMPTED = 1, 2, 3
"""vLLM's ``EngineCoreEventType``."""
ABORT, STOP = map(FINISH_REASONS.index, ("abort", "stop"))
MAX_RECORDS = 1 << 19
"""Most outputs and other records that wait: 10 s of a busy front end.

The publisher takes them several times a second.
"""


class Added(NamedTuple):
    """A request that the front end has accepted, or the next input of a session.

    Attributes:
        arrival: Unix time.
        samples: How many parallel samples its prompt has; 0: it is no sample.
        cached: Cached prompt tokens that another engine has reported; None: none has.
        client: Its client's id, cache salt, trace headers and priority, and its ``join_key``, where they
            may be sent.
        transfer: What it is to its engine, as in ``Queued``.
    """

    number: int
    name: str
    arrival: float
    prompt_tokens: int
    adapter: str | None
    max_tokens: int | None
    samples: int
    cached: int | None
    client: tuple[str, str | None, Mapping[str, str] | None, int, str] | None
    transfer: int = WHOLE


class Special(NamedTuple):
    """An output with more than tokens: a request's first one, or one after a preemption.

    Attributes:
        number: The request's number; None: it has left.
        events: Types and times of what happened to the request in the engine's scheduler.
        is_first: Whether it is the first output of its prompt, or of a session's next input.
        prompt_tokens: Tokens of its prompt; of a session, with all inputs so far. 0: unknown.
        prompt: Those computed, found in the engine's cache, and in an external one; None: unknown.
        corrupted: Whether its logits contained a NaN.
    """

    number: int | None
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
        numbers: The requests; 0: one that has left. Empty if an engine's core sends them.
        tokens: Tokens of each; empty: one each.
        ended: Requests that have ended, and indexes into ``FINISH_REASONS``.
    """

    stamp: float
    wall: float
    received: float
    numbers: Sequence[int]
    tokens: Sequence[int]
    special: Sequence[Special]
    ended: Sequence[tuple[int, int]]


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request that has not ended.

    Attributes:
        arrivals: Unix time of its arrival; of a session, also of the inputs that still wait. 0.0:
            unknown.
        prompt_tokens: Tokens of its prompt; of a session, with all inputs so far.
        engine: Index of its engine; -1: unknown, and none of its events has been sent.
        queued: Engine's time of its entry into the queue; None: unknown.
        scheduled: Engine's time of its first entry into the batch.
        is_answered: Whether its prompt, or a session's current input, has had an output.
    """

    added: Added
    arrivals: deque[float]
    prompt_tokens: int
    identity: Identity | None = None
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
        process: Number of the front end among ``processes`` of the same engines.
        processes: How many there are.

    Attributes:
        numbers: Numbers of the unfinished requests by name; the event loop changes them.
        takes_outputs: Whether outputs without anything special are needed.
        records: Functions that apply what was recorded, and their arguments.
        dropped: Records dropped so far, because too many waited or one could not be used.
    """

    takes_outputs = False

    def __init__(self, fail: Callable[[str], None], process: int = 0, processes: int = 1) -> None:
        self.numbers: dict[str, int] = {}
        self._next_number = itertools.count(processes + process, processes)
        self.records: deque[tuple[Callable[..., None], Any, int]] = deque()
        self.dropped = 0
        self._recorded = self._taken = 0
        self._is_full = False
        self._fail = fail
        self._requests: dict[int, Request] = {}
        self._items: list[Item] = []
        self._has_ended_step = False

    def __len__(self) -> int:
        return len(self.records)

    def number(self, name: str) -> int:
        """Return the number of a request, from which its front end is known."""
        # Two threads that ask at the same time get the same one.
        found = self.numbers.get(name)
        return found or self.numbers.setdefault(name, next(self._next_number))

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
        self.numbers.clear()
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
        known = self._requests.get(added.number)
        if known is None:
            arrivals = deque([added.arrival])
            self._requests[added.number] = Request(added, arrivals, added.prompt_tokens)
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
    def left(
        self, requests: Iterable[tuple[int, int]], reason: int, now: float, wall: float
    ) -> None:
        """Apply the end of requests without an output.

        Args:
            requests: Their numbers, and indexes of their engines; -1: unknown.
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
    ) -> tuple[list[Item], list[Request], dict[int, tuple[str, Any]]]:
        """Return the items of all records, and find the requests of which some were dropped.

        Returns:
            The items; the requests whose end was dropped, which are forgotten; names and states of
            those whose beginning was, by number.
        """
        # The event loop goes on: only what was so before the waiting records is no longer to come.
        known, numbered, before, items = list(self._requests), [*self.numbers], dict(states), []
        while self.records:
            items += self.items()
        for name in numbered:
            if name not in before:
                self.numbers.pop(name, None)
        current = {self.number(name): (name, state) for name, state in before.items()}
        ended = [number for number in known if number not in current and number in self._requests]
        begun = {number: one for number, one in current.items() if number not in self._requests}
        return (
            items,
            [self._requests.pop(number) for number in ended],
            {number: one for number, one in begun.items() if one[0] in states},
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
            request = self._requests.get(special.number or 0)
            if request is None:
                # vLLM ignores outputs after a client has left.
                continue
            follow(request, special)
            if special.is_first:
                found.time_to_first_tokens.append(wall - request.arrival)
        for number, _ in outputs.ended:
            request = self._requests.pop(number, None)
            if request is not None:
                if request.queued is None and not self.dropped:
                    self._fail("a request has no event of its queueing")
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

    def left(self, requests: Iterable[tuple[int, int]], *_when: float) -> None:
        """Forget requests whose clients have left: they have no latencies."""
        for number, _ in requests:
            self._requests.pop(number, None)

    def skip(self) -> None:
        """Forget the latencies of the step."""
        self._latencies = None


def follow(request: Request, special: Special) -> None:
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
