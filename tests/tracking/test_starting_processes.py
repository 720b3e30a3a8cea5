"""Processes that are silent while they start."""

from __future__ import annotations

from sidestep.protocol.messages import CORE
from sidestep.protocol.progress import STARTING, Progress
from sidestep.tracking.health.machine import (
    EngineState,
    HealthTracker,
    Presence,
    Process,
    Reason,
)
from sidestep.tracking.health.step_times import Thresholds

LIMITS = Thresholds()


def state(condition: str, silence: float) -> tuple[EngineState, Reason | None]:
    """Return state and reason of an engine whose core has been silent since it had ``condition``."""
    core = Process("core", CORE, 100.0)
    tracker = HealthTracker()
    tracker.report(core, Progress(0, condition=condition), LIMITS, 100.0)
    health = tracker.health(Presence.CONNECTED, [core], LIMITS, None, 100.0 + silence)
    return health.state, health.reason


def test_a_process_that_starts_may_be_silent_for_long() -> None:
    """Loading and compiling a model can keep the interpreter from the publisher, but not for ever."""
    assert state(STARTING, 50.0) == (EngineState.STARTING, None)
    assert state(STARTING, 121.0) == (EngineState.STALLED, Reason.PUBLISHER)
    assert state("", 8.0) == (EngineState.STALLED, Reason.PUBLISHER)
