"""Saturation of an engine: the offered load divided by the load that the engine can serve.

The estimate lies between two measurements, both averaged over the last minutes. How full the batch is
gives too little where a fuller batch takes longer steps. How much of the time the engine works gives
too much where it does not. The shortest step of the last day weighs them: its time is the part of a step
that costs the same whatever the batch, and the rest grows with the load. An engine that only computes
chunks of long prompts has no short step, so the tokens of its shortest one, as a share of the most that a
step may have, count as load.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sidestep.metrics.engine_state import Part

MIN_INTERVAL, MAX_INTERVAL = 0.1, 10.0
"""Seconds between two updates: an update sooner than the first is ignored; after a gap longer than
the second, the time in between is unknown."""
MEMORY = 120.0
"""Seconds over which the signs are averaged, with exponentially decreasing weights."""
MIN_SECONDS = 60.0
"""Seconds that must be known before there is a ratio."""
FEW_REQUESTS = 10.0
"""Requests by which arriving ones must outnumber those that begin before the quotient of both counts
half: a queue of two is no overload of an engine that begins one request a minute."""
BLOCKED_SECONDS = 300.0
"""Seconds for which requests wait continuously after which the ratio is 1 at least, even where
clients give up as fast as they come."""
WINDOW_STEPS = 10
"""Steps over which the time per step is measured."""
SHORTEST_PERIOD = 43_200.0
"""Seconds after which a new shortest step is looked for; the previous one is used for as long again."""


class Load(NamedTuple):
    """The load of an engine at one time.

    Attributes:
        waiting: Requests that wait for a place in the batch, and for nothing else.
        occupancy: How full the batch is, from 0 to 1, by requests or by KV blocks.
        begun: Total requests that have entered the batch.
        arrived: ``begun`` plus all requests that wait for any reason; it decreases when a waiting
            request is aborted.
        steps: Total steps; None where the engine does not count them.
        tokens: Total tokens that were computed.
        budget: Most tokens of a step; 0 where the engine does not say.
        stamp: Time of the last step on the engine's clock, in seconds.
    """

    running: float
    waiting: float
    occupancy: float
    begun: float
    arrived: float
    steps: float | None
    stamp: float
    seen: float
    tokens: float = 0.0
    budget: int = 0


class ShortestStep:
    """Shortest time per step, measured over ``WINDOW_STEPS`` steps, of the last 12 to 24 hours.

    Pauses between steps only make it longer.

    Attributes:
        seconds: The time; None until it was measured once.
        measured: When it was measured, as Unix time.
        fullness: Tokens of such a step, as a share of the most that it may have; 0 if unknown.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.measured = self.fullness = 0.0
        self._mark: Load | None = None
        """Load at the beginning of the current measurement."""
        self._current = self._previous = (math.inf, 0.0, 0.0)
        """Shortest times of two periods, when they were measured, and their fullness."""
        self._period = -math.inf

    def update(self, now: float, load: Load) -> None:
        """Update the shortest time with the load at ``now``, in monotonic seconds."""
        if load.steps is None:
            return
        if now - self._period >= SHORTEST_PERIOD:
            self._period = now
            self._current, self._previous = (math.inf, 0.0, 0.0), self._current
        mark = self._mark
        if mark is None or load.steps < (mark.steps or 0) or load.stamp < mark.stamp:
            self._mark = load
        elif (steps := load.steps - (mark.steps or 0)) >= WINDOW_STEPS and load.stamp > mark.stamp:
            seconds = (load.stamp - mark.stamp) / steps
            # Chunks of prompts without an output do not count as steps; with them, the share is 1.
            full = (load.tokens - mark.tokens) / (steps * load.budget) if load.budget else 0.0
            self._current = min(self._current, (seconds, load.seen, min(max(full, 0.0), 1.0)))
            self._mark = load
        seconds, self.measured, self.fullness = min(self._current, self._previous)
        self.seconds = seconds if seconds < math.inf else None


class Saturation(Part):
    """The saturation of one engine; call ``update`` about once a second.

    Attributes:
        ratio: 1.0 where the offered load equals the load that the engine can serve, more where the
            queue grows; never negative. None in the first minute.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the estimate, since the engine restarted."""
        self.ratio: float | None = None
        self.shortest = ShortestStep()
        self._known = 0.0
        """Seconds that are known."""
        self._seconds = self._busy = self._occupied = 0.0
        """Weighted seconds that are known; those with requests; the same times the occupancy."""
        self._steps = self._begun = self._arrived = 0.0
        """Steps and requests of the same time."""
        self._when = 0.0
        self._before: Load | None = None
        self._since: float | None = None
        """The time since which requests wait continuously."""

    def update(self, now: float, load: Load) -> None:
        """Update the estimate with the load at ``now``, in monotonic seconds."""
        before, seconds = self._before, now - self._when
        if before is None or _restarted(before, load):
            self.reset()
        elif seconds < MIN_INTERVAL:
            return
        elif seconds > MAX_INTERVAL:
            self._since = None
        else:
            self._add(now, seconds, before, load)
        self.shortest.update(now, load)
        self._when, self._before = now, load

    def _add(self, now: float, seconds: float, before: Load, load: Load) -> None:
        decay = math.exp(-seconds / MEMORY)
        busy = seconds if load.running or load.waiting else 0.0
        # Requests that wait for a place mean that there is none, whatever the reason.
        occupancy = 1.0 if load.waiting else min(load.occupancy, 1.0)
        self._known += seconds
        self._seconds = self._seconds * decay + seconds
        self._busy = self._busy * decay + busy
        self._occupied = self._occupied * decay + busy * occupancy
        self._steps = self._steps * decay + (load.steps or 0) - (before.steps or 0)
        self._begun = self._begun * decay + load.begun - before.begun
        self._arrived = self._arrived * decay + load.arrived - before.arrived
        if not (before.waiting and load.waiting):
            self._since = None
        elif self._since is None:
            self._since = now - seconds
        self.ratio = self._ratio(now)

    def _ratio(self, now: float) -> float | None:
        if self._known < MIN_SECONDS:
            return None
        # Until a step was measured, all of it is taken to cost the same whatever the batch.
        fixed = 1.0
        if self.shortest.seconds is not None and self._busy > 0.0:
            fixed = min(self.shortest.seconds * self._steps / self._busy, 1.0)
            fixed *= 1.0 - self.shortest.fullness
        served = fixed * self._occupied + (1.0 - fixed) * self._busy
        offered = max(self._arrived, 0.0) + FEW_REQUESTS
        found = served / self._seconds * offered / (self._begun + FEW_REQUESTS)
        if self._since is not None and now - self._since >= BLOCKED_SECONDS:
            found = max(found, 1.0)
        # Rounded, so that an insignificant change does not make the engine's page a new one.
        return round(found, 3)


def _restarted(before: Load, load: Load) -> bool:
    return load.begun < before.begun or (load.steps or 0) < (before.steps or 0)
