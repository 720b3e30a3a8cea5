"""The requests of one engine that have not finished, and the counts of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from sidestep.protocol.limits import MAX_OPEN_VALUES, OTHER, is_printable
from sidestep.protocol.request_events import PREEMPTED, RUNNING, WAITING
from sidestep.tracking.requests.capacity import RequestCapacity

UNKNOWN = -1
"""State of a request that was first heard of in its middle."""
AGE_CHECK = 1.0
"""Seconds between two looks for requests that are too old."""


class Request(msgspec.Struct, array_like=True, gc=False):
    """One request; None is not known. Seconds are the sender's monotonic clock.

    A struct, since a snapshot holds it: 65,000 of them are encoded in a moment.

    Attributes:
        since: When it was first heard of.
        whole: It was heard of from its start.
        lone: It is certainly its question's only sample.
        fresh: It has certainly had no output yet.
        first: Its first output.
        last: Its latest output.
        preempted: Its preemption, until it is scheduled again.
        cached: Prompt tokens whose KV came from a cache.
        tokens: Generated so far, as far as heard of.
        waits: Its share of the tokens that wait.
        group: Number of its question, where that has several samples; 0 is none.
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


class InFlight:
    """At most ``capacity`` requests by the numbers that their sender gave them.

    Attributes:
        live: The requests, in the order in which they were first heard of.
        prefilling: Numbers of those in the batch without an output since they joined it.
        preempted: Those that wait because they were preempted, and since when.
        waiting_tokens: Tokens of all that wait.
        adapters: How many by LoRA adapter and state, ``running`` or ``waiting``.
        limited: Requests whose adapter is ``__other__``, since this was last set to 0.
        untracked: Requests whose intervals cannot all be known, by reason, since
            this was last emptied; each once.
        given_up: Numbers of requests that are not followed though they may go on.
        cut_off: Requests that were counted as untracked, and may be heard of again.
    """

    def __init__(self, capacity: int, max_age: float, shared_capacity: RequestCapacity) -> None:
        self.capacity = capacity
        self._shared_capacity = shared_capacity
        shared_capacity.add_engine(capacity)
        self.max_age = max_age
        self.live: dict[int, Request] = {}
        self.prefilling: set[int] = set()
        self.preempted: dict[int, float] = {}
        self.waiting_tokens = 0
        self.adapters: dict[tuple[str, str], int] = {}
        self.limited = 0
        self.untracked: Counter[str] = Counter()
        self.given_up: set[int] = set()
        self.cut_off = 0
        self._check_at = 0.0

    def track(self, number: int, now: float) -> Request | None:
        """Follow a request from now on; None where there are too many."""
        if self.full:
            self._give_up(number, "capacity")
            return None
        request = self.live[number] = Request(now)
        self._shared_capacity.used += 1
        return request

    @property
    def full(self) -> bool:
        """Whether no other request may be followed."""
        held = len(self.live)
        return held >= self.capacity or not self._shared_capacity.allows(held)

    def known(self, number: int, now: float) -> Request | None:
        """The request of that number, adopted in its middle if need be; None if given up."""
        request = self.live.get(number)
        if request is not None or number in self.given_up or self.full:
            return request
        self._count_unknown()
        return self.track(number, now)

    def restore(self, number: int, request: Request) -> None:
        """Follow a request that was followed before, as it was then."""
        self._shared_capacity.used += number not in self.live
        self.live[number] = request
        if request.state == PREEMPTED:
            self.preempted[number] = request.preempted or request.since
        self.waiting_tokens += request.waits
        if request.adapter and request.state != UNKNOWN:
            self._count_adapter(request, 1)

    def adapter(self, name: str) -> str:
        """``name`` as a label value: one of a limited number, and printable."""
        if not name:
            return name
        known = {OTHER, name, *(adapter for adapter, _ in self.adapters)}
        if is_printable(name) and len(known) <= MAX_OPEN_VALUES:
            return name
        self.limited += 1
        return OTHER

    def move(self, number: int, request: Request, state: int) -> None:
        """Give ``request`` its new state in every count that knows of it."""
        self._uncount(number, request)
        request.state = state
        if state in (WAITING, PREEMPTED):
            request.waits = request.prompt_tokens + request.tokens
            self.waiting_tokens += request.waits
        if state == PREEMPTED:
            self.preempted[number] = request.preempted or request.since
        if request.adapter:
            self._count_adapter(request, 1)

    def remove(self, number: int) -> Request | None:
        """Take a request that ended out of every count; None where nothing is known of it."""
        request = self.live.pop(number, None)
        if request is not None:
            self._shared_capacity.used -= 1
            self._uncount(number, request)
        elif number in self.given_up:
            self.given_up.discard(number)
        else:
            self._count_unknown()
        return request

    def expire(self, now: float, most: int) -> Iterator[Request]:
        """Give up, and yield, up to so many requests that have not finished for too long."""
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
            # Until the eldest is too old there is nothing to look for: stamps may leap.
            self._check_at = max(now + AGE_CHECK, oldest + self.max_age)
        for number in old:
            request = self.live.pop(number)
            self._shared_capacity.used -= 1
            self._uncount(number, request)
            self._give_up(number, "age")
            yield request

    @property
    def whole(self) -> int:
        """How many were heard of from their start."""
        return sum(request.whole for request in self.live.values())

    def clear(self, reason: str = "restart", more: int = 0) -> None:
        """What is heard of the requests from now on does not belong to what was heard before.

        Args:
            reason: Why their intervals cannot all be known.
            more: Others of whom the same is true, and who were never here.
        """
        self.cut_off = len(self.live) + more
        self.untracked[reason] += self.cut_off
        self._shared_capacity.used -= len(self.live)
        self.live.clear()
        self.prefilling.clear()
        self.adapters.clear()
        self.given_up.clear()
        self.preempted.clear()
        self.waiting_tokens = 0
        self._check_at = 0.0

    def close(self) -> None:
        """There is no such engine any more."""
        self._shared_capacity.engines -= 1

    def _count_unknown(self) -> None:
        if self.cut_off:
            # One of those that were counted when what was heard of them broke off.
            self.cut_off -= 1
        else:
            self.untracked["unknown"] += 1

    def _give_up(self, number: int, reason: str) -> None:
        """Count a request once, whatever is heard of it later."""
        self.untracked[reason] += 1
        if len(self.given_up) < min(self.capacity, self._shared_capacity.share):
            self.given_up.add(number)

    def _uncount(self, number: int, request: Request) -> None:
        self.waiting_tokens -= request.waits
        request.waits = 0
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
