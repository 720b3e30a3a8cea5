"""The state machine that turns an engine's request events into intervals. Time is part of the events.

The intervals have vLLM's definitions: queue is from QUEUED to the first SCHEDULED, prefill from there
to the first output, decode from the first output to the last, and inference from SCHEDULED to the
last output. An inter-token latency is the time between two consecutive outputs of a request, whatever
happens in between. A preemption therefore lengthens decode and inference, or prefill and the time to
the first token, but never the queue time. An interval whose start is unknown is omitted.
"""

from __future__ import annotations

from itertools import repeat

from sidestep.errors import WireError
from sidestep.protocol.iteration_stats import IterationStats, PromptTokenStats, Run
from sidestep.protocol.request_events import (
    MAX_REQUESTS,
    PREEMPTED,
    RUNNING,
    WAITING,
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
from sidestep.tracking.requests.endings import ABORT, abort, complete, count_ended, ended
from sidestep.tracking.requests.front_end import FrontEndReports
from sidestep.tracking.requests.held_blocks import join_batch, leave_batch
from sidestep.tracking.requests.inflight import MAX_PAUSES, UNKNOWN, InFlight, Request
from sidestep.tracking.requests.interval_rules import Rules
from sidestep.tracking.requests.outcomes import EndedRequest, Outcomes, RequestSink
from sidestep.tracking.requests.parallel_samples import EngineSamples, SampleGroups
from sidestep.tracking.requests.steps import Steps
from sidestep.tracking.requests.traces import Traces

RUN_FROM = 12
"""Equal latencies from which on they are passed on as a run."""
MAX_EXPIRED = 4096
"""Requests that one item may expire; the next item expires more."""


def check(item: RequestEvents) -> None:
    """Check that ``item`` can be applied.

    Raises:
        WireError: Its columns differ in length or are too long.
    """
    size = 0
    for event in item.events:
        if isinstance(event, Iteration):
            if not event.even:
                raise WireError("bad_item", "an iteration's columns differ in length")
            size += event.size
    if size > MAX_REQUESTS:
        raise WireError("too_big", "more requests than a scheduler's item holds")


class RequestTracker:
    """Tracks the requests of one engine.

    Attributes:
        requests: The requests in flight.
        samples: The groups of parallel samples to which they belong.
        source: Identifies the process that numbers the requests.
        steps: The engine's steps.
        has_front_ends: Whether front ends report first tokens and ends, for which requests then wait.
        front_ends: What they have reported.
        traces: Trace contexts of requests whose latencies front ends report.
        sink: Receiver of the requests that end; None: they are not needed.
        block_size: Tokens of a KV block; 0: unknown.

    Args:
        rules: Settings for the interpretation of events.
        sample_groups: The groups of all engines.
        deployment: The engines that may have samples of the same request.
        sink: See the attribute.
    """

    def __init__(
        self,
        rules: Rules | None = None,
        sample_groups: SampleGroups | None = None,
        deployment: str = "",
        sink: RequestSink | None = None,
    ) -> None:
        self.rules = rules or Rules()
        sample_groups = sample_groups or SampleGroups()
        self.requests = InFlight(self.rules.capacity, self.rules.max_age, sample_groups.capacity)
        self.samples = EngineSamples(sample_groups, deployment)
        self.source: int | None = None
        self.steps = Steps()
        self.has_front_ends = False
        self.front_ends = FrontEndReports()
        self.traces = Traces()
        self.sink = sink
        self._notes_gaps = sink is not None
        """Whether each request's longest gap is needed: for a record, or as an exemplar."""
        self.block_size = 0
        self._now = 0.0
        self._max_expired = MAX_EXPIRED
        self._out = Outcomes(IterationStats())

    def apply(self, item: RequestEvents) -> Outcomes:
        """Apply the events of ``item`` and return their outcomes.

        How a stream of events is divided into items does not change the outcomes.

        Raises:
            WireError: See ``check``; nothing was changed.
        """
        check(item)
        self._max_expired = MAX_EXPIRED
        self._out = out = Outcomes(IterationStats(prompt_token_stats=PromptTokenStats()))
        if item.source != self.source:
            self._restart(item.source, item.unseen)
        for event in item.events:
            self._apply_event(event)
            self._expire(event.stamp)
        self.samples.advance(item.known_until)
        self._expire(item.stamp)
        self._count_unknown_groups()
        out.limited, self.requests.limited = self.requests.limited, 0
        out.untracked = self._take_untracked()
        for samples, tokens in self.samples.observed:
            self._observe_group(samples, tokens)
        self.samples.observed.clear()
        return out

    def _restart(self, source: int, unseen: int | None = None) -> None:
        """Drop all requests of an earlier process, since the new one numbers its requests itself."""
        if self.source is not None:
            if unseen is None:
                self.release_held()
                for number, request in self.requests.live.items():
                    self._end(number, request, "engine_died")
            elif self.sink is not None:
                self.sink.lose(unseen)
            self._drop_all("restart", 0)
        self.source = source

    def token_reported(self, arrival: float, at: float) -> float | None:
        """Apply a first token that a front end has received; return the seconds of its hop if known."""
        return self.front_ends.first_token(arrival, at, self.requests.live)

    def end_reported(self, arrival: float, at: float, queue: float | None) -> None:
        """Apply the end of a request that a front end has seen; ``queue`` is its time in the queue."""
        if self.sink is not None:
            self._pass_on(self.front_ends.end_reported(arrival, at, queue))

    def release_overdue(self, now: float) -> bool:
        """Pass on requests for which no front end will report more; return whether there were any."""
        overdue = [*self.front_ends.overdue(now)]
        self._pass_on(*overdue)
        return bool(overdue)

    def release_held(self) -> None:
        """Pass on all requests that wait for front ends."""
        self._pass_on(*self.front_ends.release())

    def _pass_on(self, *ended: EndedRequest | None) -> None:
        for one in ended:
            if one is not None and self.sink is not None:
                self.sink.end(one)

    def _end(self, number: int, request: Request | None, reason: str) -> None:
        """Pass on a request that ended without an event."""
        if self.sink is not None:
            self.sink.end(EndedRequest(number, self.source or 0, request, reason, self._now))

    def _drop_all(self, reason: str, more: int) -> None:
        self.steps = Steps()
        self.front_ends.skip()
        self.samples.abort_all(r.group for r in self.requests.live.values() if r.group)
        self.requests.clear(reason, more)
        self.samples.clear()
        self.samples.interrupt()
        self._count_unknown_groups()

    def _count_unknown_groups(self) -> None:
        self.requests.untracked["samples"] += self.samples.unknown
        self.samples.unknown = 0

    def skip(self, others: int) -> dict[str, int]:
        """Drop all requests, since events were folded instead of sent.

        Args:
            others: Requests that began in the meantime and did not end.

        Returns:
            Requests whose intervals cannot all be known, by reason.
        """
        self._drop_all("folded", others)
        return self._take_untracked()

    def _take_untracked(self) -> dict[str, int]:
        found = {reason: count for reason, count in self.requests.untracked.items() if count}
        self.requests.untracked.clear()
        return found

    @property
    def longest_preemption(self) -> float:
        """Seconds that the longest-waiting preempted request had waited at the latest event."""
        since = next(iter(self.requests.preempted.values()), None)
        return 0.0 if since is None else max(self._now - since, 0.0)

    def close(self) -> dict[str, int]:
        """Drop all requests, since no stream sends their events any more.

        Returns:
            Requests whose intervals cannot all be known, by reason.
        """
        self._restart(-1)
        self.release_held()
        self.samples.close()
        self.requests.close()
        return self._take_untracked()

    def _expire(self, now: float) -> None:
        self._now = now
        self.samples.expire(now)
        for number, request in self.requests.expire(now, self._max_expired):
            self._max_expired -= 1
            self._end(number, request, "expired")
            self._leave(request, now, 0.0, aborted=True)

    def _apply_event(self, event: Event) -> None:
        match event:
            case Iteration():
                self._iteration(event)
            case Queued():
                self._queued(event)
            case Scheduled():
                self._scheduled(event)
            case Preempted():
                self._preempted(event)
            case Finished():
                self._finished(event)
            case Alive():
                self._alive(event)

    def _queued(self, event: Queued) -> None:
        request = self.requests.live.get(event.request)
        if request is not None:
            # A streaming session continues with more input: the engine restarts its timing here.
            request.last = None
        else:
            request = self.requests.track(event.request, event.stamp)
            if request is None:
                return
            request.whole = True
            request.adapter = self.requests.adapter(event.adapter)
            request.lone = not event.group
            request.sample = event.sample
            if event.group and self.samples.join(event.group, event.sample, event.arrival):
                request.group = event.group
        request.fresh = True
        self._identify(request, event)
        request.queued = event.stamp
        request.arrival = event.arrival or None
        request.prompt_tokens = event.prompt_tokens
        self.requests.move(event.request, request, WAITING)

    def _identify(self, request: Request, event: Queued | Alive) -> None:
        request.identity = event.identity
        request.max_tokens = event.max_tokens
        if event.identity is not None and event.identity.trace:
            self._notes_gaps = True
            self.traces.add(event.arrival, event.identity.trace)
        if self.sink is not None:
            request.tenant = self.sink.tenant(event.identity, request.adapter)

    def _scheduled(self, event: Scheduled) -> None:
        request = self.requests.find_or_track(event.request, event.stamp)
        if request is None:
            return
        self._resume(request, event.stamp)
        self._leave_batch(request, event.stamp)
        join_batch(request, event.stamp)
        if request.fresh and (request.scheduled is None or self.rules.scheduled == "last"):
            request.scheduled = event.stamp
        self.requests.move(event.request, request, RUNNING)
        self.requests.prefilling.add(event.request)

    def _resume(self, request: Request, now: float) -> None:
        """End a preemption, because the request is scheduled again or has ended."""
        waited = self._out.between(request.preempted, now)
        if waited is not None:
            self._out.preempted_seconds.append(waited)
            request.preempted_seconds += waited
            if (
                self.sink is not None
                and request.preempted is not None
                and len(request.pauses) < MAX_PAUSES
            ):
                request.pauses += ((request.preempted, waited),)
        request.preempted = None

    def _leave_batch(self, request: Request, now: float) -> None:
        """Count the KV blocks that a request has held."""
        held = leave_batch(request, now, self.block_size)
        self._out.held_micros += held
        if held and request.tenant:
            self._out.of_tenant(request.tenant).held_micros += held

    def _preempted(self, event: Preempted) -> None:
        self._out.iteration.num_preempted_reqs += 1
        request = self.requests.find_or_track(event.request, event.stamp)
        if request is not None:
            request.preempted = event.stamp
            request.preemptions += 1
            self._leave_batch(request, event.stamp)
            self.requests.move(event.request, request, PREEMPTED)

    def _alive(self, event: Alive) -> None:
        request = self.requests.find_or_track(event.request, event.stamp)
        # A request with earlier events may have had output since this event was created.
        if request is None or request.state != UNKNOWN:
            return
        request.adapter = self.requests.adapter(event.adapter)
        self._identify(request, event)
        request.arrival = event.arrival or None
        # A waiting request was never scheduled, so it had no output.
        request.fresh = event.state == WAITING and request.last is None
        request.prompt_tokens = event.prompt_tokens
        self.requests.move(event.request, request, min(event.state, RUNNING))

    def _iteration(self, event: Iteration) -> None:
        self.steps.add(event, self.requests, self._out)
        prompted = sum(self._prompt(prompt, event.stamp) for prompt in event.prompts)
        generated = 0
        for output in event.outputs:
            generated += sum(output.tokens) if output.tokens else len(output.requests)
            self._output(output, event.wall)
            if self.requests.prefilling:
                self.requests.prefilling.difference_update(output.requests)
        self._out.iteration.num_generation_tokens += generated
        if event.outputs:
            self._out.iteration_tokens.append(prompted + generated)

    def _prompt(self, prompt: Prompt, stamp: float) -> int:
        """Count a prompt at its first output; return the tokens that were computed for it."""
        cached = prompt.local + prompt.external
        request = self.requests.find_or_track(prompt.request, stamp)
        if request is not None:
            if request.tenant:
                counts = self._out.of_tenant(request.tenant)
                counts.computed += prompt.computed
                counts.cached += cached
            request.cached = cached
            request.external = prompt.external
            # The next output is its first, whether or not its queueing is known.
            request.fresh = request.last is None
        prompts = self._out.iteration.prompt_token_stats
        if prompts is not None:
            prompts.computed += prompt.computed
            prompts.local_cache_hit += prompt.local
            prompts.external_kv_transfer += prompt.external
            prompts.cached_tokens += cached
            prompts.total += prompt.computed + cached
        return prompt.computed

    def _output(self, output: Output, wall: float) -> None:
        """Observe each request's first output, or the latency since its previous output."""
        stamp, live = output.stamp, self.requests.live
        gaps: list[float] = []
        if output.tokens or self._notes_gaps:
            self._uneven(output, wall, gaps)
        else:
            for number in output.requests:
                request = live.get(number)
                if request is not None and (last := request.last) is not None and stamp > last:
                    gaps.append(stamp - last)
                    request.last = stamp
                    request.tokens += 1
                else:
                    self._begin(number, stamp, wall, 1)
        stats = self._out.iteration
        if len(gaps) >= RUN_FROM and gaps.count(gaps[0]) == len(gaps):
            stats.inter_token_latencies_iter_runs.append(Run(gaps[0], len(gaps)))
        else:
            stats.inter_token_latencies_iter.extend(gaps)

    def _uneven(self, output: Output, wall: float, gaps: list[float]) -> None:
        """Observe outputs with any number of tokens, including none; note what records need."""
        runs = self._out.iteration.inter_token_latencies_iter_runs
        tokens = output.tokens or repeat(1, len(output.requests))
        for number, count in zip(output.requests, tokens, strict=True):
            request = self.requests.live.get(number)
            if request is None or request.last is None or output.stamp <= request.last:
                self._begin(number, output.stamp, wall, count)
                continue
            gap = output.stamp - request.last
            if count > 1 and self.rules.latency == "token":
                runs.append(Run(gap / count, count))
            else:
                gaps.append(gap)
            request.last = output.stamp
            request.tokens += count
            if request.tenant:
                self._out.of_tenant(request.tenant).generated += count
            request.longest_gap = max(request.longest_gap, gap)
            request.extra_tokens += max(count - 1, 0)

    def _begin(self, number: int, stamp: float, wall: float, tokens: int) -> None:
        """Apply an output that has no known earlier output."""
        request = self.requests.find_or_track(number, stamp)
        if request is None:
            return
        request.tokens += tokens
        if request.tenant:
            self._out.of_tenant(request.tenant).generated += tokens
        if request.last is not None:
            # The stamp is not after that of the previous output: there is no interval.
            self._out.omitted += 1
            return
        request.last = stamp
        if not request.fresh:
            return
        request.fresh = False
        request.first = stamp
        waited = self._out.between(request.arrival, wall)
        if waited is not None:
            request.ttft = waited
            self._out.iteration.time_to_first_tokens_iter.append(waited)
            if request.identity is not None:
                self._out.trace(request, wall, {"ttft": waited})
        if self.has_front_ends:
            hop = self.front_ends.output(number, request, wall)
            if hop is not None:
                self._out.hops.append(hop)

    def _finished(self, event: Finished) -> None:
        if event.refused:
            refused = self._out.refused
            refused[event.refused] = refused.get(event.refused, 0) + 1
        # The front end searches for stop strings, and ends the request by the same call as for a
        # client that disconnected. An abort after output of such a request is a found stop string.
        has_stopped = event.stop_strings and event.generation_tokens > 0
        aborted = event.reason == ABORT and not has_stopped
        request = self.requests.remove(event.request)
        if request is not None:
            self._resume(request, event.stamp)
            # Gaps that were divided are no observations.
            if request.longest_gap and not (self.rules.latency == "token" and request.extra_tokens):
                self._out.trace(request, event.wall, {"inter_token": request.longest_gap})
            self._leave_batch(request, event.stamp)
        if aborted:
            abort(event, request, self._out)
        else:
            complete(event, request, self._out)
        if request is not None and request.tenant:
            count_ended(self._out.of_tenant(request.tenant), event, request, aborted=aborted)
        if self.sink is not None:
            found = ended(event, self.source or 0, request, aborted=aborted)
            self._pass_on(self.front_ends.end(found) if self.has_front_ends else found)
        if request is not None:
            self._leave(request, event.stamp, event.wall, aborted=aborted)

    def _leave(self, request: Request, now: float, wall: float, *, aborted: bool) -> None:
        """Remove a request from its group; a request without a group is observed immediately."""
        if request.group:
            has_more = request.last != request.first
            self.samples.leave(
                request.group, now, wall, request.tokens, aborted=aborted, outputs=has_more
            )
        elif request.lone and not aborted:
            self._observe_group(1, request.tokens)

    def _observe_group(self, samples: int, tokens: int) -> None:
        self._out.iteration.n_params_iter.append(samples)
        self._out.iteration.max_num_generation_tokens_iter.append(tokens)
