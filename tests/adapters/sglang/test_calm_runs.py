"""Runs of an SGLang that works, wake by wake with time as data: none of its engines is ever stalled."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.protocol.messages import CORE, FRONT_END
from sidestep.protocol.progress import Progress
from sidestep.tracking.health.machine import EngineState, HealthTracker, Presence, Process
from sidestep.tracking.health.step_times import Thresholds
from sidestep_adapters.sglang.progress import SchedulerProgress, TokenizerProgress

WAKE, CHUNK, FLUSH = 0.25, 8192, 50
LIMITS = Thresholds()


@dataclasses.dataclass(eq=False)
class Request:
    """A request: tokens of its prompt, those that it gets, and whether it streams them."""

    prompt: int
    output: int
    streams: bool
    computed: int = 0
    generated: int = 0

    def finished(self) -> bool:
        """Return whether it has all its tokens."""
        return self.generated >= self.output


class Kind(enum.Enum):
    """Action of a client or an operator."""

    REQUESTS = "requests"
    IDLE = "idle"
    PAUSE = "pause"
    ADAPTER = "adapter"


@dataclasses.dataclass
class Event:
    """Something that happens to the server, for some seconds or with some requests."""

    kind: Kind
    seconds: float
    requests: list[Request]


class Server:
    """A scheduler and a tokenizer manager with the attributes that are read, and their clock.

    Args:
        per_token: Seconds that a step takes for each token.
        compiles: Seconds that the first step takes.
    """

    def __init__(self, per_token: float, compiles: float) -> None:
        self.scheduler: Any = SimpleNamespaceWithReferences(
            is_initializing=False,
            forward_ct=0,
            cur_batch_for_debug=None,
            running_batch=SimpleNamespace(reqs=[]),
            waiting_queue=[],
            grammar_manager=SimpleNamespace(grammar_queue=[]),
            _engine_paused=False,
        )
        self.manager: Any = SimpleNamespaceWithReferences(
            rid_to_state={},
            last_receive_tstamp=0.0,
            is_pause=False,
            update_lora_adapter_communicator=SimpleNamespace(_result_event=None),
        )
        self.now = self._woken_at = 0.0
        self._per_token, self._compiles = per_token, compiles
        self._parts: list[tuple[Callable[[float], Progress | None], Process, HealthTracker]] = [
            (SchedulerProgress(self.scheduler, 0), Process("core", CORE, 0.0), HealthTracker()),
            (TokenizerProgress(self.manager, 0), Process("front", FRONT_END, 0.0), HealthTracker()),
        ]
        self.states: set[EngineState] = set()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with all wakes in it; the exporter evaluates the engines at each."""
        end = self.now + seconds
        while self._woken_at + WAKE <= end:
            self._woken_at += WAKE
            for read, process, tracker in self._parts:
                progress = read(self._woken_at)
                assert progress is not None
                seen = process._replace(seen_at=self._woken_at)
                tracker.report(seen, progress, LIMITS, self._woken_at)
                health = tracker.health(
                    Presence.CONNECTED, [seen], LIMITS, self._woken_at, self._woken_at
                )
                self.states.add(health.state)
        self.now = end

    def accept(self, requests: list[Request]) -> None:
        """Accept requests in the tokenizer, which hands them to the scheduler."""
        for request in requests:
            sent = SimpleNamespace(input_ids=range(request.prompt))
            self.manager.rid_to_state[str(id(request))] = SimpleNamespace(
                obj=sent, dispatched=True, ttft_observed=False
            )
            self.scheduler.waiting_queue.append(request)

    def step(self) -> bool:
        """Run one step, as far as there is one to run."""
        scheduler, running = self.scheduler, self.scheduler.running_batch.reqs
        prefilled = scheduler.waiting_queue[:1]
        batch = prefilled or running
        if not batch:
            return False
        tokens = min(batch[0].prompt - batch[0].computed, CHUNK) if prefilled else len(running)
        scheduler.forward_ct += 1
        scheduler.cur_batch_for_debug = SimpleNamespace(
            reqs=list(batch),
            extend_num_tokens=tokens,
            forward_mode=SimpleNamespace(is_extend=lambda: bool(prefilled)),
        )
        first = self._compiles if scheduler.forward_ct == 1 else 0.0
        self.pass_time(0.02 + tokens * self._per_token + first)
        if prefilled:
            batch[0].computed += tokens
            if batch[0].computed < batch[0].prompt:
                return True
            running.append(scheduler.waiting_queue.pop(0))
        for request in batch:
            self._generate(request)
        running[:] = [each for each in running if not each.finished()]
        if not running and not scheduler.waiting_queue:
            scheduler.cur_batch_for_debug = None
        return True

    def _generate(self, request: Request) -> None:
        request.generated += 1
        if request.streams or request.finished() or not request.generated % FLUSH:
            self.manager.last_receive_tstamp = self.now
            self.manager.rid_to_state[str(id(request))].ttft_observed = True
        if request.finished():
            del self.manager.rid_to_state[str(id(request))]

    def happen(self, event: Event) -> None:
        """Let ``event`` happen, and some steps with it."""
        if event.kind is Kind.REQUESTS:
            self.accept(event.requests)
        elif event.kind is Kind.PAUSE:
            self.scheduler._engine_paused = self.manager.is_pause = True
            self.pass_time(event.seconds)
            self.scheduler._engine_paused = self.manager.is_pause = False
        elif event.kind is Kind.ADAPTER:
            self.process_input_requests(event.seconds)
        elif not self.scheduler.running_batch.reqs and not self.scheduler.waiting_queue:
            self.pass_time(event.seconds)
        for _ in range(20):
            self.step()

    def process_input_requests(self, seconds: float) -> None:
        """Load an adapter on the scheduler's loop, under the names that SGLang's functions have."""

        def load_lora_adapter() -> None:
            self.pass_time(seconds)

        sent = self.manager.update_lora_adapter_communicator
        sent._result_event = object()
        load_lora_adapter()
        sent._result_event = None
        self.manager.last_receive_tstamp = self.now


class SimpleNamespaceWithReferences(SimpleNamespace):
    """A namespace that weak references can refer to."""


requests = st.builds(
    Request,
    prompt=st.one_of(st.integers(1, 500), st.integers(1, 60_000)),
    output=st.integers(1, 80),
    streams=st.booleans(),
)
events = st.builds(
    Event,
    kind=st.sampled_from(Kind),
    seconds=st.floats(0.0, 100.0),
    requests=st.lists(requests, min_size=1, max_size=4),
)


@settings(max_examples=10)
@given(
    per_token=st.sampled_from([1e-5, 1e-4, 4e-4]),
    compiles=st.sampled_from([0.0, 30.0, 400.0]),
    happening=st.lists(events, min_size=1, max_size=4),
)
def test_a_server_that_works_is_never_stalled(
    per_token: float, compiles: float, happening: list[Event]
) -> None:
    """Compiling, prompts in chunks, bursts, idleness, pauses and adapters are no hang."""
    server = Server(per_token, compiles)
    server.pass_time(1.0)
    server.accept([Request(4, 8, streams=False)])
    while server.step():
        pass
    for event in happening:
        server.happen(dataclasses.replace(event, requests=list(event.requests)))
    while server.step():
        pass
    server.pass_time(120.0)

    assert EngineState.STALLED not in server.states
    assert server.manager.rid_to_state == {}
    assert (EngineState.STARTING in server.states) == (compiles > 0)
