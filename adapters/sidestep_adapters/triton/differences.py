"""Differences between two polls of cumulative statistics, which the server may have reset.

Triton reports neither when it started nor when a model was loaded: any count lower than before
shows that the counts restarted at 0.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import astuple, replace

from sidestep_adapters.triton.wire import Batch, ModelStats

EMPTY = ModelStats()


class CountersResetError(Exception):
    """A counter is lower than before, so the statistics were reset."""


def difference(new: ModelStats, old: ModelStats) -> ModelStats:
    """Return what ``new`` has counted since ``old``.

    The time of the last inference is wall-clock time. The clock may be set back while requests are
    served, so a lower time counts as a reset only if nothing was executed in between.

    Raises:
        CountersResetError: The statistics were reset in between.
    """
    executions = _less(new.execution_count, old.execution_count)
    if not executions and new.last_inference < old.last_inference:
        raise CountersResetError
    return ModelStats(
        new.last_inference,
        _less(new.inference_count, old.inference_count),
        executions,
        _less(new.inference_stats, old.inference_stats),
        _batches(new.batch_stats, old.batch_stats),
        _less(new.response_stats, old.response_stats),
        new.memory_usage,
    )


def _less(new: Any, old: Any) -> Any:
    """Return the difference of two counts, or of two structs field by field; None counts as 0."""
    if old is None:
        return new
    if isinstance(old, msgspec.Struct):
        now = type(old)() if new is None else new
        return type(old)(*map(_less, astuple(now), astuple(old)))
    if new < old:
        raise CountersResetError
    return new - old


def _batches(new: tuple[Batch, ...], old: tuple[Batch, ...]) -> tuple[Batch, ...]:
    """Return the batch sizes that were executed in between."""
    before = {batch.batch_size: batch for batch in old}
    found: list[Batch] = []
    for batch in new:
        known = before.pop(batch.batch_size, None)
        if known is None:
            found.append(batch)
        elif batch != known:
            found.append(replace(_less(batch, known), batch_size=batch.batch_size))
    if before:
        raise CountersResetError
    return tuple(found)
