"""The progress of a vLLM scheduler, read in the publisher thread; needs no vLLM itself."""

from __future__ import annotations

import weakref
from typing import Any

from sidestep.protocol.progress import OVERDUE, PAUSED, Progress
from sidestep_adapters.publisher.progress import ProgressMeter, Reading
from sidestep_adapters.vllm.scheduler_tap import SchedulerTap

BLOCKED = (
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
    "WAITING_FOR_FSM",
    "WAITING_FOR_REMOTE_KVS",
)
"""Names of states in which a request waits for something else than the engine.

A session that waits for more input does so, too, but is not among the unfinished requests.
"""
PAUSED_ALL = 2


class SchedulerProgress:
    """Reader of a scheduler's progress.

    Args:
        scheduler: A scheduler of vLLM; a weak reference is kept.
        tap: The tap of its events.
    """

    def __init__(self, scheduler: Any, tap: SchedulerTap) -> None:
        self._scheduler = weakref.ref(scheduler)
        self._tap = tap
        self._meter = ProgressMeter()

    def measure(self, now: float) -> list[Progress]:
        """Return the progress of the scheduler's engine at ``now``."""
        scheduler = self._scheduler()
        reading = Reading() if scheduler is None else self._read(scheduler, now)
        self._meter.thread = self._tap.thread
        return [self._meter.measure(reading, now)]

    def _read(self, scheduler: Any, now: float) -> Reading:
        tap, steps = self._tap, self._tap.events.steps
        # The order matters: a batch leaves the first for the second, then sets the third.
        scheduling_since = tap.scheduling_since
        step = tap.open_step()
        ended_at = tap.ended_at
        if step is None and scheduling_since and now - scheduling_since >= OVERDUE:
            # Shorter calls may schedule nothing: an engine that admits no request makes many of them.
            step = scheduling_since, 0
        opened_at, tokens = step or (None, 0)
        longest, longest_tokens = steps.take_longest()
        return Reading(
            scheduler.get_num_unfinished_requests(),
            steps.count,
            opened_at,
            tokens,
            ended_at,
            steps.output_at,
            steps.computed,
            longest,
            longest_tokens,
            PAUSED if _is_paused(scheduler) else "",
            blocked=lambda: sum(_state(request) in BLOCKED for request in _requests(scheduler)),
            request_tokens=lambda: sum(request.num_tokens for request in _requests(scheduler)),
        )


def _is_paused(scheduler: Any) -> bool:
    """Return whether the scheduler is paused, and has not to finish what it has begun before."""
    state = int(getattr(scheduler, "pause_state", 0))
    return state >= PAUSED_ALL or (state > 0 and not scheduler.running)


def _requests(scheduler: Any) -> list[Any]:
    # Made in one go, without the engine's thread in between.
    return list(scheduler.requests.values())


def _state(request: Any) -> str:
    name: str = getattr(request.status, "name", "")
    return name
