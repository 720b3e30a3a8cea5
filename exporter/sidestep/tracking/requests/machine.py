"""Request events into intervals: one state machine per engine. Pure; time is data.

The intervals are vLLM's, to the formula: queue is QUEUED to the first SCHEDULED,
prefill from there to the first output, decode from the first output to the last,
inference from SCHEDULED to the last; an inter-token latency lies between two
consecutive outputs of a request, whatever came between. A preemption therefore
lengthens decode and inference, or prefill and the time to the first token, and never
the queue time. What cannot be known, because its begin was not heard, is left out.
"""

from __future__ import annotations

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
from sidestep.tracking.requests.endings import ABORT, abort, complete
from sidestep.tracking.requests.inflight import UNKNOWN, InFlight, Request
from sidestep.tracking.requests.outcomes import Outcomes
from sidestep.tracking.requests.parallel_samples import Questions, Siblings
from sidestep.tracking.requests.rules import Rules
from sidestep.tracking.requests.steps import Steps

RUN_FROM = 12
"""Equal latencies from which on they are handed over as a run."""
MAX_EXPIRED = 4096
"""Requests that one item may find too old; the next finds more."""


def check(item: RequestEvents) -> None:
    """Whether ``item`` can be followed.

    Raises:
        WireError: Its columns are of different lengths, or too long.
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
    """Follows the requests of one engine.

    Attributes:
        requests: Those in flight.
        siblings: The questions of which they are samples.
        source: Tells the process that numbers them.
        steps: The engine's.

    Args:
        questions: Shared by all engines whose requests may be samples of one question.
    """

    def __init__(self, rules: Rules | None = None, sample_groups: Questions | None = None) -> None:
        self.rules = rules or Rules()
        sample_groups = sample_groups or Questions()
        self.requests = InFlight(self.rules.capacity, self.rules.max_age, sample_groups.capacity)
        self.samples = Siblings(sample_groups)
        self.source: int | None = None
        self.steps = Steps()
        self._now = 0.0
        self._max_expired = MAX_EXPIRED
        self._out = Outcomes(IterationStats())

    def apply(self, item: RequestEvents) -> Outcomes:
        """What ``item``'s events come to; cutting a stream of events elsewhere changes nothing.

        Raises:
            WireError: See ``check``; nothing was changed.
        """
        check(item)
        self._max_expired = MAX_EXPIRED
        self._out = out = Outcomes(IterationStats(prompt_token_stats=PromptTokenStats()))
        if item.source != self.source:
            self._restart(item.source)
        for event in item.events:
            self._apply_event(event)
            self._expire(event.stamp)
        self._expire(item.stamp)
        out.limited, self.requests.limited = self.requests.limited, 0
        out.untracked = {why: n for why, n in self.requests.untracked.items() if n}
        self.requests.untracked.clear()
        for samples, tokens in self.samples.observed:
            self._observe_group(samples, tokens)
        self.samples.observed.clear()
        return out

    def _restart(self, source: int) -> None:
        """Another process numbers its requests anew; those of the last one are cut off."""
        if self.source is not None:
            self._drop_all("restart", 0)
        self.source = source

    def _drop_all(self, reason: str, more: int) -> None:
        self.steps = Steps()
        self.samples.abort_all(r.group for r in self.requests.live.values() if r.group)
        self.requests.clear(reason, more)
        self.samples.clear()

    def skip(self, others: int) -> dict[str, int]:
        """Events were folded instead of sent: what went on then is not known of any request.

        Args:
            others: Requests that began meanwhile and did not end.

        Returns:
            Requests whose intervals cannot all be known, by reason.
        """
        self._drop_all("folded", others)
        found = dict(self.requests.untracked)
        self.requests.untracked.clear()
        return found

    @property
    def longest_preemption(self) -> float:
        """Seconds that the first of the preempted has waited, by the engine's last word."""
        since = next(iter(self.requests.preempted.values()), None)
        return 0.0 if since is None else max(self._now - since, 0.0)

    def close(self) -> int:
        """Nobody tells of these requests any more; how many there were."""
        live = len(self.requests.live)
        self._restart(-1)
        self.samples.close()
        self.requests.close()
        return live

    def _expire(self, now: float) -> None:
        self._now = now
        self.samples.expire(now)
        for request in self.requests.expire(now, self._max_expired):
            self._max_expired -= 1
            self._leave(request, now, aborted=True)

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
            # A streaming session goes on with more input: the engine times it from here.
            request.last = None
        else:
            request = self.requests.track(event.request, event.stamp)
            if request is None:
                return
            request.whole = True
            request.adapter = self.requests.adapter(event.adapter)
            request.lone = not event.group
            if event.group:
                request.group = event.group
                self.samples.join(event.group, event.sample)
        request.fresh = True
        request.queued = event.stamp
        request.arrival = event.arrival or None
        request.prompt_tokens = event.prompt_tokens
        self.requests.move(event.request, request, WAITING)

    def _scheduled(self, event: Scheduled) -> None:
        request = self.requests.find_or_track(event.request, event.stamp)
        if request is None:
            return
        self._resume(request, event.stamp)
        if request.fresh and (request.scheduled is None or self.rules.scheduled == "last"):
            request.scheduled = event.stamp
        self.requests.move(event.request, request, RUNNING)
        self.requests.prefilling.add(event.request)

    def _resume(self, request: Request, now: float) -> None:
        """A preemption ends, in the batch or by the request's end."""
        waited = self._out.between(request.preempted, now)
        if waited is not None:
            self._out.preempted_seconds.append(waited)
        request.preempted = None

    def _preempted(self, event: Preempted) -> None:
        self._out.iteration.num_preempted_reqs += 1
        request = self.requests.find_or_track(event.request, event.stamp)
        if request is not None:
            request.preempted = event.stamp
            self.requests.move(event.request, request, PREEMPTED)

    def _alive(self, event: Alive) -> None:
        request = self.requests.find_or_track(event.request, event.stamp)
        # One whose events reached us before this may have had output since it was said.
        if request is None or request.state != UNKNOWN:
            return
        request.adapter = self.requests.adapter(event.adapter)
        request.arrival = event.arrival or None
        # One that still waits its turn has not been scheduled, and had no output.
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
        """Count a prompt with its request's first output; the tokens computed for it."""
        cached = prompt.local + prompt.external
        request = self.requests.find_or_track(prompt.request, stamp)
        if request is not None:
            request.cached = cached
            # Its first output, whether or not its queueing was heard of.
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
        """Each request's first output, or the latency since the one before."""
        stamp, live = output.stamp, self.requests.live
        gaps: list[float] = []
        if output.tokens:
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
        """Outputs of any number of tokens, none included."""
        runs = self._out.iteration.inter_token_latencies_iter_runs
        for number, count in zip(output.requests, output.tokens, strict=True):
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

    def _begin(self, number: int, stamp: float, wall: float, tokens: int) -> None:
        """An output with none before it that is known."""
        request = self.requests.find_or_track(number, stamp)
        if request is None:
            return
        request.tokens += tokens
        if request.last is not None:
            # Not after the one before, so that no interval lies between.
            self._out.omitted += 1
            return
        request.last = stamp
        if not request.fresh:
            return
        request.fresh = False
        request.first = stamp
        waited = self._out.between(request.arrival, wall)
        if waited is not None:
            self._out.iteration.time_to_first_tokens_iter.append(waited)

    def _finished(self, event: Finished) -> None:
        if event.refused:
            refused = self._out.refused
            refused[event.refused] = refused.get(event.refused, 0) + 1
        # An abort after output of a request with stop strings: the front end, which looks
        # for them, has found one. It ends the request by the same call as a client that left.
        found = event.stop_strings and event.generation_tokens > 0
        aborted = event.reason == ABORT and not found
        request = self.requests.remove(event.request)
        if request is not None:
            self._resume(request, event.stamp)
        if aborted:
            abort(event, request, self._out)
        else:
            complete(event, request, self._out)
        if request is not None:
            self._leave(request, event.stamp, aborted=aborted)

    def _leave(self, request: Request, now: float, *, aborted: bool) -> None:
        """Its question's ``n``, once all samples have ended; a lone request's at once."""
        if request.group:
            has_more = request.last != request.first
            self.samples.leave(request.group, now, request.tokens, aborted=aborted, outputs=has_more)
        elif request.lone and not aborted:
            self._observe_group(1, request.tokens)

    def _observe_group(self, samples: int, tokens: int) -> None:
        self._out.iteration.n_params_iter.append(samples)
        self._out.iteration.max_num_generation_tokens_iter.append(tokens)
