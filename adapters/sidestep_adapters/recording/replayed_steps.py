"""The steps of a replayed engine, for heartbeats that report its progress as a live engine's do."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence

from sidestep.protocol.progress import Progress
from sidestep_adapters.publisher.progress import ProgressMeter, Reading


@dataclasses.dataclass(slots=True)
class _Steps:
    """Steps of one engine.

    Attributes:
        longest: Seconds between two steps, the longest since the last heartbeat.
    """

    meter: ProgressMeter
    count: int = 0
    unfinished: int = 0
    ended_at: float = 0.0
    longest: float = 0.0


class ReplayedSteps:
    """Counts the steps that a replay plays, and measures the progress that they make.

    One thread replays, and the publisher thread measures. A replay that hangs has an open step, and
    its stack is that of the replaying thread.
    """

    def __init__(self) -> None:
        self._engines: dict[int, _Steps] = {}
        self._hangs_since: float | None = None

    @property
    def unfinished(self) -> int:
        """Requests that are running or waiting in all engines."""
        return sum(steps.unfinished for steps in list(self._engines.values()))

    def end_step(self, engine: int, unfinished: int) -> None:
        """Count a step of ``engine``, after which so many requests are unfinished."""
        now = time.monotonic()
        steps = self._engines.get(engine)
        if steps is None:
            meter = ProgressMeter(engine, threading.get_ident())
            steps = self._engines[engine] = _Steps(meter)
        elif steps.unfinished:
            steps.longest = max(steps.longest, now - steps.ended_at)
        steps.count += 1
        steps.unfinished, steps.ended_at = unfinished, now

    def finish(self) -> None:
        """Finish all requests: the recording has ended, maybe with some of them running."""
        for steps in self._engines.values():
            steps.unfinished = 0

    def begin_hang(self) -> None:
        """Open a step that does not end."""
        self._hangs_since = time.monotonic()

    def end_hang(self) -> None:
        """Close the step, whose time does not count as a usual one."""
        for steps in self._engines.values():
            steps.ended_at = time.monotonic()
        self._hangs_since = None

    def measure(self, now: float) -> Sequence[Progress]:
        """Return the progress of all engines at ``now``."""
        return [self._measure(steps, now) for steps in list(self._engines.values())]

    def _measure(self, steps: _Steps, now: float) -> Progress:
        longest, steps.longest = steps.longest, 0.0
        opened_at = self._hangs_since if steps.unfinished else None
        reading = Reading(
            steps.unfinished, steps.count, opened_at, ended_at=steps.ended_at, longest=longest
        )
        return steps.meter.measure(reading, now)
