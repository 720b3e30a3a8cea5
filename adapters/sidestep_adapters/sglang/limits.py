"""The limit that keeps SGLang's scheduler from admitting the next waiting request, and its backlog.

The scheduler's loop notes the limit whenever it has chosen a batch. The publisher thread adds up the
time, and reads the queue. Nothing here needs SGLang itself.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

from sidestep.protocol.request_events import LIMITS
from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics
from sidestep_adapters.sglang.metric_stubs import SET, MetricStub
from sidestep_adapters.sglang.progress import waiting_for_grammars

SECONDS, STEPS = "sidestep_step_limit_seconds_total", "sidestep_steps_total"
WAITING, UNFINISHED, UNCACHED = (
    "sidestep_waiting_prompt_tokens",
    "sidestep_unfinished_prefill_tokens",
    "sidestep_waiting_uncached_tokens",
)
NO_TOKEN, OTHER = "NO_TOKEN", "OTHER"
"""Names of SGLang's results of a request that was not admitted: for want of memory, or of tokens."""
IDLE = ""
_monotonic = time.monotonic


class LimitRecorder:
    """Recorder of one scheduler's limits and backlog."""

    def __init__(self, deferred: DeferredMetrics, engine: int) -> None:
        self._deferred = deferred
        self._counters = {
            name: MetricStub(
                deferred, name, "counter", engine=engine, labelnames=["limit"], own=["limit"]
            )
            for name in (SECONDS, STEPS)
        }
        self.gauges = [
            MetricStub(deferred, name, "gauge", engine=engine)
            for name in (WAITING, UNFINISHED, UNCACHED)
        ]
        self._scheduler: weakref.ref[Any] | None = None
        self._open = IDLE, 0.0
        """The limit that holds, and since when."""
        self._seconds = dict.fromkeys(LIMITS, 0.0)
        self._steps = dict.fromkeys(LIMITS, 0)
        self._sent: dict[tuple[str, str], float] = {}
        self._result = ""
        self._has_refused_adapter = False

    def considered(self, result: Any) -> None:
        """Note what became of a request that the scheduler has considered, on its loop."""
        self._result = result.name

    def considered_adapter(self, fits: bool) -> None:
        """Note whether a request's adapter fits into the batch, on the scheduler's loop."""
        if not fits:
            self._has_refused_adapter = True

    def chosen(self, plan: Any, scheduler: Any) -> None:
        """Note the limit after the scheduler has chosen its next batch, on its loop."""
        # Older releases return the batch itself.
        batch = getattr(plan, "batch_to_run", plan)
        running = plan.running_batch if batch is not plan else scheduler.running_batch
        waits = scheduler.waiting_queue or waiting_for_grammars(scheduler)
        new = IDLE
        if batch is not None or waits or running.reqs:
            new = self._limit(scheduler, batch, running) if waits else "none"
        elif self._open[0] == IDLE:
            return
        self._switch(new)
        self._result, self._has_refused_adapter = "", False
        if batch is not None and batch.reqs:
            self._steps[new] += 1
        if self._scheduler is None:
            self._scheduler = weakref.ref(scheduler)

    def paused(self, is_paused: bool) -> None:
        """Note that the scheduler is paused, or that it goes on."""
        self._switch("paused" if is_paused else IDLE)

    def _switch(self, new: str) -> None:
        limit, since = self._open
        now = _monotonic()
        if limit != IDLE:
            self._seconds[limit] += now - since
        self._open = new, now

    def _limit(self, scheduler: Any, batch: Any, running: Any) -> str:
        """Return the limit while requests wait."""
        if not scheduler.waiting_queue:
            return "grammar"
        is_prefill = batch is not None and batch.forward_mode.is_extend()
        admitted = len(running.reqs)
        if is_prefill and batch is not running:
            admitted += len(batch.reqs)
        if (
            admitted >= scheduler.max_running_requests
            or scheduler.req_to_token_pool.available_size() <= 0
        ):
            return "slots"
        # The scheduler remembers a shortage until a request has left the batch.
        if self._result == NO_TOKEN or running.batch_is_full:
            return "kv_blocks"
        if self._has_refused_adapter:
            return "lora"
        if self._result != OTHER and getattr(scheduler, "enable_hicache_storage", False):
            return "kv_transfer"
        # A prefill has taken all tokens; without one, the scheduler has been asked to wait.
        return "tokens" if is_prefill else "deferred"

    def __call__(self) -> None:
        """Record the time, the steps and the backlog, in the publisher thread."""
        scheduler = self._scheduler() if self._scheduler is not None else None
        if scheduler is None:
            return
        try:
            self._count(scheduler)
            for stub, tokens in zip(self.gauges, _backlog(scheduler), strict=True):
                stub.record((), tokens, SET)
        except Exception:  # noqa: BLE001 - another release may lack anything
            self._deferred.fail("the scheduler's limit and backlog could not be read")

    def _count(self, scheduler: Any) -> None:
        # The order matters: the loop adds an interval to the second before it replaces the first.
        limit, since = self._open
        seconds = dict(self._seconds)
        if limit != IDLE:
            now = _monotonic()
            if limit == "paused" and not _unfinished(scheduler):
                self._open = limit, now
            else:
                seconds[limit] += max(now - since, 0.0)
        for name, totals in ((SECONDS, seconds), (STEPS, self._steps)):
            for each, total in totals.items():
                key = name, each
                # A reading between the two may be ahead by a step.
                if key not in self._sent or total > self._sent[key]:
                    self._counters[name].record((each,), total - self._sent.get(key, 0.0), 1)
                    self._sent[key] = total


def _unfinished(scheduler: Any) -> bool:
    return bool(
        scheduler.waiting_queue or waiting_for_grammars(scheduler) or scheduler.running_batch.reqs
    )


def _backlog(scheduler: Any) -> tuple[int, int, int]:
    """Return prompt tokens that wait, tokens to prefill, and those that wait and that no cache has."""
    waiting = [*scheduler.waiting_queue, *waiting_for_grammars(scheduler)]
    prompts = sum(len(req.origin_input_ids) for req in waiting)
    tokens = prompts + sum(len(req.output_ids) for req in waiting)
    # With a long queue, and by some policies, SGLang looks up a request in its turn only.
    cached = sum(getattr(req, "num_matched_prefix_tokens", 0) for req in waiting)
    rest, chunked = 0, scheduler.chunked_req
    if chunked is not None:
        rest = len(chunked.origin_input_ids) + len(chunked.output_ids) - _computed(chunked)
    return prompts, tokens + max(rest, 0), max(tokens - cached, 0)


def _computed(req: Any) -> int:
    """Return how many tokens of a request whose prompt is divided have been computed, or were cached."""
    known: int | None = getattr(req, "prefix_len", None)
    return len(req.prefix_indices) if known is None else known
