"""Division of each request's e2e latency into parts: where its time went.

A request keeps the engine's running sums as they were when its state last changed, so a change costs the
same however long the request has been in it, and an output of a request that decodes costs nothing. What
no sum explains belongs to the state itself. So the parts always sum to the latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

import msgspec

from sidestep.protocol.request_events import LIMITS
from sidestep.tracking.requests.engine_times import EngineTimes

FRONT_END_IN, QUEUE, FRONT_END_OUT = "front_end_in", "queue", "front_end_out"
PREFILL_REMOTE, TRANSFER = "prefill_remote", "transfer"
"""Time before the arrival, on the engine that has computed the prompt; the wait for its KV."""
QUEUE_UNKNOWN, QUEUE_STALLED = "queue.unknown", "queue.stalled"
"""Time in the queue during which the engine's limit is unknown, or a step took much too long."""
COMPUTED = ("prefill", "prefill_gap", "decode", "interference", "preempted", "recompute", "stalled")
"""Parts between the queue and the last output."""
KEYS: Mapping[str, tuple[str, str]] = {
    PREFILL_REMOTE: (PREFILL_REMOTE, ""),
    FRONT_END_IN: (FRONT_END_IN, ""),
    **{f"{QUEUE}.{limit}": (QUEUE, limit) for limit in (*LIMITS, "unknown", "stalled")},
    TRANSFER: (TRANSFER, ""),
    **{part: (part, "") for part in COMPUTED},
    FRONT_END_OUT: (FRONT_END_OUT, ""),
}
"""Part and limit by the key in a request's parts, in the order of a request's life."""
_QUEUE_KEYS = [f"{QUEUE}.{limit}" for limit in LIMITS]

QUEUED, PREFILL, DECODE, PREEMPTED, RECOMPUTE = range(5)


class RequestParts(msgspec.Struct, array_like=True, gc=False):
    """Where a request's time has gone until its state last changed; a wire struct like ``Request``.

    Attributes:
        queued: Time of its entry into the queue.
        since: Time of the latest change.
        state: ``QUEUED``, ``PREFILL``, ``DECODE``, ``PREEMPTED`` or ``RECOMPUTE``.
        entered: Time of each limit when it entered the queue; None: not known yet.
        left: Time at which it left the queue; None: not yet.
        queue: Its time in the queue by limit; None: not known yet.
        stalled_before: The engine's stalled time when this state began; None: no step yet.
        interference_before: The engine's interference when this state began.
        transfer: Time in the queue, or preempted, in which it has waited for KV from another engine.
        hung_before: The engine's ``hung`` when it entered the queue; None: its own is known.
        hung: Its time in the queue in which a step took longer than usual, by much.
    """

    queued: float
    since: float
    state: int = QUEUED
    entered: tuple[float, ...] | None = None
    left: float | None = None
    queue: tuple[float, ...] | None = None
    stalled_before: float | None = None
    interference_before: float = 0.0
    prefill: float = 0.0
    prefill_gap: float = 0.0
    decode: float = 0.0
    interference: float = 0.0
    preempted: float = 0.0
    recompute: float = 0.0
    stalled: float = 0.0
    transfer: float = 0.0
    hung_before: float | None = None
    hung: float = 0.0


