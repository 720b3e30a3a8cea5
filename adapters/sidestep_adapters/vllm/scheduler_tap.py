"""What the tap does with vLLM's scheduler; needs no vLLM itself.

Events are appended to a list as they happen, by reference: this runs on the thread of the
engine's step. The publisher's thread makes items of the list (``scheduler_events``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from sidestep.protocol.request_events import RequestEvents
from sidestep_adapters.vllm.scheduler_events import Raw, SchedulerEvents

LONG = 0.05
"""Seconds after which a step's beginning is told of before its end."""
_monotonic, _wall = time.monotonic, time.time


class SchedulerTap:
    """One scheduler's events, collected on its step's thread and pushed. Nothing here ever raises.

    Args:
        push: Takes a function that makes items; a Publisher's.
        fail: Called inside ``except`` with what went wrong.
        nan_check: Whether outputs say that logits held a NaN.

    Attributes:
        events: Makes items of what was collected.
    """

    def __init__(
        self,
        push: Callable[[Callable[[], Iterable[RequestEvents]]], None],
        fail: Callable[[str], None],
        *,
        nan_check: bool = False,
    ) -> None:
        self._push = push
        self._fail = fail
        self._raw: list[Raw] = []
        self._ended: list[Raw] = []
        self._updating = False
        self._flushed_at = 0.0
        self._ending = ""
        self._started: deque[tuple[Any, float]] = deque(maxlen=64)
        self.events = SchedulerEvents(fail, nan_check=nan_check)

    def queued(self, request: Any) -> None:
        """A request entered the queue, or a session went on.

        A session's next input may come with its last output, which it follows.
        """
        try:
            stamp = request.events[-1].timestamp
            known = (request, stamp, request.arrival_time, request.num_prompt_tokens)
            target = self._ended if self._updating else self._raw
            target.append((self.events.queued, known))
        except Exception:  # noqa: BLE001 - an exception here kills the engine
            self._fail("a queued request could not be recorded")

    def preempted(self, request_id: str, stamp: float) -> None:
        """A request lost its place."""
        self._raw.append((self.events.preempted, (request_id, stamp)))

    def scheduled(self, output: Any, requests: Mapping[str, Any], started: float) -> None:
        """A batch was put together; those who are new in it have a fresh event."""
        try:
            self._started.append((output, started))
            raw = self._raw
            for new in output.scheduled_new_reqs:
                stamp = requests[new.req_id].events[-1].timestamp
                raw.append((self.events.scheduled, (new.req_id, stamp)))
            for request_id in _resumed(output.scheduled_cached_reqs):
                stamp = requests[request_id].events[-1].timestamp
                raw.append((self.events.scheduled, (request_id, stamp)))
            # With the step's own events, but for a step that takes its time.
            if raw and started - self._flushed_at > LONG:
                self._flush()
        except Exception:  # noqa: BLE001 - likewise
            self._fail("a batch could not be recorded")

    def ending(self, request_id: str) -> None:
        """A session's user has said that no more input comes; vLLM ends it as an abort."""
        self._ending = request_id

    def freed(self, request: Any) -> None:
        """A request has ended, whichever way."""
        target = self._ended if self._updating else self._raw
        stopped = bool(self._ending) and request.request_id == self._ending
        self._ending = ""
        target.append((self.events.finished, (request, _monotonic(), _wall(), stopped)))

    def updating(self) -> None:
        """The scheduler takes in a step's output from now on."""
        self._updating = True

    def updated(self, batch: Any, outputs: Mapping[int, Any]) -> None:
        """The scheduler has taken in the output of ``batch``."""
        self._updating = False
        try:
            found = [(client.timestamp, client.outputs) for client in outputs.values()]
            started = self._started_at(batch)
            self._raw.append(
                (self.events.iteration, (started, _monotonic(), _wall(), batch, found))
            )
            if self._ended:
                self._raw += self._ended
                self._ended.clear()
            self._flush()
        except Exception:  # noqa: BLE001 - likewise
            self._fail("a step could not be recorded")

    def _started_at(self, batch: Any) -> float | None:
        """When the scheduling of ``batch`` began; batches come back in their order."""
        while self._started:
            scheduled, started = self._started.popleft()
            if scheduled is batch:
                return started
        return None

    def _flush(self) -> None:
        raw, self._raw = self._raw, []
        self._flushed_at = _monotonic()
        self._push(partial(self.events.items, raw))

    def flush(self) -> None:
        """Push what happened since the last step; there will be no other."""
        if self._raw:
            self._flush()


def _resumed(cached: Any) -> Iterable[str]:
    """Preempted requests that are in the batch again, as far as they are not among the new."""
    known = getattr(cached, "resumed_req_ids", None)
    if known is None:
        # Releases before 0.11 have a flag a request.
        flags = getattr(cached, "resumed_from_preemption", ())
        return [name for name, again in zip(cached.req_ids, flags, strict=False) if again]
    names: Iterable[str] = known
    return names
