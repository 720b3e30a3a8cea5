"""How much of what an engine can serve it is asked for, from numbers that it tells anyway.

Offered are the requests that came a second, each worth the tokens that a request takes on average.
What the engine can serve is not told by any engine, it is learned: the tokens a second that it
makes while requests wait for a place. Before that happened for the first time nothing is known.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import NamedTuple

LEAST_GAP, GAP = 0.1, 10.0
"""Seconds between two looks: sooner than the first is the same look, later than the second nobody
knows what was in between."""
START = 120.0
SURE = 500
"""Seconds, and requests, that have to be known before there is a rate; ``MOST`` seconds are enough
where requests are few."""
MARK = 30.0
"""Seconds between two counts of requests that are remembered."""
TREND, HISTORY = 900.0, 1800.0
"""Seconds over which there is a trend, from the first to the second: on a ramp a mean is late by
half of its window, and over less time a trend is chance."""
MIN_WINDOW, MAX_WINDOW = 60.0, 600.0
"""Seconds over which requests are counted: as few as have ENOUGH of them."""
ENOUGH = 1500
"""Requests; their number varies by 2.6 % then, where they come independently."""
ANSWERS = 5000
"""Requests over which the tokens of one are averaged; at least ``FEW`` of them."""
MIN_REQUESTS = 20
SETTLING = 3.0
"""Stays of a request until a full batch is as it will be: large requests are let in late, and
what was short has left."""
SHORTEST = 0.001
"""Seconds that a request stays at least, whatever numbers an engine tells: a step takes as long."""
FULL = 20.0
"""Seconds of a settled full batch from which on its rate is known."""
MEMORY = 600.0
"""Seconds of a settled full batch over which its rate is averaged."""
PREEMPTING = 10.0
"""Preemptions of late from which on the KV cache is what is full, not the batch."""
DOUBT = 1.5
"""Standard errors added to the rate of an engine whose KV cache is full: it depends on which
requests happen to hold it, and those that are unlucky together are a queue. Chosen for one
simulated ramp that was seen too early; on ramps that nothing was chosen on it gains nothing."""
BLOCKED = 60.0
"""Seconds for which requests have to wait without a break before the ratio can be 1."""
UNBLOCKED = 0.99
"""Most that it is until then: who has no queue is served."""


class Load(NamedTuple):
    """What an engine tells at one time.

    Attributes:
        running: Requests in the batch.
        waiting: Requests that wait for room in it, and for nothing else.
        begun: Requests that ever had a place in it.
        arrived: Those, and all that wait now for whatever reason; fewer when somebody gives up.
        generated: Tokens ever made.
        preempted: Requests that ever lost their place for want of memory.
    """

    running: float
    waiting: float
    begun: float
    arrived: float
    generated: float
    preempted: float


class Offered:
    """Requests a second: a mean of the last minutes, brought up to now by the trend."""

    __slots__ = ("_marks", "_trend")

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()
        """Time, and requests that had arrived by then."""
        self._trend = 0.0
        """Requests a second, a second."""

    def look(self, now: float, arrived: float) -> float | None:
        """The rate of now, at least 0; None where too little is known."""
        marks = self._marks
        if not marks or now - marks[-1][0] >= MARK:
            marks.append((now, arrived))
            while now - marks[0][0] > HISTORY:
                marks.popleft()
            self._trend = self._slope()
        known = now - marks[0][0]
        if known < START or (known < MAX_WINDOW and arrived - marks[0][1] < SURE):
            return None
        since, before = next(
            (
                mark
                for mark in reversed(marks)
                if now - mark[0] >= MIN_WINDOW
                and (arrived - mark[1] >= ENOUGH or now - mark[0] > MAX_WINDOW - MARK)
            ),
            marks[0],
        )
        seconds = now - since
        return max((arrived - before) / seconds + self._trend * seconds / 2, 0.0)

    def _slope(self) -> float:
        """Of the line through the rates between marks that is off by least squares."""
        points = [
            ((begin + end) / 2, (after - before) / (end - begin))
            for (begin, before), (end, after) in pairwise(self._marks)
        ]
        if len(points) * MARK < TREND:
            return 0.0
        middle = sum(time for time, _ in points) / len(points)
        spread = sum((time - middle) ** 2 for time, _ in points)
        return sum((time - middle) * rate for time, rate in points) / spread


class Full:
    """Tokens a second of an engine whose batch is full."""

    __slots__ = ("_preempted", "_seconds", "_squares", "_stays", "_tokens")

    def __init__(self) -> None:
        self._seconds = self._tokens = self._squares = 0.0
        self._stays = 0.0
        """Seconds that a request stays in the batch, times seconds."""
        self._preempted = 0.0

    def preempt(self, seconds: float, preempted: float) -> None:
        """Note how many requests lost their place in so many seconds."""
        self._preempted = self._preempted * math.exp(-seconds / MEMORY) + preempted

    def add(self, seconds: float, tokens: float, blocked: float, stay: float) -> None:
        """Count ``tokens`` of a batch that has been full for ``blocked`` seconds.

        The longer it has been, the more it counts: requests wait below the knee as well, behind
        one that is large or after a burst, and such a batch is not yet what it comes to.
        """
        weight = min(blocked / (SETTLING * stay), 1.0) ** 3 * seconds
        kept = math.exp(-weight / MEMORY)
        self._seconds = self._seconds * kept + weight
        self._tokens = self._tokens * kept + tokens / seconds * weight
        self._squares = self._squares * kept + (tokens / seconds) ** 2 * weight
        self._stays = self._stays * kept + stay * weight

    @property
    def rate(self) -> float | None:
        """Tokens a second; None where it was not full for long enough."""
        if self._seconds < FULL or self._tokens <= 0.0:
            return None
        mean = self._tokens / self._seconds
        if self._preempted <= PREEMPTING:
            return mean
        # What happens within the stay of a request is of one piece.
        pieces = self._seconds**2 / self._stays
        variance = max(self._squares / self._seconds - mean**2, 0.0)
        return mean + DOUBT * math.sqrt(variance / pieces)


class Saturation:
    """The share of an engine's capacity that it is asked for; ``look`` about once a second.

    Attributes:
        ratio: 1.0 where as much is asked for as it can serve, more where a queue grows; never
            negative. None before it was full for the first time.
    """

    __slots__ = ("_before", "_full", "_offered", "_requests", "_since", "_tokens", "_when", "ratio")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: it is another engine now."""
        self.ratio: float | None = None
        self._offered = Offered()
        self._full = Full()
        self._requests = self._tokens = 0.0
        """Of the last requests: how many, and the tokens that were made meanwhile."""
        self._when = 0.0
        self._before: Load | None = None
        self._since: tuple[float, float] | None = None
        """When requests began to wait without a break, and the tokens made by then."""

    def look(self, now: float, load: Load) -> None:
        """Take in what the engine tells ``now``, monotonic seconds."""
        before = self._before
        seconds = now - self._when
        if before is not None:
            if seconds < LEAST_GAP:
                return
            if (
                load.generated < before.generated
                or load.preempted < before.preempted
                # A histogram begins anew where it gets other buckets, too. Who lost a place may be
                # told as one who never had it.
                or load.begun + load.preempted < before.begun + before.preempted
            ):
                # Its counters begin anew.
                self.forget()
            elif seconds > GAP:
                self._offered, self._since = Offered(), None
            else:
                self._learn(now, seconds, before, load)
        self._when, self._before = now, load
        self.ratio = self._ratio(now, load)

    def _learn(self, now: float, seconds: float, before: Load, load: Load) -> None:
        begun = load.begun - before.begun
        tokens = load.generated - before.generated
        kept = math.exp(-max(begun, 0.0) / ANSWERS)
        self._requests = self._requests * kept + begun
        self._tokens = self._tokens * kept + tokens
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
            # Those in the batch have to be made at this pace.
            stay = load.running * (self._tokens / self._requests) * blocked / made
            self._full.add(seconds, tokens, blocked, max(stay, SHORTEST))

    def _ratio(self, now: float, load: Load) -> float | None:
        rate = self._offered.look(now, load.arrived)
        most = self._full.rate
        if rate is None or most is None or self._requests < MIN_REQUESTS:
            return None
        found = rate * self._tokens / self._requests / most
        is_blocked = self._since is not None and now - self._since[0] >= BLOCKED
        # To a thousandth: what does not change is not sent anew.
        return round(found if is_blocked else min(found, UNBLOCKED), 3)
