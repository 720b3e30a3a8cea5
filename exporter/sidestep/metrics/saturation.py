"""Estimate of an engine's saturation: the request rate divided by the rate that it can serve.

The offered rate is the rate of arriving requests, each worth the tokens that a request takes on
average. No engine reports what it can serve. The estimate learns it: it is the tokens per second
that the engine generates while requests wait for a place in the batch. Before that has happened
once, there is no ratio.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import NamedTuple

MIN_INTERVAL, MAX_INTERVAL = 0.1, 10.0
"""Seconds between two updates: an update sooner than the first is ignored; after a gap longer than
the second, the time in between is unknown."""
MIN_SECONDS = 120.0
MIN_ARRIVALS = 500
"""Seconds and requests that must be known before there is an offered rate; ``MAX_WINDOW`` seconds
are enough where requests are few."""
MARK_INTERVAL = 30.0
"""Seconds between two counts of requests that are stored."""
MIN_TREND, MAX_TREND = 900.0, 1800.0
"""Least and most seconds over which the trend is computed. On a ramp, a mean lags by half of its
window; over less time, the trend is noise."""
MIN_WINDOW, MAX_WINDOW = 60.0, 600.0
"""Seconds over which requests are counted: as few as contain ENOUGH_REQUESTS."""
ENOUGH_REQUESTS = 1500
"""Requests whose number varies by 2.6 % if they arrive independently."""
MEAN_REQUESTS = 5000
"""Requests over which the tokens per request are averaged; at least ``MIN_REQUESTS``."""
MIN_REQUESTS = 20
SETTLING = 3.0
"""Request durations after which a full batch has its final mix: large requests enter late, and
short ones have left."""
MIN_STAY = 0.001
"""Least seconds that a request stays in the batch, whatever an engine reports: a step takes as long."""
MIN_FULL_SECONDS = 20.0
"""Seconds of a settled full batch after which its rate is known."""
RATE_MEMORY = 600.0
"""Seconds of a settled full batch over which its rate is averaged."""
PREEMPTING = 10.0
"""Recent preemptions from which on the KV cache is the limit, not the batch."""
ERROR_MARGIN = 1.5
"""Standard errors added to the rate of an engine whose KV cache is full: the rate depends on which
requests happen to be in the cache, and an unlucky mix causes a queue. Chosen for one simulated ramp
that was detected too early; it has no benefit on ramps that were not used for the choice."""
BLOCKED_SECONDS = 60.0
"""Seconds for which requests must wait continuously before the ratio can reach 1."""
MAX_UNBLOCKED = 0.99
"""Highest ratio until then, since an engine without a queue serves all requests."""


class Load(NamedTuple):
    """The load of an engine at one time.

    Attributes:
        running: Requests in the batch.
        waiting: Requests that wait for a place in the batch, and for nothing else.
        begun: Total requests that have entered the batch.
        arrived: ``begun`` plus all requests that wait for any reason; it decreases when a waiting
            request is aborted.
        generated: Total generated tokens.
        preempted: Total preemptions, by which a request loses its place because memory is short.
    """

    running: float
    waiting: float
    begun: float
    arrived: float
    generated: float
    preempted: float


class OfferedRate:
    """Requests per second: the mean of the last minutes, extrapolated to now by the trend."""

    __slots__ = ("_marks", "_trend")

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()
        """Times, and the requests that had arrived by then."""
        self._trend = 0.0
        """Change of the rate, in requests per second per second."""

    def update(self, now: float, arrived: float) -> float | None:
        """Return the current rate, at least 0; None where too little is known."""
        marks = self._marks
        if not marks or now - marks[-1][0] >= MARK_INTERVAL:
            marks.append((now, arrived))
            while now - marks[0][0] > MAX_TREND:
                marks.popleft()
            self._trend = self._slope()
        known = now - marks[0][0]
        if known < MIN_SECONDS or (known < MAX_WINDOW and arrived - marks[0][1] < MIN_ARRIVALS):
            return None
        since, before = next(
            (
                mark
                for mark in reversed(marks)
                if now - mark[0] >= MIN_WINDOW
                and (
                    arrived - mark[1] >= ENOUGH_REQUESTS
                    or now - mark[0] > MAX_WINDOW - MARK_INTERVAL
                )
            ),
            marks[0],
        )
        seconds = now - since
        return max((arrived - before) / seconds + self._trend * seconds / 2, 0.0)

    def _slope(self) -> float:
        """Return the slope of the least-squares line through the rates between marks."""
        points = [
            ((begin + end) / 2, (after - before) / (end - begin))
            for (begin, before), (end, after) in pairwise(self._marks)
        ]
        if len(points) * MARK_INTERVAL < MIN_TREND:
            return 0.0
        middle = sum(time for time, _ in points) / len(points)
        spread = sum((time - middle) ** 2 for time, _ in points)
        return sum((time - middle) * rate for time, rate in points) / spread


class CapacityRate:
    """Tokens per second of an engine whose batch is full."""

    __slots__ = ("_preempted", "_seconds", "_squares", "_stays", "_tokens")

    def __init__(self) -> None:
        self._seconds = self._tokens = self._squares = 0.0
        self._stays = 0.0
        """Seconds that a request stays in the batch, weighted by seconds."""
        self._preempted = 0.0

    def preempt(self, seconds: float, preempted: float) -> None:
        """Count the preemptions of the last ``seconds``."""
        self._preempted = self._preempted * math.exp(-seconds / RATE_MEMORY) + preempted

    def add(self, seconds: float, tokens: float, blocked: float, stay: float) -> None:
        """Count the ``tokens`` of ``seconds`` of a batch that has been full for ``blocked`` seconds.

        The longer the batch has been full, the more the tokens count: requests also wait below
        saturation, behind a large request or after a burst, and such a batch has not settled yet.
        """
        weight = min(blocked / (SETTLING * stay), 1.0) ** 3 * seconds
        decay = math.exp(-weight / RATE_MEMORY)
        self._seconds = self._seconds * decay + weight
        self._tokens = self._tokens * decay + tokens / seconds * weight
        self._squares = self._squares * decay + (tokens / seconds) ** 2 * weight
        self._stays = self._stays * decay + stay * weight

    @property
    def rate(self) -> float | None:
        """Tokens per second; None where the batch was not full for long enough."""
        if self._seconds < MIN_FULL_SECONDS or self._tokens <= 0.0:
            return None
        mean = self._tokens / self._seconds
        if self._preempted <= PREEMPTING:
            return mean
        # Rates within the stay of one request are not independent: they count as one observation.
        pieces = self._seconds**2 / self._stays
        variance = max(self._squares / self._seconds - mean**2, 0.0)
        return mean + ERROR_MARGIN * math.sqrt(variance / pieces)


class Saturation:
    """The saturation of one engine; call ``update`` about once a second.

    Attributes:
        ratio: 1.0 where the offered rate equals the rate that the engine can serve, more where the
            queue grows; never negative. None until the batch was full for the first time.
    """

    __slots__ = ("_before", "_full", "_offered", "_requests", "_since", "_tokens", "_when", "ratio")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the estimate, since the engine restarted."""
        self.ratio: float | None = None
        self._offered = OfferedRate()
        self._full = CapacityRate()
        self._requests = self._tokens = 0.0
        """The number of recent requests, and the tokens generated in the same time."""
        self._when = 0.0
        self._before: Load | None = None
        self._since: tuple[float, float] | None = None
        """The time since which requests wait continuously, and the tokens generated by then."""

    def update(self, now: float, load: Load) -> None:
        """Update the estimate with the load at ``now``, in monotonic seconds."""
        before = self._before
        seconds = now - self._when
        if before is not None:
            if seconds < MIN_INTERVAL:
                return
            if (
                load.generated < before.generated
                or load.preempted < before.preempted
                # A histogram also restarts at 0 when its buckets change. A preempted request may be
                # reported as one that never entered the batch.
                or load.begun + load.preempted < before.begun + before.preempted
            ):
                # The counters restarted at 0.
                self.reset()
            elif seconds > MAX_INTERVAL:
                self._offered, self._since = OfferedRate(), None
            else:
                self._learn(now, seconds, before, load)
        self._when, self._before = now, load
        self.ratio = self._ratio(now, load)

    def _learn(self, now: float, seconds: float, before: Load, load: Load) -> None:
        begun = load.begun - before.begun
        tokens = load.generated - before.generated
        decay = math.exp(-max(begun, 0.0) / MEAN_REQUESTS)
        self._requests = self._requests * decay + begun
        self._tokens = self._tokens * decay + tokens
        self._full.preempt(seconds, load.preempted - before.preempted)
        if not (before.waiting and load.waiting):
            self._since = None
            return
        if self._since is None:
            self._since = self._when, before.generated
        since, generated = self._since
        made = load.generated - generated
        if self._requests >= MIN_REQUESTS and made > 0.0 and load.running > 0.0:
            blocked = now - since
            # The time to generate the tokens of the running requests at the current rate.
            stay = load.running * (self._tokens / self._requests) * blocked / made
            self._full.add(seconds, tokens, blocked, max(stay, MIN_STAY))

    def _ratio(self, now: float, load: Load) -> float | None:
        rate = self._offered.update(now, load.arrived)
        most = self._full.rate
        if rate is None or most is None or self._requests < MIN_REQUESTS:
            return None
        found = rate * self._tokens / self._requests / most
        is_blocked = self._since is not None and now - self._since[0] >= BLOCKED_SECONDS
        # Rounding to a thousandth avoids sending insignificant changes.
        return round(found if is_blocked else min(found, MAX_UNBLOCKED), 3)
