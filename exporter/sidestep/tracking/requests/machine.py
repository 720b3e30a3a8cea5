"""The state machine that turns an engine's request events into intervals. Time is part of the events.

The intervals have vLLM's definitions: queue is from QUEUED to the first SCHEDULED, prefill from there
to the first output, decode from the first output to the last, and inference from SCHEDULED to the
last output. An inter-token latency is the time between two consecutive outputs of a request. A
preemption lengthens the intervals during which it happens, but never the queue time. An interval
whose start is unknown is omitted.
"""

from __future__ import annotations

from sidestep.errors import WireError
from sidestep.protocol.iteration_stats import IterationStats, PromptTokenStats
from sidestep.protocol.messages import PREFILL
from sidestep.protocol.request_events import (
    HANDED_OVER,
    MAX_REQUESTS,
    PREEMPTED,
    RUNNING,
    WAITING,
    WHOLE,
    Alive,
    Event,
    Finished,
    Iteration,
    Preempted,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.tracking.requests import endings
from sidestep.tracking.requests.front_end import CountEnded, FrontEndReports, Traces
from sidestep.tracking.requests.inflight import MAX_PAUSES, UNKNOWN, InFlight, Request
from sidestep.tracking.requests.limits import LimitTimes
from sidestep.tracking.requests.outcomes import EndedRequest, Outcomes, RequestSink
from sidestep.tracking.requests.outputs import OutputTracker
from sidestep.tracking.requests.parallel_samples import EngineSamples, SampleGroups
from sidestep.tracking.requests.parts import PartsTracker
from sidestep.tracking.requests.settings import RequestSettings

MAX_EXPIRED = 4096
"""Requests that one item may expire; the next item expires more."""


def check(item: RequestEvents) -> None:
    """Reject an item that cannot be applied."""
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
        samples: The groups of parallel samples to which they belong.
        processes: How many processes number the requests: the engine's core, or its front ends.
        sources: Identifies each of them, by its number.
        reports: Reports of the front ends, and requests that have ended.
        traces: Trace contexts of requests whose latencies front ends report.
        block_size: Tokens of a KV block; 0: unknown.

    Args:
        deployment: Name that the engines share which may have samples of the same request.
        sink: Receiver of the requests that end; None: they are not needed.
    """

    def __init__(
        self,
        settings: RequestSettings | None = None,
        sample_groups: SampleGroups | None = None,
        deployment: str = "",
        sink: RequestSink | None = None,
        count: CountEnded | None = None,
    ) -> None:
        self.settings = settings or RequestSettings()
        sample_groups = sample_groups or SampleGroups()
        self.requests = InFlight(
            self.settings.capacity, self.settings.max_age, sample_groups.capacity
        )
        self.samples = EngineSamples(sample_groups, deployment)
        self.processes = 1
        self.sources: dict[int, int] = {}
        self.reports = FrontEndReports(sink, count)
        self.parts = PartsTracker()
        self.outputs = OutputTracker(
            self.requests,
            self.reports,
            self.parts,
            self.settings.latency,
            notes_gaps=sink is not None and sink.needs_gaps,
        )
        self.limits = LimitTimes()
        self.traces = Traces()
        self._sink = sink
        self.block_size = 0
        self._now = 0.0
        self._max_expired = MAX_EXPIRED
        self._out = Outcomes(IterationStats())

    def apply(self, item: RequestEvents) -> Outcomes:
        """Apply the events of ``item`` and return their outcomes.

        ``check`` has accepted it. The division of a stream of events into items does not change the outcomes.
        """
        self._max_expired = MAX_EXPIRED
        self._out = out = Outcomes(IterationStats(prompt_token_stats=PromptTokenStats()))
        if item.processes != self.processes or item.source != self.sources.get(item.process):
            self._restart(item)
        for event in item.events:
            self._apply_event(event)
            self._expire(event.stamp)
            self.limits.update(event.stamp, out, is_busy=bool(self.requests.live))
        if not item.events:
            self.limits.advance(item.stamp, out)
        self.samples.advance(item.known_until)
        self._expire(item.stamp)
        self._count_unknown_groups()
        out.limited, self.requests.limited = self.requests.limited, 0
        out.untracked = self._take_untracked()
        for samples, tokens in self.samples.observed:
            self._observe_group(samples, tokens)
        self.samples.observed.clear()
        return out

    def _restart(self, item: RequestEvents) -> None:
        """Drop the requests of an earlier process, since a new process numbers its own from the start."""
        self._expect(item.processes)
        if item.process in self.sources:
            self._lose(item.process, item.unseen)
        self.sources[item.process] = item.source

    def _expect(self, processes: int) -> None:
        """Drop all requests if another number of processes sends events: all of them have restarted."""
        if processes != self.processes:
            if self.sources:
                self._lose(None)
            self.sources.clear()
            self.processes = processes

    def _lose(self, process: int | None, unseen: int | None = None) -> None:
        """Drop the requests of a process, or of all processes: no later event continues them."""
        if unseen is None:
            self.reports.release()
            for number, request in self.requests.live.items():
                if process is None or number % self.processes == process:
                    self._end_unseen(number, request, "engine_died")
        elif self._sink is not None:
            self._sink.lose(unseen)
        self._drop("restart", 0, process)

    def _end_unseen(self, number: int, request: Request, reason: str) -> None:
        if self._sink is not None:
            self._sink.end(EndedRequest(number, self._source(number), request, reason, self._now))

    def _source(self, number: int) -> int:
        """Return what identifies the process that has numbered a request."""
        return self.sources.get(number % self.processes, 0)

    def _drop(self, reason: str, more: int, process: int | None) -> None:
        """Drop the requests of a process, or of all processes, and ``more`` that are not tracked."""
        self.outputs.last_step = None
        self.parts.interrupt()
        self.limits.restart()
        self.reports.skip()
        dropped = self.requests.drop(reason, more, process, self.processes)
        self.samples.abort_all(request.group for request in dropped if request.group)
        if process is None or self.processes == 1:
            self.samples.clear()
        self.samples.interrupt()
        self._count_unknown_groups()

    def _count_unknown_groups(self) -> None:
        self.requests.untracked["samples"] += self.samples.unknown
        self.samples.unknown = 0

    def skip(self, others: int, process: int = 0, processes: int = 1) -> dict[str, int]:
        """Drop the requests of one of the processes, since events of it were folded instead of sent.

        ``others`` began in the meantime and did not end. Return the numbers of requests whose intervals
        cannot all be known, by reason.
        """
        self._expect(processes)
        self._drop("folded", others, process)
        return self._take_untracked()

    def _take_untracked(self) -> dict[str, int]:
        found = {reason: count for reason, count in self.requests.untracked.items() if count}
        self.requests.untracked.clear()
        return found

    @property
    def longest_preemption(self) -> float:
        """Longest time for which a preempted request has waited, in seconds up to the latest event."""
        since = next(iter(self.requests.preempted.values()), None)
        return 0.0 if since is None else max(self._now - since, 0.0)

    def close(self) -> dict[str, int]:
        """Drop all requests, since no stream sends their events any more; return the same as ``skip``."""
        if self.sources:
            self._lose(None)
        self.reports.release()
        self.samples.close()
        self.requests.close()
        return self._take_untracked()

    def _expire(self, now: float) -> None:
        self._now = now
        self.samples.expire(now)
        for number, request in self.requests.expire(now, self._max_expired):
            self._max_expired -= 1
            if request.parts is not None:
                self.parts.discard(request.parts)
            self._end_unseen(number, request, "expired")
            self._leave(request, now, 0.0, aborted=True)

    def _apply_event(self, event: Event) -> None:
        match event:
            case Iteration():
                self.limits.observe(event, self._out)
                self.outputs.observe(event, self._out)
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
            # A streaming session continues with more input, and the engine restarts its timing.
            request.last = None
        else:
            request = self.requests.track(event.request, event.stamp)
            if request is None:
                return
            request.whole = True
            request.adapter = self.requests.adapter(event.adapter)
            request.lone = not event.group
            request.sample = event.sample
            if event.group and self.samples.join(event):
                request.group = event.group
        request.fresh = True
        self._identify(request, event)
        request.queued = event.stamp
        if request.parts is not None:
            self.parts.discard(request.parts)
        request.parts = self.parts.queue(event.stamp)
        request.arrival = event.arrival or None
        self.requests.move(event.request, request, WAITING, event.prompt_tokens)

    def _identify(self, request: Request, event: Queued | Alive) -> None:
        request.identity = event.identity
        request.max_tokens = event.max_tokens
        request.transfer = self._transfer(event)
        self.outputs.has_hand_overs |= request.transfer == HANDED_OVER
        if event.identity is not None and event.identity.trace:
            self.outputs.notes_gaps = True
            self.traces.add(event.arrival, event.identity.trace)
        if self._sink is not None:
            request.tenant = self._sink.tenant(event.identity, request.adapter)

    def _transfer(self, event: Queued | Alive | Finished) -> int:
        """Return what a request is to its engine: not all routers say so in its parameters."""
        if event.transfer == WHOLE and event.max_tokens == 1 and self.outputs.role == PREFILL:
            return HANDED_OVER
        return event.transfer

    def _scheduled(self, event: Scheduled) -> None:
        request = self.requests.find_or_track(event.request, event.stamp)
        if request is None:
            return
        self._resume(request, event.stamp)
        self._leave_batch(request, event.stamp)
        request.join_batch(event.stamp)
        if request.parts is not None:
            self.parts.join_batch(request.parts, event.stamp)
            request.parts.transfer += max(event.loaded - event.asked, 0.0)
        if request.fresh and (request.scheduled is None or self.settings.scheduled == "last"):
            request.scheduled = event.stamp
        self.requests.begin_prefill(event.request, request)

    def _resume(self, request: Request, now: float) -> None:
        """End a preemption, because the request is scheduled again or has ended."""
        waited = self._out.between(request.preempted, now)
        if waited is not None:
            self._out.preempted_seconds.append(waited)
            request.preempted_seconds += waited
            if (
                self._sink is not None
                and request.preempted is not None
                and len(request.pauses) < MAX_PAUSES
            ):
                request.pauses += ((request.preempted, waited),)
        request.preempted = None

    def _leave_batch(self, request: Request, now: float) -> None:
        held = request.leave_batch(now, self.block_size)
        self._out.held_micros += held
        if held and request.tenant:
            self._out.of_tenant(request.tenant).held_micros += held

    def _preempted(self, event: Preempted) -> None:
        self._out.iteration.num_preempted_reqs += 1
        request = self.requests.find_or_track(event.request, event.stamp)
        if request is not None:
            request.preempted = event.stamp
            request.preemptions += 1
            if request.parts is not None:
                self.parts.preempt(request.parts, event.stamp)
            self._leave_batch(request, event.stamp)
            self.requests.move(event.request, request, PREEMPTED)

    def _alive(self, event: Alive) -> None:
        request = self.requests.find_or_track(event.request, event.stamp)
        # A request with earlier events may have had an output since this event was created.
        if request is None or request.state != UNKNOWN:
            return
        request.adapter = self.requests.adapter(event.adapter)
        self._identify(request, event)
        request.arrival = event.arrival or None
        # A waiting request was never scheduled, so it had no output.
        request.fresh = event.state == WAITING and request.last is None
        request.prompt_tokens = event.prompt_tokens
        self.requests.move(event.request, request, min(event.state, RUNNING))

    def _finished(self, event: Finished) -> None:
        if event.refused:
            refused = self._out.refused
            refused[event.refused] = refused.get(event.refused, 0) + 1
        aborted = endings.is_aborted(event)
        request = self.requests.remove(event.request)
        transfer = self._transfer(event) if request is None else request.transfer
        if transfer == HANDED_OVER and not endings.hand_over(event, self._out, aborted=aborted):
            transfer = WHOLE
        if request is not None:
            self._resume(request, event.stamp)
            # A gap that was divided among tokens was not observed as a whole.
            is_divided = self.settings.latency == "token" and request.extra_tokens
            if request.longest_gap and not is_divided:
                self._out.trace(request, event.wall, {"inter_token": request.longest_gap})
            self._leave_batch(request, event.stamp)
        if aborted:
            endings.abort(event, request, self._out)
        else:
            endings.complete(event, request, self._out)
        if request is not None and request.tenant and transfer != HANDED_OVER:
            endings.count_ended(
                self._out.of_tenant(request.tenant), event, request, aborted=aborted
            )
        found = endings.ended(
            event, self._source(event.request), request, transfer, aborted=aborted
        )
        if request is not None and request.parts is not None:
            found.parts = self.parts.finish(request.parts, event.stamp, found.core_e2e)
        self.reports.end(found)
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
