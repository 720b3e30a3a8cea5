"""What happened between two looks at statistics that a server may have begun anew.

Triton says neither when it started nor when a model was loaded: whatever is lower than before
tells that it counts from 0 again.
"""

from __future__ import annotations

from collections.abc import Iterator

from sidestep.wire.triton import (
    Batch,
    InferenceStats,
    ModelStats,
    Responses,
    Timed,
)

NOTHING = ModelStats()
_TIMED = InferenceStats.__struct_fields__
_RESPONSES = Responses.__struct_fields__
_ZERO = Timed()


def difference(new: ModelStats, old: ModelStats) -> ModelStats:
    """What ``new`` has counted over ``old``, of which it is a continuation."""
    return ModelStats(
        new.last_inference,
        new.inference_count - old.inference_count,
        new.execution_count - old.execution_count,
        _inferences(new.inference_stats, old.inference_stats),
        _batches(new, old),
        _responses(new.response_stats, old.response_stats),
        new.memory_usage,
    )


def has_begun_anew(new: ModelStats, old: ModelStats) -> bool:
    """Whether anything that can only grow is less than before.

    The time of the last inference is a wall clock's. It may be set back while requests are
    served, so it tells only where nothing was executed in between.
    """
    if new.execution_count == old.execution_count and new.last_inference < old.last_inference:
        return True
    sizes = {batch.batch_size: batch for batch in new.batch_stats}
    for batch in old.batch_stats:
        found = sizes.get(batch.batch_size)
        if found is None or _is_less(_amounts_of(found), _amounts_of(batch)):
            return True
    return _is_less(_amounts(new), _amounts(old))


def _is_less(new: Iterator[int], old: Iterator[int]) -> bool:
    return any(a < b for a, b in zip(new, old, strict=True))


def _amounts(stats: ModelStats) -> Iterator[int]:
    yield stats.inference_count
    yield stats.execution_count
    for name in _TIMED:
        timed = getattr(stats.inference_stats, name) or _ZERO
        yield timed.count
        yield timed.ns
    responses = stats.response_stats or Responses()
    for name in _RESPONSES:
        timed = getattr(responses, name)
        yield timed.count
        yield timed.ns


def _amounts_of(batch: Batch) -> Iterator[int]:
    yield batch.count
    yield batch.compute_input_ns
    yield batch.compute_infer_ns
    yield batch.compute_output_ns


def _less(new: Timed, old: Timed) -> Timed:
    return Timed(new.count - old.count, new.ns - old.ns)


def _less_if_any(new: Timed | None, old: Timed | None) -> Timed | None:
    return new if new is None or old is None else _less(new, old)


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


def _batches(new: ModelStats, old: ModelStats) -> tuple[Batch, ...]:
    """Sizes that were executed in between."""
    before = {batch.batch_size: batch for batch in old.batch_stats}
    found: list[Batch] = []
    for batch in new.batch_stats:
        known = before.get(batch.batch_size)
        if known is None:
            found.append(batch)
        elif batch != known:
            found.append(
                Batch(
                    batch.batch_size,
                    batch.count - known.count,
                    batch.compute_input_ns - known.compute_input_ns,
                    batch.compute_infer_ns - known.compute_infer_ns,
                    batch.compute_output_ns - known.compute_output_ns,
                )
            )
    return tuple(found)


def _responses(new: Responses | None, old: Responses | None) -> Responses | None:
    if new is None or old is None:
        return new
    return Responses(*(_less(getattr(new, name), getattr(old, name)) for name in _RESPONSES))
