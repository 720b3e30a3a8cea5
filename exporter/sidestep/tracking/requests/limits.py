"""The time for which each limit kept an engine from admitting the next waiting request.

A limit holds from the scheduling of its step to that of the next one. Time counts while the engine has
unfinished requests; idle time does not.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from sidestep.protocol.engine_totals import TOTAL_LIMIT
from sidestep.protocol.limits import COUNT_LIMIT
from sidestep.protocol.request_events import LIMITS, Iteration
from sidestep.tracking.requests.inflight import MICROS
from sidestep.tracking.requests.outcomes import Outcomes

OTHER_LIMIT = "deferred"
"""The limit that numbers of a newer sender count as."""
ENDLESS = "paused"
"""The limit that may hold for hours without a step."""
MAX_BUSY = 16
"""Most stretches of unfinished requests that wait for the next step."""


class Busy(NamedTuple):
    """A stretch in which the engine has unfinished requests; times are whole microseconds.

    ``until`` is None while it lasts.
    """

    since: int
    until: int | None


class LimitTimes(msgspec.Struct, array_like=True, gc=False):
    """Times of one engine's limits, in the sender's monotonic clock; a wire struct, which a snapshot holds.

    Attributes:
        limit: Name of the limit that holds; None: unknown.
        since: Time until which all time is counted, in whole microseconds, so that the sums are exact.
        busy: Stretches with unfinished requests that are not counted yet, in order.
    """

    limit: str | None = None
    since: int = 0
    busy: list[Busy] = []

    def observe(self, step: Iteration, out: Outcomes) -> None:
        """Count a step by its limit, and the time before it by the limit that held until then."""
        if step.limit is None:
            return
        limit = LIMITS[step.limit] if step.limit < len(LIMITS) else OTHER_LIMIT
        if step.scheduled or (step.scheduled is None and any(o.requests for o in step.outputs)):
            out.limit_steps[limit] = out.limit_steps.get(limit, 0) + 1
        started = _micros(step.started)
        # Steps overlap: one that was scheduled before a pause ends after the pause has begun.
        if started >= self.since:
            self._count(started, out)
            self.limit = limit

    def update(self, now: float, out: Outcomes, *, is_busy: bool) -> None:
        """Note whether the engine has unfinished requests after an event at ``now``."""
        was_busy = bool(self.busy) and self.busy[-1].until is None
        if is_busy == was_busy:
            return
        micros = _micros(now)
        if self.busy:
            # Times of a sender may go back, and stretches that overlap would never be removed.
            since, until = self.busy[-1]
            micros = max(micros, since if until is None else until)
        if is_busy:
            self.busy.append(Busy(micros, None))
        else:
            self.busy[-1] = Busy(since, micros)
        if len(self.busy) > MAX_BUSY:
            # Without a step there is no other limit.
            self._count(self.busy[1].since, out)

    def advance(self, now: float, out: Outcomes) -> None:
        """Count the time until ``now`` if no step follows until the engine is resumed."""
        if self.limit == ENDLESS:
            self._count(_micros(now), out)

    def restart(self) -> None:
        """Forget everything, since another process, or the same after lost events, begins anew."""
        self.limit, self.since = None, 0
        self.busy.clear()

    def _count(self, until: int, out: Outcomes) -> None:
        """Count the time with unfinished requests until then, by the limit that holds."""
        until = max(until, self.since)
        counted = 0
        rest: list[Busy] = []
        for busy in self.busy:
            end = until if busy.until is None else min(busy.until, until)
            counted += max(end - max(busy.since, self.since), 0)
            if busy.until is None or busy.until > until:
                rest.append(busy)
        self.busy, self.since = rest, until
        if self.limit is not None and counted:
            counted = min(counted, COUNT_LIMIT)
            out.limit_micros[self.limit] = out.limit_micros.get(self.limit, 0) + counted


def _micros(seconds: float) -> int:
    """Return whole microseconds, at most what a snapshot can hold: a peer may send any time."""
    return min(round(seconds * MICROS), TOTAL_LIMIT)
