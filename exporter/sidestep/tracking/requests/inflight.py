"""Requests in flight of one engine, their counts, and the limit that all engines share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.protocol.limits import MAX_OPEN_VALUES, OTHER, is_printable
from sidestep.protocol.request_events import PREEMPTED, RUNNING, WAITING, WHOLE, Identity
from sidestep.tracking.requests.parts import RequestParts

FULL_SHARES = 2
"""Engines that may each track the full number of requests at once."""


class RequestCapacity:
    """Shared limit on tracked requests, of which each engine has a guaranteed share.

    Attributes:
        capacity: Most requests of all engines; an engine may exceed it within its share.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.engines = self.used = 0

    def add_engine(self, capacity: int) -> None:
        """Add an engine that may track ``capacity`` requests."""
        self.capacity = max(self.capacity, FULL_SHARES * capacity)
        self.engines += 1

    @property
    def share(self) -> int:
        """Number of requests that an engine may track in any case."""
        return self.capacity // max(self.engines, 1)

    def allows(self, tracked: int) -> bool:
        """Return whether an engine that tracks ``tracked`` requests may track one more."""
        return self.used < self.capacity or tracked < self.share


UNKNOWN = -1
"""State of a request whose start is unknown."""
WAITS = (WAITING, PREEMPTED)
"""States of a request that is not in the batch."""
MICROS = 1_000_000
"""Held blocks are whole numbers of microseconds, since a sum of floats depends on their order."""
MAX_PAUSES = 8
"""Most preemptions of a request whose times are kept; all are counted."""
AGE_CHECK = 1.0
"""Seconds between two searches for requests that are too old."""


