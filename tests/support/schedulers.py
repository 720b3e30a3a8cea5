"""A fake scheduler that emits legal request events, and a naive model of what follows from them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from hypothesis import strategies as st

from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Iteration,
    Output,
    Preempted,
    Prompt,
    Queued,
    Scheduled,
)
from sidestep.tracking.requests.outcomes import Outcomes

START = 1000.0
WALL = 1_700_000_000.0
ABORT = FINISH_REASONS.index("abort")

ACTIONS = ("ask", "ask_samples", "schedule", "preempt", "step", "step", "step", "finish", "abort")
actions = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7), st.integers(0, 3)), max_size=60
)


@dataclasses.dataclass
class Asked:
    """A request of the fake scheduler."""

    number: int
    prompt: int
    arrival: float
    group: int = 0
    sample: int = 0
    generated: int = 0
    preemptions: int = 0
    begun: bool = False
    prompted: bool = False


class Scheduler:
    """A fake scheduler that turns any actions into a legal sequence of events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.waiting: list[Asked] = []
        self.running: list[Asked] = []
        self.last = 0
        self.now = START

    def run(self, chosen: Iterable[tuple[str, int, int]]) -> list[Event]:
        """Run all actions, finish every request, and return the events."""
        for action, which, amount in chosen:
            self.now += 0.001 + 0.01 * amount
            getattr(self, action)(which, amount)
        while self.running or self.waiting:
            self.now += 0.01
            self.schedule(0, 0)
            self.step(0, 1)
            self.finish(0, 0)
        # Later than the last sample of a group can arrive.
        self.now += 10.0
        self.ask(1, 0)
        return self.events

    def ask(self, which: int, amount: int) -> None:
        """Queue one request."""
        self._queue(10 * which + 1, WALL + self.now - 0.002 * amount)

    def ask_samples(self, which: int, amount: int) -> None:
        """Queue a request of two or more parallel samples."""
        group = self.last + 1000
        for sample in range(amount + 2):
            self._queue(which + 1, WALL + self.now, group, sample)

    def schedule(self, which: int, _: int) -> None:
        """Move a waiting request into the batch."""
        if self.waiting:
            request = self.waiting.pop(which % len(self.waiting))
            self.running.append(request)
            self.events.append(Scheduled(request.number, self.now))

    def preempt(self, which: int, _: int) -> None:
        """Move a request of the batch back to the queue."""
        if self.running:
            request = self.running.pop(which % len(self.running))
            request.preemptions += 1
            self.waiting.insert(0, request)
            self.events.append(Preempted(request.number, self.now))

    def step(self, which: int, amount: int) -> None:
        """Run a step of the batch; some requests without output still compute their prompt."""
        if not self.running:
            return
        served = [r for r in self.running if r.begun or (r.number + which) % 3 or amount]
        prompts = []
        for request in served:
            if not request.prompted:
                request.prompted = True
                cached = request.prompt // 2
                prompts.append(Prompt(request.number, request.prompt - cached, cached, 0))
            request.begun = True
        tokens = [1 + (amount if r.number % 2 else 0) for r in served]
        for request, count in zip(served, tokens, strict=True):
            request.generated += count
        even = all(count == 1 for count in tokens)
        output = Output(self.now, [r.number for r in served], [] if even else tokens)
        scheduled = [5 if r not in served else 1 for r in self.running]
        self.events.append(
            Iteration(
                started=self.now - 0.0005,
                stamp=self.now,
                wall=WALL + self.now,
                outputs=[output] if served else [],
                scheduled=[r.number for r in self.running],
                tokens=scheduled,
                kv_tokens=7,
                prompts=prompts,
            )
        )

    def finish(self, which: int, amount: int) -> None:
        """Finish a request that has output."""
        ready = [request for request in self.running if request.begun]
        if ready:
            self._end(ready[which % len(ready)], min(amount, 1))

    def abort(self, which: int, _: int) -> None:
        """Abort any request."""
        everyone = [*self.running, *self.waiting]
        if everyone:
            self._end(everyone[which % len(everyone)], ABORT)

    def _queue(self, prompt: int, arrival: float, group: int = 0, sample: int = 0) -> None:
        self.last += 1
        self.now += 1e-6
        request = Asked(self.last, prompt, arrival, group, sample)
        self.waiting.append(request)
        self.events.append(Queued(self.last, self.now, arrival, prompt, group=group, sample=sample))

    def _end(self, request: Asked, reason: int) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self.events.append(
            Finished(
                request.number,
                self.now,
                WALL + self.now,
                reason,
                request.prompt,
                request.generated,
                request.preemptions,
            )
        )


@dataclasses.dataclass
class Expected:
    """Sums of a sequence of events, as multisets."""

    first: Counter[float]
    between: Counter[float]
    finished: Counter[tuple[object, ...]]
    aborted: Counter[tuple[object, ...]]
    questions: Counter[tuple[int, int]]
    resumed: Counter[float]
    batches: list[tuple[int, int, int, int, int]]
    generated: int
    preemptions: int
    computed: list[int]


