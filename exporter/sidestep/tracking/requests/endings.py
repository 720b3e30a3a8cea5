"""The outcomes of a request that ended."""

from __future__ import annotations

from sidestep.protocol.iteration_stats import FINISH_REASONS, FinishedRequestStats
from sidestep.protocol.request_events import Finished
from sidestep.tracking.requests.inflight import Request
from sidestep.tracking.requests.outcomes import (
    AbortedRequest,
    EndedRequest,
    HandedOver,
    Outcomes,
    TenantCounts,
)

STOP, ABORT, ERROR = map(FINISH_REASONS.index, ("stop", "abort", "error"))


def abort(event: Finished, request: Request | None, out: Outcomes) -> None:
    """Count an aborted request. As in the engine's front end, no histogram of requests observes it."""
    out.iteration.finished_requests.append(FinishedRequestStats(finish_reason=ABORT))
    waited = None if request is None else out.between(request.queued, event.stamp)
    out.aborted.append(AbortedRequest(event.prompt_tokens, event.generation_tokens, waited))


def complete(event: Finished, request: Request | None, out: Outcomes) -> None:
    """Observe all known intervals of a finished request; an abort here is a found stop string."""
    out.iteration.num_corrupted_reqs += event.corrupted
    finished = FinishedRequestStats(
        finish_reason=STOP if event.reason == ABORT else event.reason,
        num_prompt_tokens=event.prompt_tokens,
        num_preemptions=event.preemptions,
        num_generation_tokens=event.generation_tokens,
        max_tokens_param=event.max_tokens,
        is_corrupted=event.corrupted,
    )
    out.iteration.finished_requests.append(finished)
    if request is None:
        return
    if request.first is not None:
        finished.num_generation_tokens = request.tokens
    if request.whole or request.first is not None:
        finished.num_cached_tokens = request.cached
    if event.cached_tokens is not None and request.first is not None:
        finished.num_cached_tokens = event.cached_tokens
    finished.e2e_latency = out.between(request.arrival, event.wall)
    finished.queued_time = out.between(request.queued, request.scheduled)
    finished.prefill_time = out.between(request.scheduled, request.first)
    finished.inference_time = out.between(request.scheduled, request.last)
    decode = finished.decode_time = out.between(request.first, request.last)
    if decode is not None:
        more = request.tokens - 1
        finished.mean_time_per_output_token = decode / more if more > 0 else 0.0
    if request.identity is not None:
        latencies = {
            "e2e": finished.e2e_latency,
            "queue": finished.queued_time,
            "time_per_output_token": finished.mean_time_per_output_token,
        }
        out.trace(request, event.wall, latencies)


def count_ended(counts: TenantCounts, event: Finished, request: Request, *, aborted: bool) -> None:
    """Count a request that ended for its tenant."""
    counts.ended += 1
    counts.failed += aborted or event.reason == ERROR
    if request.queued is not None and request.scheduled is not None:
        counts.queue_seconds += max(request.scheduled - request.queued, 0.0)
    if request.scheduled is not None and request.last is not None:
        counts.compute_seconds += max(request.last - request.scheduled, 0.0)


def is_aborted(event: Finished) -> bool:
    """Return whether a request was aborted, other than for a stop string.

    A front end ends a request in the same way for a stop string that it has found and for a client that
    has disconnected. An abort after output of a request with stop strings counts as the first.
    """
    has_stopped = event.stop_strings and event.generation_tokens > 0
    return event.reason == ABORT and not has_stopped


def hand_over(event: Finished, out: Outcomes, *, aborted: bool) -> bool:
    """Count a request that has only computed its prompt, unless it failed; return whether it did not."""
    is_done = not aborted and not event.refused and event.reason != ERROR
    if is_done:
        out.handed_over.append(HandedOver(STOP if event.reason == ABORT else event.reason))
    return is_done


def ended(
    event: Finished, source: int, request: Request | None, transfer: int, *, aborted: bool
) -> EndedRequest:
    """Return the request with its finish reason; ``aborted`` is False for a found stop string."""
    reason = "unknown"
    if event.refused:
        reason = "refused"
    elif event.reason < len(FINISH_REASONS):
        reason = FINISH_REASONS[STOP if event.reason == ABORT and not aborted else event.reason]
    return EndedRequest(
        event.request,
        source,
        request,
        reason,
        event.stamp,
        event.wall,
        event.prompt_tokens,
        event.generation_tokens,
        event.preemptions,
        event.max_tokens,
        event.refused,
        transfer=transfer,
    )