class Request(msgspec.Struct, array_like=True, gc=False):
    """One request; times are in the sender's monotonic clock, and None is unknown.

    It is a wire struct, so that a snapshot encodes 65,000 requests quickly.

    Attributes:
        since: Time of its first event.
        state: One of the states in ``protocol.request_events``, or ``UNKNOWN``.
        arrival: Unix time of its arrival at the front end.
        cached: Prompt tokens whose KV came from a cache.
        waits: Its tokens that count as waiting.
        unfilled: Its tokens that count as not computed yet, before its next output.
        queued: Time of its entry into the queue.
        scheduled: Time of the SCHEDULED event that ends its queueing.
        preempted: Time of its preemption, until it is scheduled again.
        group: Number of its group of parallel samples; 0: none.
        fresh: Whether it is known to have had no output yet.
        lone: Whether it is known to be its request's only sample.
        whole: Whether its events are known from the start.
        identity: Identity of its client; None where the sender does not send it.
        tenant: Its tenant; empty where tenants are not counted.
        sample: Index among the parallel samples of its request.
        ttft: Seconds from its arrival until its front end has received its first output, or until the
            output itself where front ends do not report that.
        external: Cached tokens that came from another engine or an external cache.
        preempted_seconds: Time that it spent preempted.
        longest_gap: Longest time between two outputs, where records are made.
        extra_tokens: Tokens beyond the first of each output, where records are made.
        pauses: Time and length of its first preemptions, where records are made.
        held_since: Time since which it is in the batch; None: it is not in the batch.
        held_tokens: Its tokens at that time.
        parts: Where its time has gone since it was queued; None: its beginning is unknown.
        transfer: What it is to its engine, as in ``Queued``.
    """

    since: float
    state: int = UNKNOWN
    adapter: str = ""
    arrival: float | None = None
    cached: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    waits: int = 0
    queued: float | None = None
    scheduled: float | None = None
    first: float | None = None
    last: float | None = None
    preempted: float | None = None
    group: int = 0
    fresh: bool = False
    lone: bool = False
    whole: bool = False
    identity: Identity | None = None
    tenant: str = ""
    sample: int = 0
    ttft: float | None = None
    external: int = 0
    preemptions: int = 0
    preempted_seconds: float = 0.0
    longest_gap: float = 0.0
    extra_tokens: int = 0
    pauses: Annotated[tuple[tuple[float, float], ...], Meta(max_length=MAX_PAUSES)] = ()
    max_tokens: int | None = None
    held_since: float | None = None
    held_tokens: int = 0
    unfilled: int = 0
    parts: RequestParts | None = None
    transfer: int = WHOLE

    def join_batch(self, now: float) -> None:
        """Note that the request holds its tokens' blocks from now on."""
        self.held_since = now
        self.held_tokens = self.prompt_tokens + self.tokens

    def leave_batch(self, now: float, block_size: int) -> int:
        """Return the KV blocks that the request has held times the microseconds, now that it holds none.

        It held the blocks that its tokens fill: those of its prompt until its first output, and then
        evenly more. Blocks that it shares with other requests count for each of them. With a
        ``block_size`` of 0, which is unknown, nothing counts.
        """
        since, self.held_since = self.held_since, None
        if since is None or not block_size or now <= since:
            return 0
        first = self.first
        grows = since if first is None or first < since else min(first, now)
        before = -(-self.held_tokens // block_size)
        after = -(-(self.prompt_tokens + self.tokens) // block_size)
        return round(((grows - since) * before + (now - grows) * (before + after) / 2) * MICROS)


class InFlight:
    """At most ``capacity`` requests, by the numbers that their sender gave them.

    Attributes:
        live: The requests, in the order of their first events.
        prefilling: Numbers of requests without an output since they entered the batch.
        preempted: Preempted requests that wait, and the times of their preemption.
        waiting_tokens: Tokens of the requests that wait, with those generated before a preemption.
        waiting_prompt_tokens: Tokens of their prompts.
        prefill_tokens: Tokens that are not computed yet, of requests that wait or are in prefill.
        adapters: Number of requests by LoRA adapter and state, ``running`` or ``waiting``.
        limited: Requests whose adapter became ``__other__`` since this was last set to 0.
        untracked: Requests whose intervals cannot all be known, by reason, since this was last
            emptied. Each request counts once.
        given_up: Numbers of requests that are not tracked, although they may continue.
        cut_off: Requests that were counted as untracked, and of which events may still arrive.
    """

    def __init__(self, capacity: int, max_age: float, shared_capacity: RequestCapacity) -> None:
        self.capacity = capacity
        self._shared_capacity = shared_capacity
        shared_capacity.add_engine(capacity)
        self.max_age = max_age
        self.live: dict[int, Request] = {}
        self.prefilling: set[int] = set()
        self.preempted: dict[int, float] = {}
        self.waiting_tokens = self.waiting_prompt_tokens = self.prefill_tokens = 0
        self.adapters: dict[tuple[str, str], int] = {}
        self.limited = 0
        self.untracked: Counter[str] = Counter()
        self.given_up: set[int] = set()
        self.cut_off = 0
        self._check_at = 0.0

    def track(self, number: int, now: float) -> Request | None:
        """Start to track a request; return None if there are too many."""
        if self.full:
            self._give_up(number, "capacity")
            return None
        request = self.live[number] = Request(now)
        self._shared_capacity.used += 1
        return request

    @property
    def full(self) -> bool:
        """True if no further request may be tracked."""
        held = len(self.live)
        return held >= self.capacity or not self._shared_capacity.allows(held)

    def find_or_track(self, number: int, now: float) -> Request | None:
        """Return the request of that number; track it if it is unknown; None if it is given up."""
        request = self.live.get(number)
        if request is not None or number in self.given_up or self.full:
            return request
        self._count_unknown()
        return self.track(number, now)

    def restore(self, number: int, request: Request) -> None:
        """Track a request again, in the state that a snapshot has."""
        self._shared_capacity.used += number not in self.live
        self.live[number] = request
        if request.state == PREEMPTED:
            self.preempted[number] = request.preempted or request.since
        self.waiting_tokens += request.waits
        if request.state in WAITS:
            self.waiting_prompt_tokens += request.prompt_tokens
            # Snapshots of earlier releases do not have it.
            request.unfilled = request.waits
        self.prefill_tokens += request.unfilled
        if request.adapter and request.state != UNKNOWN:
            self._count_adapter(request, 1)

    def adapter(self, name: str) -> str:
        """Return ``name`` as a label value: printable, and one of a limited number."""
        if not name:
            return name
        known = {OTHER, name, *(adapter for adapter, _ in self.adapters)}
        if is_printable(name) and len(known) <= MAX_OPEN_VALUES:
            return name
        self.limited += 1
        return OTHER

    def move(
        self, number: int, request: Request, state: int, prompt_tokens: int | None = None
    ) -> None:
        """Change the state of ``request``, and the tokens of its prompt if given; update all counts."""
        self._uncount(number, request)
        request.state = state
        if prompt_tokens is not None:
            request.prompt_tokens = prompt_tokens
        if state in WAITS:
            request.waits = request.prompt_tokens + request.tokens
            self.waiting_tokens += request.waits
            self.waiting_prompt_tokens += request.prompt_tokens
            self._leave_unfilled(request, request.waits)
        if state == PREEMPTED:
            self.preempted[number] = request.preempted or request.since
        if request.adapter:
            self._count_adapter(request, 1)

    def begin_prefill(self, number: int, request: Request) -> None:
        """Note that a request has joined the batch: what it has waited with is still to be computed."""
        waited = request.waits
        self.move(number, request, RUNNING)
        self.prefilling.add(number)
        self._leave_unfilled(request, waited)

    def fill(self, number: int, computed: int) -> None:
        """Note that a step has computed tokens of a request in prefill."""
        request = self.live[number]
        self._leave_unfilled(request, max(request.unfilled - computed, 0))

    def end_prefill(self, numbers: Iterable[int]) -> list[Request]:
        """Note that nothing of the prompts of requests with output is left; return those in prefill until now."""
        ended = self.prefilling.intersection(numbers)
        self.prefilling -= ended
        found = [self.live[number] for number in ended]
        for request in found:
            self._leave_unfilled(request, 0)
        return found

    def _leave_unfilled(self, request: Request, tokens: int) -> None:
        self.prefill_tokens += tokens - request.unfilled
        request.unfilled = tokens

    def remove(self, number: int) -> Request | None:
        """Remove a request that ended from all counts; return None if it is unknown."""
        request = self.live.pop(number, None)
        if request is not None:
            self._shared_capacity.used -= 1
            self._uncount(number, request)
        elif number in self.given_up:
            self.given_up.discard(number)
        else:
            self._count_unknown()
        return request

    def expire(self, now: float, most: int) -> Iterator[tuple[int, Request]]:
        """Give up, and yield, up to ``most`` requests that are unfinished for too long."""
        if now < self._check_at or not most:
            return
        old: list[int] = []
        oldest = now
        for number, request in self.live.items():
            oldest = request.since
            if now - oldest <= self.max_age or len(old) == most:
                break
            old.append(number)
        if len(old) < most:
            # Until the oldest request is too old, none is. The interval is for stamps that jump.
            self._check_at = max(now + AGE_CHECK, oldest + self.max_age)
        for number in old:
            request = self.live.pop(number)
            self._shared_capacity.used -= 1
            self._uncount(number, request)
            self._give_up(number, "age")
            yield number, request

    @property
    def whole(self) -> int:
        """Number of requests whose events are known from the start."""
        return sum(request.whole for request in self.live.values())

    def drop(
        self, reason: str = "restart", more: int = 0, process: int | None = None, processes: int = 1
    ) -> list[Request]:
        """Drop and return the requests of a process, since later events do not continue the earlier ones.

        Args:
            reason: Reason why not all their intervals can be known.
            more: Number of further requests, never tracked here, to count for the same reason.
            process: Number of the process; None: all of them.
            processes: How many processes number the requests.
        """

        def is_dropped(number: int) -> bool:
            return process is None or number % processes == process

        dropped = {n: request for n, request in self.live.items() if is_dropped(n)}
        for number, request in dropped.items():
            del self.live[number]
            self._uncount(number, request)
        self._shared_capacity.used -= len(dropped)
        self.given_up = {number for number in self.given_up if not is_dropped(number)}
        # Of what was cut off earlier, another process may still send ends.
        others = 0 if process is None or processes == 1 else self.cut_off
        self.cut_off = len(dropped) + more + others
        self.untracked[reason] += len(dropped) + more
        self._check_at = 0.0
        return list(dropped.values())

    def close(self) -> None:
        """Release the engine's share of the capacity."""
        self._shared_capacity.engines -= 1

    def _count_unknown(self) -> None:
        if self.cut_off:
            # It was counted when the events were interrupted.
            self.cut_off -= 1
        else:
            self.untracked["unknown"] += 1

    def _give_up(self, number: int, reason: str) -> None:
        """Count a request as untracked; later events of it do not count again."""
        self.untracked[reason] += 1
        if len(self.given_up) < min(self.capacity, self._shared_capacity.share):
            self.given_up.add(number)

    def _uncount(self, number: int, request: Request) -> None:
        self.waiting_tokens -= request.waits
        request.waits = 0
        if request.state in WAITS:
            self.waiting_prompt_tokens -= request.prompt_tokens
        self._leave_unfilled(request, 0)
        self.preempted.pop(number, None)
        if request.adapter and request.state != UNKNOWN:
            self._count_adapter(request, -1)
        self.prefilling.discard(number)

    def _count_adapter(self, request: Request, change: int) -> None:
        key = request.adapter, "running" if request.state == RUNNING else "waiting"
        count = self.adapters.get(key, 0) + change
        if count > 0:
            self.adapters[key] = count
        else:
            del self.adapters[key]