def by_definition(events: Sequence[Event]) -> Expected:
    """Compute the expected result from the definitions, one request at a time and without state."""
    first: Counter[float] = Counter()
    between: Counter[float] = Counter()
    finished: Counter[tuple[object, ...]] = Counter()
    aborted: Counter[tuple[object, ...]] = Counter()
    resumed: Counter[float] = Counter()
    groups: dict[int, list[tuple[int, bool]]] = {}
    for queued in (e for e in events if isinstance(e, Queued)):
        number = queued.request
        outputs = [(i, o, o.requests.index(number)) for i, o in _outputs(events, number)]
        stamps = [output.stamp for _, output, _ in outputs]
        tokens = sum(o.tokens[at] if o.tokens else 1 for _, o, at in outputs)
        scheduled = [e.stamp for e in events if isinstance(e, Scheduled) and e.request == number]
        preempted = [e.stamp for e in events if isinstance(e, Preempted) and e.request == number]
        first.update(iteration.wall - queued.arrival for iteration, _, _ in outputs[:1])
        between.update(b - a for a, b in pairwise(stamps))
        ends = [e for e in events if isinstance(e, Finished) and e.request == number]
        over = [*scheduled[1:], *(end.stamp for end in ends)]
        resumed.update(b - a for a, b in zip(preempted, over, strict=False))
        for end in ends:
            was_aborted = end.reason == ABORT
            groups.setdefault(queued.group or -number, []).append((tokens, was_aborted))
            if was_aborted:
                aborted[queued.prompt_tokens, tokens, end.stamp - queued.stamp] += 1
                continue
            decode = stamps[-1] - stamps[0]
            finished[
                end.reason,
                tokens,
                len(preempted),
                scheduled[0] - queued.stamp,
                stamps[0] - scheduled[0],
                stamps[-1] - scheduled[0],
                decode,
                decode / (tokens - 1) if tokens > 1 else 0.0,
                end.wall - queued.arrival,
            ] += 1
    iterations = [e for e in events if isinstance(e, Iteration)]
    return Expected(
        first,
        between,
        finished,
        aborted,
        Counter(
            (len(samples), max(tokens for tokens, _ in samples))
            for samples in groups.values()
            if not any(was_aborted for _, was_aborted in samples)
        ),
        resumed,
        [_shape(events, e) for e in iterations if e.scheduled],
        sum(sum(o.tokens) or len(o.requests) for e in iterations for o in e.outputs),
        sum(isinstance(e, Preempted) for e in events),
        [
            sum(p.computed for p in e.prompts)
            + sum(sum(o.tokens) or len(o.requests) for o in e.outputs)
            for e in iterations
            if e.outputs
        ],
    )


def _outputs(events: Sequence[Event], number: int) -> Iterator[tuple[Iteration, Output]]:
    for event in events:
        if isinstance(event, Iteration):
            for output in event.outputs:
                if number in output.requests:
                    yield event, output


def _shape(events: Sequence[Event], step: Iteration) -> tuple[int, int, int, int, int]:
    """Return requests and tokens in prefill and in decode, and waiting tokens, before ``step``."""
    before = events[: next(at for at, e in enumerate(events) if e is step)]
    prefill: list[int] = []
    decode: list[int] = []
    for number, tokens in zip(step.scheduled or [], step.tokens, strict=True):
        joined = max(
            at for at, e in enumerate(before) if isinstance(e, Scheduled) and e.request == number
        )
        out = any(True for _ in _outputs(before[joined:], number))
        (decode if out else prefill).append(tokens)
    waiting = 0
    for queued in (e for e in before if isinstance(e, Queued)):
        number = queued.request
        mine = [
            e
            for e in before
            if isinstance(e, Queued | Scheduled | Preempted | Finished) and e.request == number
        ]
        if isinstance(mine[-1], Queued | Preempted):
            outputs = _outputs(before, number)
            made = sum(o.tokens[o.requests.index(number)] if o.tokens else 1 for _, o in outputs)
            waiting += queued.prompt_tokens + made
    return len(prefill), sum(prefill), len(decode), sum(decode), waiting


def found(outcomes: Iterable[Outcomes]) -> Expected:
    """Collect what the state machine made of the events, in the same form."""
    all_of = list(outcomes)
    stats = [outcome.iteration for outcome in all_of]
    between: Counter[float] = Counter()
    for iteration in stats:
        between.update(iteration.inter_token_latencies_iter)
        for run in iteration.inter_token_latencies_iter_runs:
            between[run.value] += run.count
    ended = [r for iteration in stats for r in iteration.finished_requests]
    return Expected(
        Counter(v for iteration in stats for v in iteration.time_to_first_tokens_iter),
        between,
        Counter(
            (
                r.finish_reason,
                r.num_generation_tokens,
                r.num_preemptions,
                r.queued_time,
                r.prefill_time,
                r.inference_time,
                r.decode_time,
                r.mean_time_per_output_token,
                r.e2e_latency,
            )
            for r in ended
            if r.finish_reason != ABORT
        ),
        Counter(
            (a.prompt_tokens, a.generation_tokens, a.seconds) for o in all_of for a in o.aborted
        ),
        Counter(
            pair
            for iteration in stats
            for pair in zip(
                iteration.n_params_iter, iteration.max_num_generation_tokens_iter, strict=True
            )
        ),
        Counter(seconds for o in all_of for seconds in o.preempted_seconds),
        [
            (
                s.prefill_requests,
                s.prefill_tokens,
                s.decode_requests,
                s.decode_tokens,
                s.waiting_tokens,
            )
            for o in all_of
            for s in o.steps
        ],
        sum(iteration.num_generation_tokens for iteration in stats),
        sum(iteration.num_preempted_reqs for iteration in stats),
        [tokens for o in all_of for tokens in o.iteration_tokens],
    )
