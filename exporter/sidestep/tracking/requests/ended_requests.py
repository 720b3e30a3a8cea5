"""Requests of one engine that have ended: completed by front ends' reports, then counted and passed on."""

from __future__ import annotations

from collections.abc import Callable

from sidestep.tracking.requests.front_end import FrontEndReports
from sidestep.tracking.requests.outcomes import EndedRequest, RequestSink
from sidestep.tracking.requests.parts import add_front_end

CountEnded = Callable[[EndedRequest], None]
"""Counter of each request that ends."""


class EndedRequests:
    """Passes on the requests of one engine that have ended.

    Attributes:
        reports: Reports of the engine's front ends.
    """

    def __init__(self, sink: RequestSink | None, count: CountEnded | None) -> None:
        self.reports = FrontEndReports()
        self._sink = sink
        self._count = count

    def end(self, ended: EndedRequest) -> None:
        """Pass on a request, once its front end has reported its end where front ends do."""
        self._pass_on(self.reports.end(ended) if self.reports.expected else ended)

    def end_reported(self, arrival: float, at: float, queue: float | None) -> None:
        """Apply the end of a request that a front end has seen; ``queue`` is its time in the queue."""
        self._pass_on(self.reports.end_reported(arrival, at, queue))

    def release_overdue(self, now: float) -> bool:
        """Pass on requests for which no front end will report more; return whether there were any."""
        overdue = list(self.reports.overdue(now))
        self._pass_on(*overdue)
        return bool(overdue)

    def release(self) -> None:
        """Pass on all requests that wait for front ends."""
        self._pass_on(*self.reports.release())

    def _pass_on(self, *ended: EndedRequest | None) -> None:
        for one in ended:
            if one is None:
                continue
            _complete_parts(one)
            if self._count is not None:
                self._count(one)
            if self._sink is not None:
                self._sink.end(one)


def _complete_parts(ended: EndedRequest) -> None:
    """Extend the parts of a request from its end in the core to its front end's, where that is reported."""
    core_e2e = ended.core_e2e
    if ended.parts is None or ended.e2e is None or core_e2e is None:
        return
    if ended.e2e < 0.0:
        ended.parts = None
    else:
        add_front_end(ended.parts, ended.e2e - core_e2e)