class PartsTracker:
    """Divides the time of the requests of one engine.

    A stamp that is before the latest change counts as that change, so no part is negative.
    """

    def __init__(self) -> None:
        self.times = EngineTimes()
        self._undivided: dict[int, RequestParts] = {}
        """Requests whose entry into the queue, or exit, is later than all limits that are known, by ``id``."""

    def interrupt(self) -> None:
        """Forget the latest step, since the requests' process has restarted or dropped events."""
        self.times.interrupt()
        self._undivided.clear()

    def restore(self, parts: RequestParts) -> None:
        """Continue with a request of a snapshot."""
        if not self._divide(parts, -math.inf):
            self._undivided[id(parts)] = parts

    def queue(self, stamp: float) -> RequestParts:
        """Return the parts of a request that enters the queue."""
        parts = RequestParts(stamp, stamp, hung_before=self.times.hung)
        self._undivided[id(parts)] = parts
        return parts

    def discard(self, parts: RequestParts) -> None:
        """Stop dividing the time of a request."""
        self._undivided.pop(id(parts), None)

    def join_batch(self, parts: RequestParts, stamp: float) -> None:
        """Note that a request joins the batch, for the first time or again."""
        if parts.state in (QUEUED, PREEMPTED):
            self._close(parts, stamp)
            parts.stalled_before = None
        if parts.state == QUEUED:
            parts.left, parts.state = parts.since, PREFILL
            self._undivided[id(parts)] = parts
        elif parts.state == PREEMPTED:
            parts.state = RECOMPUTE

    def preempt(self, parts: RequestParts, stamp: float) -> None:
        """Note that a request leaves the batch and will return."""
        if parts.state not in (QUEUED, PREEMPTED):
            self._take_hangs(parts)
            self._close(parts, stamp)
            parts.state = PREEMPTED

    def output(self, parts: RequestParts, stamp: float) -> None:
        """Note a request's first output since it has joined the batch."""
        if parts.state in (PREFILL, RECOMPUTE):
            self._close(parts, stamp)
            parts.state = DECODE
            parts.stalled_before = self.times.stalled
            parts.interference_before = self.times.interference

    def compute(self, parts: RequestParts, begin: float, end: float) -> None:
        """Add a step with tokens of a request that has had no output since it has joined the batch."""
        times = self.times
        if parts.stalled_before is None:
            parts.stalled_before = times.stalled - times.hung_since(parts.since)
            self._take_hangs(parts)
        if parts.state == PREFILL:
            computed = end - max(begin, parts.since) - times.hung_since(begin)
            parts.prefill += max(computed, 0.0)

    def _take_hangs(self, parts: RequestParts) -> None:
        """Note how much of a request's time in the queue steps took that were much too long.

        Such a step may end after the request has left the queue.
        """
        times, before = self.times, parts.hung_before
        if before is not None and times.hung > before and parts.left is not None:
            earlier = times.hung - before - times.hang
            parts.hung = earlier + times.hung_since(parts.queued) - times.hung_since(parts.left)
        parts.hung_before = None

    def schedule(self, started: float, limit: int | None) -> None:
        """Note the limit that holds from the start of a step's scheduling; None: unknown."""
        if self._undivided:
            is_known = limit is not None or self.times.limit is not None
            until = started if is_known else math.inf
            self._undivided = {
                key: parts
                for key, parts in self._undivided.items()
                if not self._divide(parts, until)
            }
        self.times.schedule(started, limit)

    def _divide(self, parts: RequestParts, until: float) -> bool:
        """Divide a request's time in the queue by limit, as far as it is before ``until``.

        Return whether nothing of it is left to divide for now.
        """
        limits_at = self.times.limits_at
        if parts.entered is None and parts.queued <= until:
            parts.entered = limits_at(parts.queued)
        if parts.entered is None or parts.left is None:
            return parts.entered is not None
        if parts.queue is None and parts.left <= until:
            pairs = zip_longest(limits_at(parts.left), parts.entered, fillvalue=0.0)
            parts.queue = tuple(later - earlier for later, earlier in pairs)
        return parts.queue is not None

    def finish(
        self, parts: RequestParts, stamp: float, e2e: float | None
    ) -> dict[str, float] | None:
        """Return the parts of a request that ends, without those of 0, in the order of its life.

        ``e2e`` is seconds from its arrival until then; None: unknown, and so are its parts.
        """
        self._close(parts, stamp)
        if parts.left is None:
            parts.left = parts.since
        self._take_hangs(parts)
        self._divide(parts, math.inf)
        self.discard(parts)
        if e2e is None or e2e < 0.0:
            return None
        found: dict[str, float] = {}
        before = e2e - (parts.since - parts.queued)
        if before > 0.0:
            found[FRONT_END_IN] = before
        waited = parts.left - parts.queued
        for key, seconds in zip(_QUEUE_KEYS, parts.queue or (), strict=False):
            if seconds > 0.0:
                found[key] = seconds
                waited -= seconds
        if waited > 0.0:
            found[QUEUE_UNKNOWN] = waited
        _take(found, QUEUE_STALLED, parts.hung, [key for key in found if key.startswith(QUEUE)])
        found |= {part: seconds for part in COMPUTED if (seconds := getattr(parts, part)) > 0.0}
        _take_transfer(found, parts.transfer)
        if before < 0.0:
            # The clocks of front end and engine differ: its arrival comes after the entry into the queue.
            _cut(found, -before, list(found))
        return found

    def _close(self, parts: RequestParts, stamp: float) -> None:
        """Add the time since the latest change."""
        elapsed = max(stamp - parts.since, 0.0)
        parts.since = max(stamp, parts.since)
        if parts.state == PREEMPTED:
            parts.preempted += elapsed
        if parts.state in (QUEUED, PREEMPTED):
            return
        times, before = self.times, parts.stalled_before
        if parts.state == PREFILL:
            if before is None and times.ended is None:
                # No step has a batch: its sender does not know which steps had its prompt.
                parts.prefill = elapsed
            parts.prefill = min(parts.prefill, elapsed)
            elapsed -= parts.prefill
        stalled = 0.0 if before is None else min(times.stalled - before, elapsed)
        parts.stalled += stalled
        elapsed -= stalled
        if parts.state == PREFILL:
            parts.prefill_gap += elapsed
        elif parts.state == RECOMPUTE:
            parts.recompute += elapsed
        else:
            extra = min(times.interference - parts.interference_before, elapsed)
            parts.interference += extra
            parts.decode += elapsed - extra


def _take_transfer(found: dict[str, float], seconds: float) -> None:
    """Take the wait for KV from the parts in which it happened: the queue, or a preemption."""
    waits = [key for key in found if key.startswith(QUEUE) or key == "preempted"]
    # Its transfer was the limit, unless another request waited as well.
    waits.sort(key="queue.kv_transfer".__ne__)
    _take(found, TRANSFER, seconds, waits)


def _take(found: dict[str, float], part: str, seconds: float, order: Sequence[str]) -> None:
    """Take up to ``seconds`` from the parts in ``order``, for a part of its own."""
    taken = min(seconds, sum(found[key] for key in order))
    if taken > 0.0:
        _cut(found, taken, order)
        found[part] = taken


def add_front_end(parts: dict[str, float], seconds: float) -> None:
    """Add the time from the engine's end of a request to its front end's.

    It is negative if the front end has ended the request before, at a stop string that only it finds.
    """
    if seconds > 0.0:
        parts[FRONT_END_OUT] = seconds
    elif seconds < 0.0:
        # What was last was most likely a decode.
        _cut(parts, -seconds, ["decode", *reversed(parts)])


def _cut(parts: dict[str, float], seconds: float, order: Iterable[str]) -> None:
    """Take ``seconds`` from the parts, one after the other."""
    for key in order:
        known = parts.get(key, 0.0)
        if known > seconds:
            parts[key] = known - seconds
            return
        seconds -= parts.pop(key, 0.0)
