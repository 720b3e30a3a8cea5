"""Differences between two polls of cumulative statistics, which the server may have reset.

Triton reports neither when it started nor when a model was loaded: any count lower than before
shows that the counts restarted at 0.
"""

from __future__ import annotations

from sidestep_adapters.triton.wire import Batch, InferenceStats, ModelStats, Responses, Timed

EMPTY = ModelStats()
_NO_RESPONSES = Responses()
_ZERO = Timed()


class CountersResetError(Exception):
    """A counter is lower than before, so the statistics were reset."""


def difference(new: ModelStats, old: ModelStats) -> ModelStats:
    """Return what ``new`` has counted since ``old``.

    The time of the last inference is wall-clock time. The clock may be set back while requests are
    served, so a lower time counts as a reset only if nothing was executed in between.

    Raises:
        CountersResetError: The statistics were reset in between.
    """
    executions = new.execution_count - old.execution_count
    inferences = new.inference_count - old.inference_count
    if executions < 0 or inferences < 0:
        raise CountersResetError
    if not executions and new.last_inference < old.last_inference:
        raise CountersResetError
    return ModelStats(
        new.last_inference,
        inferences,
        executions,
        _inferences(new.inference_stats, old.inference_stats),
        _batches(new.batch_stats, old.batch_stats),
        _responses(new.response_stats, old.response_stats),
        new.memory_usage,
    )


def _less(new: Timed, old: Timed) -> Timed:
    count, ns = new.count - old.count, new.ns - old.ns
    if count < 0 or ns < 0:
        raise CountersResetError
    return Timed(count, ns)


def _less_if_any(new: Timed | None, old: Timed | None) -> Timed | None:
    return new if old is None else _less(new or _ZERO, old)


def _inferences(new: InferenceStats, old: InferenceStats) -> InferenceStats:
    return InferenceStats(
        _less(new.success, old.success),
        _less(new.fail, old.fail),
        _less(new.queue, old.queue),
        _less(new.compute_input, old.compute_input),
        _less(new.compute_infer, old.compute_infer),
        _less(new.compute_output, old.compute_output),
        _less_if_any(new.cache_hit, old.cache_hit),
        _less_if_any(new.cache_miss, old.cache_miss),
    )


def _batches(new: tuple[Batch, ...], old: tuple[Batch, ...]) -> tuple[Batch, ...]:
    """Return the batch sizes that were executed in between."""
    if not old:
        return new
    before = {batch.batch_size: batch for batch in old}
    found: list[Batch] = []
    for batch in new:
        known = before.pop(batch.batch_size, None)
        if known is None:
            found.append(batch)
        elif batch != known:
            found.append(_less_batch(batch, known))
    if before:
        raise CountersResetError
    return tuple(found)


def _less_batch(new: Batch, old: Batch) -> Batch:
    count = new.count - old.count
    prepared = new.compute_input_ns - old.compute_input_ns
    inferred = new.compute_infer_ns - old.compute_infer_ns
    extracted = new.compute_output_ns - old.compute_output_ns
    if count < 0 or prepared < 0 or inferred < 0 or extracted < 0:
        raise CountersResetError
    return Batch(new.batch_size, count, prepared, inferred, extracted)


def _responses(new: Responses | None, old: Responses | None) -> Responses | None:
    if old is None:
        return new
    new = new or _NO_RESPONSES
    return Responses(
        _less(new.first, old.first),
        _less(new.next, old.next),
        _less(new.fail, old.fail),
        _less(new.empty_response, old.empty_response),
        _less(new.cancel, old.cancel),
        _less(new.first_compute_infer, old.first_compute_infer),
        _less(new.first_compute_output, old.first_compute_output),
        _less(new.next_compute_infer, old.next_compute_infer),
        _less(new.next_compute_output, old.next_compute_output),
    )
