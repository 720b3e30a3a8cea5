"""Reports of front ends, matched with the requests of a core: first tokens and ends, as users saw them.

Core and front end report a request separately, in any order and without an id. Both know its arrival to
the last bit, since one process has set it and the latencies subtracted from a Unix time are exact.
Requests of one arrival, such as parallel samples and lists of prompts, have their first tokens in the
same order on both sides. They may end in another order, since the front end finds stop strings. Then
their time in the queue distinguishes them, which the front end computes from the core's own times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Generic, TypeVar

import msgspec

from sidestep.tracking.requests.inflight import Request
from sidestep.tracking.requests.outcomes import EndedRequest, RequestSink
from sidestep.tracking.requests.parts import add_front_end

MAX_UNMATCHED = 4096
"""Most values of each kind that wait for their other side, which never comes for an aborted request."""
HOLD_SECONDS = 60.0
"""Longest time for which a request that has ended in the core waits for its front end."""
UNSERVED = frozenset({"abort", "refused", "engine_died", "expired"})
"""Reasons of requests whose end a front end does not report."""

T = TypeVar("T")
CountEnded = Callable[[EndedRequest], None]


class ByArrival(Generic[T]):
    """Values by the arrival of their request, in order."""

    def __init__(self) -> None:
        self._values: dict[float, list[T]] = {}
        self._count = 0

    def add(self, arrival: float, value: T) -> T | None:
        """Add a value; return the oldest one if there are too many."""
        self._values.setdefault(arrival, []).append(value)
        self._count += 1
        return self.take(next(iter(self._values))) if self._count > MAX_UNMATCHED else None

    def take(self, arrival: float, fits: Callable[[T], bool] = lambda _: True) -> T | None:
        """Remove and return the first value of ``arrival`` that ``fits``; None if there is none."""
        values = self._values.get(arrival, [])
        for at, value in enumerate(values):
            if fits(value):
                del values[at]
                self._count -= 1
                if not values:
                    del self._values[arrival]
                return value
        return None

    def of(self, arrival: float) -> Sequence[T]:
        """Return the values of ``arrival``."""
        return self._values.get(arrival, ())

    def pairs(self) -> list[tuple[float, T]]:
        """Return all values with their arrivals."""
        return [(arrival, value) for arrival, some in self._values.items() for value in some]

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()
        self._count = 0


class FrontEndState(msgspec.Struct, array_like=True, gc=False):
    """Values that wait for their other side, in a snapshot; see ``FrontEndReports``."""

    sent: list[tuple[float, tuple[int, float]]] = []
    received: list[tuple[float, float]] = []
    ends: list[tuple[float, tuple[float, float | None]]] = []
    held: list[EndedRequest] = []


class FrontEndReports:
    """The reports of an engine's front ends, and the ended requests, which are passed on when they are complete.

    Attributes:
        expected: Whether front ends report first tokens and ends, so that requests wait for them.
        sent: Number of each request whose first output no front end has reported, and its Unix time.
        received: Unix times of first tokens whose output the core has not reported.
        ends: Unix times of ends that the core has not reported, and the requests' time in the queue.
        held: Requests that have ended in the core.
    """

    def __init__(self, sink: RequestSink | None = None, count: CountEnded | None = None) -> None:
        self._sink = sink
        self._count = count
        self.expected = False
        self.sent: ByArrival[tuple[int, float]] = ByArrival()
        self.received: ByArrival[float] = ByArrival()
        self.ends: ByArrival[tuple[float, float | None]] = ByArrival()
        self.held: ByArrival[EndedRequest] = ByArrival()
        self._since: dict[int, float] = {}
        """Time since which a held request is known to wait, by its number."""

    def output(self, number: int, request: Request, at: float) -> float | None:
        """Note a request's first output; return its seconds to the front end if that has reported it."""
        if request.arrival is None:
            return None
        received = self.received.take(request.arrival)
        if received is None:
            self.sent.add(request.arrival, (number, at))
            return None
        request.ttft = received - request.arrival
        return received - at

    def first_token(self, arrival: float, at: float, live: Mapping[int, Request]) -> float | None:
        """Note a received first token; return its seconds from the core if the core has reported it."""
        found = self.sent.take(arrival)
        if found is None:
            self.received.add(arrival, at)
            return None
        number, sent = found
        held = (one.request for one in self.held.of(arrival) if one.number == number)
        request = live.get(number) or next(held, None)
        if request is not None:
            request.ttft = at - arrival
        return at - sent

    def end(self, ended: EndedRequest) -> None:
        """Pass on a request that has ended in the core, once its front end has reported its end."""
        arrival = None if ended.request is None else ended.request.arrival
        if arrival is None or not self.expected:
            self._pass_on(ended)
            return
        found = self.ends.take(arrival, lambda one: _is_same(ended, one[1]))
        if found is not None:
            ended.e2e = found[0] - arrival
        if self._is_complete(ended):
            self._pass_on(ended)
        elif (oldest := self.held.add(arrival, ended)) is not None:
            self._give_up(oldest)

    def end_reported(self, arrival: float, at: float, queue: float | None) -> None:
        """Apply the end of a request that a front end has seen; ``queue`` is its time in the queue."""
        ended = self.held.take(arrival, lambda one: one.e2e is None and _is_same(one, queue))
        if ended is None:
            self.ends.add(arrival, (at, queue))
            return
        ended.e2e = at - arrival
        self._since.pop(ended.number, None)
        self._pass_on(ended)

    def release_overdue(self, now: float) -> bool:
        """Pass on requests for which no front end will report more; return whether there were any."""
        found = False
        for arrival, ended in self.held.pairs():
            waited = now - self._since.setdefault(ended.number, now)
            if waited >= HOLD_SECONDS or self._is_complete(ended):
                self.held.take(arrival, partial(is_, ended))
                self._give_up(ended)
                found = True
        return found

    def release(self) -> None:
        """Pass on all held requests, since the core's process has ended or the exporter ends."""
        for _, ended in self.held.pairs():
            self._give_up(ended)
        self.held.clear()

    def skip(self) -> None:
        """Forget the values that wait for events of the core, since some events are missing."""
        for one in (self.sent, self.received, self.ends):
            one.clear()

    def state(self) -> FrontEndState:
        """Return the content of a snapshot."""
        held = [ended for _, ended in self.held.pairs()]
        return FrontEndState(self.sent.pairs(), self.received.pairs(), self.ends.pairs(), held)

    def restore(self, state: FrontEndState) -> None:
        """Restore the content of a snapshot."""
        _restore(self.sent, state.sent)
        _restore(self.received, state.received)
        _restore(self.ends, state.ends)
        _restore(self.held, [(_arrival(ended), ended) for ended in state.held])

    def _is_complete(self, ended: EndedRequest) -> bool:
        """Return whether the front ends have reported the request's end and first token."""
        is_ended = ended.e2e is not None or ended.reason in UNSERVED
        return is_ended and not self._awaits_token(ended)

    def _awaits_token(self, ended: EndedRequest) -> bool:
        return any(number == ended.number for number, _ in self.sent.of(_arrival(ended)))

    def _give_up(self, ended: EndedRequest) -> None:
        """Pass on a request with what is known, since no front end will report the rest."""
        arrival = _arrival(ended)
        self._since.pop(ended.number, None)
        if ended.e2e is None and ended.reason not in UNSERVED:
            found = self.ends.take(arrival)
            ended.e2e = None if found is None else found[0] - arrival
        elif ended.request is not None and self._awaits_token(ended):
            # Its client had left before the first token, so nobody has waited for the token.
            ended.request.ttft = None
        self.sent.take(arrival, lambda one: one[0] == ended.number)
        self._pass_on(ended)

    def _pass_on(self, ended: EndedRequest) -> None:
        _complete_parts(ended)
        if self._count is not None:
            self._count(ended)
        if self._sink is not None:
            self._sink.end(ended)


