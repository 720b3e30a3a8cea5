"""Recording of a vLLM scheduler's events, and of its progress; needs no vLLM itself.

Events are appended to a list as they happen, by reference, because this runs on the thread of
the engine's step. The publisher thread makes items of the list (``scheduler_events``).
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import get_ident
from typing import Any

from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.protocol.progress import OVERDUE, PAUSED, Progress
from sidestep.protocol.request_events import ALL_KNOWN, RequestEvents
from sidestep.protocol.self_described import Family, Sample
from sidestep_adapters.publisher.progress import ProgressMeter, Reading
from sidestep_adapters.vllm.limits import BLOCKED, PAUSED_ALL
from sidestep_adapters.vllm.scheduler_events import DeferredEvent, OpenStep, SchedulerEvents

LONG_STEP = 0.05
"""Seconds after which the start of a step is sent before its end."""
PAUSE = 2.5
"""Seconds between two ticks, normally one, after which the process was stopped or starved."""
SETTLE = 5.0
"""Seconds after a pause until the scheduler has all requests that arrived in it."""
IN_PROGRESS = "in_progress"
"""vLLM's name of the stage in which a request's KV is on its way."""
NO_WAIT = 0.0, 0.0
_monotonic, _wall = time.monotonic, time.time


class SchedulerTap:
    """Recorder of one scheduler's events on its step thread. It pushes them and never raises.

    Args:
        push: ``Publisher.push``; takes a function that makes items.
        fail: Called inside ``except`` with a description of the problem.
        events: Converter of the recorded events to items.

    Attributes:
        events: The same.
        is_updating: Whether the scheduler is processing the output of a step.
        scheduling_since: When the call that is scheduling a batch began; 0: none is.
        ended_at: When the last step with tokens ended; 0: none has.
        thread: Ident of the thread that has queued the last request, and runs the steps.
    """

    def __init__(
        self,
        push: Callable[[Callable[[], Iterable[RequestEvents | CacheLookups]]], None],
        fail: Callable[[str], None],
        events: SchedulerEvents,
    ) -> None:
        self.events = events
        self._push = push
        self._fail = fail
        self._deferred_events: list[DeferredEvent] = []
        self._ended_in_update: list[DeferredEvent] = []
        self.is_updating = False
        self.scheduling_since = self.ended_at = 0.0
        self.thread: int | None = None
        self._flushed_at = 0.0
        self._closed_session = ""
        self._started: deque[tuple[Any, float, int | None]] = deque(maxlen=64)
        self._known_until = self._settled_at = 0.0
        self._ticked_at = math.inf
        self._waits: dict[str, tuple[float, float]] = {}

    def fetching(self, request_id: str, stage: str | None) -> None:
        """Record that a request begins to wait for KV from another engine, or has it."""
        if stage == IN_PROGRESS:
            now = _monotonic()
            self._waits[request_id] = now, now
        elif stage is not None and (wait := self._waits.get(request_id)) is not None:
            self._waits[request_id] = wait[0], _monotonic()

    def queued(self, request: Any) -> None:
        """Record a request that entered the queue, or a session that continues.

        A session's next input may arrive while its last output is processed, and must follow it.
        """
        self.thread = get_ident()
        try:
            stamp = request.events[-1].timestamp
            known = (request, stamp, request.arrival_time, request.num_prompt_tokens)
            target = self._ended_in_update if self.is_updating else self._deferred_events
            target.append((self.events.queued, known))
        except Exception:  # noqa: BLE001 - an exception here kills the engine
            self._fail("a queued request could not be recorded")

    def preempted(self, request_id: str, stamp: float) -> None:
        """Record a preempted request."""
        self._deferred_events.append((self.events.preempted, (request_id, stamp)))

    def limited(self, limit: int) -> None:
        """Record a limit that holds from now on, although no step is scheduled; push it."""
        self._deferred_events.append((self.events.limited, (_monotonic(), _wall(), limit)))
        self._flush()

    def scheduled(
        self, output: Any, requests: Mapping[str, Any], started: float, limit: int | None = None
    ) -> None:
        """Record a batch and its limit; requests that are new in it have a fresh event."""
        try:
            self._started.append((output, started, limit))
            self.scheduling_since = 0.0
            deferred = self._deferred_events
            has_lookups = self.events.lookups is not None
            for new in output.scheduled_new_reqs:
                request = requests[new.req_id]
                known: tuple[Any, ...] = new.req_id, self._when(request)
                if has_lookups:
                    # Later steps append hashes, and take the statistics away.
                    stats = getattr(request, "prefill_stats", None)
                    known = *known, _looked_up(request), new.num_computed_tokens, stats
                deferred.append((self.events.scheduled, known))
            # Preempted requests that rejoin the batch, unless they are among the new ones.
            for request_id in output.scheduled_cached_reqs.resumed_req_ids:
                request = requests[request_id]
                known = request_id, self._when(request)
                if has_lookups:
                    known = *known, _looked_up(request)
                deferred.append((self.events.scheduled, known))
            # Normally the events of the step's end take these along; a long step sends them now.
            if deferred and started - self._flushed_at > LONG_STEP:
                self._flush()
        except Exception:  # noqa: BLE001 - as above
            self._fail("a batch could not be recorded")

    def _when(self, request: Any) -> tuple[float, float, float]:
        """Return when a request has joined the batch, and from when to when it has waited for KV."""
        waits = self._waits
        wait = waits.pop(request.request_id, NO_WAIT) if waits else NO_WAIT
        return request.events[-1].timestamp, *wait

    def cache_cleared(self) -> None:
        """Record that the prefix cache was emptied."""
        self._deferred_events.append((self.events.cache_cleared, (_monotonic(),)))

    def session_closed(self, request_id: str) -> None:
        """Record that a session's user sends no more input; vLLM ends the request as aborted."""
        self._closed_session = request_id

    def freed(self, request: Any) -> None:
        """Record the end of a request, for any reason."""
        target = self._ended_in_update if self.is_updating else self._deferred_events
        stopped = bool(self._closed_session) and request.request_id == self._closed_session
        self._closed_session = ""
        if self._waits:
            self._waits.pop(request.request_id, None)
        target.append((self.events.finished, (request, _monotonic(), _wall(), stopped)))

    def update_started(self) -> None:
        """Hold back requests' ends and new input until the step's output is recorded."""
        self.is_updating = True

    def update_finished(self, batch: Any, outputs: Mapping[int, Any]) -> None:
        """Record the step of ``batch``, whose output the scheduler has processed."""
        self.is_updating = False
        try:
            taken = self.events.taken
            found = [(client.timestamp, *taken(client.outputs)) for client in outputs.values()]
            ended = _monotonic()
            if batch.num_scheduled_tokens:
                # Set while the step is open, so that no reader finds the end of an earlier step.
                self.ended_at = ended
            opened = self._opened(batch)
            self._deferred_events.append((self.events.iteration, (opened, ended, _wall(), found)))
            if self._ended_in_update:
                self._deferred_events += self._ended_in_update
                self._ended_in_update.clear()
            self._flush()
        except Exception:  # noqa: BLE001 - as above
            self._fail("a step could not be recorded")

    def _opened(self, batch: Any) -> OpenStep:
        """Return the step of ``batch``; batches come back in order."""
        while self._started:
            opened = self._started.popleft()
            if opened[0] is batch:
                return opened
        return batch, None, None

    def open_step(self) -> tuple[float, int] | None:
        """Return when the oldest open step began, and its tokens; in the publisher thread.

        A batch without tokens is no step.
        """
        for batch, started, _ in list(self._started):
            if batch.num_scheduled_tokens:
                return started, batch.total_num_scheduled_tokens
        return None

    def _flush(self) -> None:
        deferred, self._deferred_events = self._deferred_events, []
        self._flushed_at = _monotonic()
        self._push(partial(self.events.all_items, deferred))

    def tick(self, now: float, wall: float) -> RequestEvents:
        """Return an item with the time until which all requests are known; in the publisher thread.

        Args:
            now: Monotonic time.
            wall: Unix time.
        """
        if now - self._ticked_at > PAUSE:
            self._settled_at = now + SETTLE
        self._ticked_at = now
        try:
            # New requests wait for the end of a step.
            until = self._started[0][1]
        except IndexError:
            until = now
        if now >= self._settled_at:
            self._known_until = max(self._known_until, wall - now + until)
        return self.events.tick(self._known_until)

    def flush(self) -> None:
        """Push the events since the last step; no step follows."""
        if self._deferred_events:
            self._flush()

    def close(self) -> None:
        """Push the last events; no request follows."""
        self.flush()
        self._known_until = ALL_KNOWN


