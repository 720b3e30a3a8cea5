"""Steps of an engine and the outputs of its requests: first tokens and the time between outputs."""

from __future__ import annotations

from itertools import repeat
from typing import Literal

from sidestep.protocol.iteration_stats import Run
from sidestep.protocol.messages import BOTH, DECODE
from sidestep.protocol.request_events import HANDED_OVER, RECEIVED, WHOLE, Iteration, Output, Prompt
from sidestep.tracking.requests.front_end import FrontEndReports
from sidestep.tracking.requests.inflight import InFlight, Request
from sidestep.tracking.requests.outcomes import IterationShape, Outcomes
from sidestep.tracking.requests.parts import PartsTracker

RUN_FROM = 12
"""Number of equal latencies from which on they are one run."""


class OutputTracker:
    """Observes the steps of one engine.

    Args:
        front_ends: Reports of front ends, which may know a first output already.

    Attributes:
        notes_gaps: Whether each request's longest gap is needed: for a record, or as an exemplar.
        external_is_cached: Whether prompt tokens from outside come from a cache.
        block_size: Tokens of a KV block; 0: unknown.
        has_hand_overs: Whether there have been requests that another engine continues.
    """

    def __init__(
        self,
        requests: InFlight,
        front_ends: FrontEndReports,
        parts: PartsTracker,
        latency: Literal["output", "token"],
        *,
        notes_gaps: bool,
    ) -> None:
        self.last_step: float | None = None
        self.notes_gaps = notes_gaps
        self.role = BOTH
        self.external_is_cached = self.has_hand_overs = False
        self.block_size = 0
        self._requests = requests
        self._front_ends = front_ends
        self._parts = parts
        self._latency = latency

    def observe(self, event: Iteration, out: Outcomes) -> None:
        """Observe a step, its prompts and its outputs."""
        self._observe_step(event, out)
        prompted = sum(self._count_prompt(prompt, event.stamp, out) for prompt in event.prompts)
        generated = 0
        prefilling = self._requests.prefilling
        for output in event.outputs:
            generated += sum(output.tokens) if output.tokens else len(output.requests)
            self._observe_output(output, event.wall, out)
            for request in self._requests.end_prefill(output.requests) if prefilling else ():
                if request.parts is not None:
                    self._parts.output(request.parts, output.stamp)
        out.iteration.num_generation_tokens += generated
        if event.is_slice:
            out.slice_tokens += prompted + generated
        elif event.outputs:
            out.iteration_tokens.append(prompted + generated)

    def _observe_step(self, event: Iteration, out: Outcomes) -> None:
        """Observe a step with the state of its requests before its output; skip one without a batch."""
        self._parts.schedule(event.started, event.limit)
        batch, tokens = event.batch
        if not batch:
            return
        interval = out.between(self.last_step, event.stamp)
        self.last_step = event.stamp
        prefilling = self._requests.prefilling
        prefill = prefilling.intersection(batch) if prefilling else ()
        total = sum(tokens) if tokens else len(batch)
        prefilled = 0
        if prefill:
            for number, count in zip(batch, tokens or repeat(1, len(batch)), strict=True):
                if number in prefill:
                    prefilled += count
                    self._requests.fill(number, count)
        shape = IterationShape(
            duration=out.between(event.started, event.stamp),
            interval=interval,
            prefill_requests=len(prefill),
            prefill_tokens=prefilled,
            decode_requests=len(batch) - len(prefill),
            decode_tokens=total - prefilled,
            kv_tokens=event.kv_tokens,
            waiting_tokens=self._requests.waiting_tokens,
            wall=event.wall,
            limit=event.limit,
        )
        out.steps.append(shape)
        begin = self._parts.times.step(event.started, event.stamp, shape.decode_requests, prefilled)
        for number in prefill:
            parts = self._requests.live[number].parts
            if parts is not None:
                self._parts.compute(parts, begin, event.stamp)

    def _count_prompt(self, prompt: Prompt, stamp: float, out: Outcomes) -> int:
        """Count a prompt at its first output; return the tokens that were computed for it."""
        cached = prompt.local + prompt.external
        request = self._requests.find_or_track(prompt.request, stamp)
        received = Prompt(prompt.request, external=prompt.external)
        if self.external_is_cached:
            received.external = 0
        if request is not None:
            if request.transfer == WHOLE and self.role == DECODE and prompt.external:
                request.transfer = RECEIVED
            if request.transfer == RECEIVED:
                received = prompt
                # What fills no block is always computed here.
                out.local_prefills += not prompt.external and prompt.computed >= self.block_size > 0
            if request.tenant:
                counts = out.of_tenant(request.tenant)
                counts.computed += prompt.computed - received.computed
                counts.cached += cached - received.local - received.external
                counts.transferred += received.external
            request.cached = cached
            request.external = prompt.external
            # The next output is its first one, even if its queueing is unknown.
            request.fresh = request.last is None
        out.received.computed += received.computed
        out.received.local_cache_hit += received.local
        out.received.external_kv_transfer += received.external
        prompts = out.iteration.prompt_token_stats
        if prompts is not None:
            prompts.computed += prompt.computed
            prompts.local_cache_hit += prompt.local
            prompts.external_kv_transfer += prompt.external
            prompts.cached_tokens += cached
            prompts.total += prompt.computed + cached
        return prompt.computed

    def _observe_output(self, output: Output, wall: float, out: Outcomes) -> None:
        """Observe each request's first output, or the latency since its previous output."""
        stamp, live = output.stamp, self._requests.live
        gaps: list[float] = []
        if output.tokens or self.notes_gaps or self.has_hand_overs:
            self._observe_uneven(output, wall, gaps, out)
        else:
            for number in output.requests:
                request = live.get(number)
                if request is not None and (last := request.last) is not None and stamp > last:
                    gaps.append(stamp - last)
                    request.last = stamp
                    request.tokens += 1
                else:
                    self._begin(number, stamp, wall, 1, out)
        stats = out.iteration
        if len(gaps) >= RUN_FROM and gaps.count(gaps[0]) == len(gaps):
            stats.inter_token_latencies_iter_runs.append(Run(gaps[0], len(gaps)))
        else:
            stats.inter_token_latencies_iter.extend(gaps)

    def _observe_uneven(
        self, output: Output, wall: float, gaps: list[float], out: Outcomes
    ) -> None:
        """Observe outputs of any number of tokens, also none; note what records need."""
        runs = out.iteration.inter_token_latencies_iter_runs
        tokens = output.tokens or repeat(1, len(output.requests))
        for number, count in zip(output.requests, tokens, strict=True):
            request = self._requests.live.get(number)
            if request is None or request.last is None or output.stamp <= request.last:
                self._begin(number, output.stamp, wall, count, out)
                continue
            gap = output.stamp - request.last
            if count > 1 and self._latency == "token":
                runs.append(Run(gap / count, count))
            else:
                gaps.append(gap)
            request.last = output.stamp
            request.tokens += count
            self._count_generated(request, count, out)
            request.longest_gap = max(request.longest_gap, gap)
            request.extra_tokens += max(count - 1, 0)

    def _count_generated(self, request: Request, tokens: int, out: Outcomes) -> None:
        """Count generated tokens for the tenant, or as those that another engine generates again."""
        if request.transfer == HANDED_OVER:
            out.handed_over_tokens += tokens
        elif request.tenant:
            out.of_tenant(request.tenant).generated += tokens

    def _begin(self, number: int, stamp: float, wall: float, tokens: int, out: Outcomes) -> None:
        """Apply an output whose previous output is unknown, such as the first."""
        request = self._requests.find_or_track(number, stamp)
        if request is None:
            return
        request.tokens += tokens
        self._count_generated(request, tokens, out)
        if request.last is not None:
            # The stamp is not after that of the previous output, so there is no interval.
            out.omitted += 1
            return
        request.last = stamp
        if not request.fresh:
            return
        request.fresh = False
        request.first = stamp
        waited = out.between(request.arrival, wall)
        if waited is not None:
            request.ttft = waited
            out.iteration.time_to_first_tokens_iter.append(waited)
            if request.identity is not None:
                out.trace(request, wall, {"ttft": waited})
        if self._front_ends.expected:
            hop = self._front_ends.output(number, request, wall)
            if hop is not None:
                out.hops.append(hop)