def _complete_parts(ended: EndedRequest) -> None:
    """Extend the parts of a request from its end in the core to its front end's, where that is reported."""
    core_e2e = ended.core_e2e
    if ended.parts is None or ended.e2e is None or core_e2e is None:
        return
    if ended.e2e < 0.0:
        ended.parts = None
    else:
        add_front_end(ended.parts, ended.e2e - core_e2e)


def _restore(found: ByArrival[T], values: Iterable[tuple[float, T]]) -> None:
    for arrival, value in values:
        found.add(arrival, value)


def _arrival(ended: EndedRequest) -> float:
    """Return the arrival of a held request; only those with one are held."""
    arrival = None if ended.request is None else ended.request.arrival
    return 0.0 if arrival is None else arrival


def _is_same(ended: EndedRequest, queue: float | None) -> bool:
    """Return whether a request's time in the queue is the one that a front end reports, if known."""
    request = ended.request
    if queue is None or request is None or request.queued is None or request.scheduled is None:
        return True
    return queue == max(request.scheduled - request.queued, 0.0)


MAX_TRACES = 4096
"""Requests whose latencies may still be reported."""


class Traces:
    """The trace contexts of an engine's latest requests by arrival, which parallel samples share."""

    def __init__(self) -> None:
        self._by_arrival: dict[float, str] = {}

    def add(self, arrival: float, trace: str) -> None:
        """Remember the trace of a request; forget it if another request has the same arrival."""
        known = self._by_arrival.setdefault(arrival, trace)
        if known != trace:
            self._by_arrival[arrival] = ""
        if len(self._by_arrival) > MAX_TRACES:
            del self._by_arrival[next(iter(self._by_arrival))]

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._by_arrival)

    def find(self, arrival: float) -> str:
        """Return the trace of the request that arrived then; empty if it is unknown."""
        return self._by_arrival.get(arrival, "")