def _looked_up(request: Any) -> tuple[int, int, int]:
    """Return the blocks and tokens of a request, and how often it was preempted, as they are now."""
    return len(request.block_hashes), request.num_tokens, request.num_preemptions


class HeldKv:
    """Reader of the KV that a scheduler holds for other engines after its requests have ended.

    A connector that sends KV later keeps a request known, with its blocks, until it has been fetched.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = weakref.ref(scheduler)
        self._since: dict[str, float] = {}

    def families(self) -> list[Family]:
        """Return the requests, their blocks, and how long the oldest has been held; about once a second."""
        scheduler, now = self._scheduler(), _monotonic()
        if scheduler is None or getattr(scheduler, "connector", None) is None:
            return []
        held = [one.request_id for one in _requests(scheduler) if one.is_finished()]
        self._since = {name: self._since.get(name, now) for name in held}
        manager = scheduler.kv_cache_manager
        blocks = sum(len(group) for name in held for group in manager.get_block_ids(name))
        oldest = now - min(self._since.values(), default=now)
        values = {"requests": len(held), "blocks": blocks, "longest_seconds": oldest}
        return [
            Family(f"sidestep_kv_held_{name}", "gauge", [], [Sample([], value)])
            for name, value in values.items()
        ]


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
            # A shorter call may schedule nothing: an engine that admits no request makes many.
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
            PAUSED if is_paused(scheduler) else "",
            blocked=lambda: sum(
                getattr(request.status, "name", "") in BLOCKED for request in _requests(scheduler)
            ),
            request_tokens=lambda: sum(request.num_tokens for request in _requests(scheduler)),
        )


def is_paused(scheduler: Any) -> bool:
    """Return whether the scheduler is paused and has nothing left to finish."""
    state = int(getattr(scheduler, "pause_state", 0))
    return state >= PAUSED_ALL or (state > 0 and not scheduler.running)


def _requests(scheduler: Any) -> list[Any]:
    # Made in one go, without the engine's thread in between.
    return list(scheduler.requests.values())
