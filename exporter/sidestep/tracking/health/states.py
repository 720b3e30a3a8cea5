"""States of an engine, the reasons of a stall, and the facts that a state follows from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal, NamedTuple


class EngineState(Enum):
    """State of an engine; docs/health.md explains each."""

    STARTING = "starting"
    OK = "ok"
    IDLE = "idle"
    SLOW = "slow"
    STALLED = "stalled"
    UNREACHABLE = "unreachable"
    STOPPED = "stopped"
    ASLEEP = "asleep"


Level = Literal["ok", "warning", "critical"]
LEVELS: Mapping[EngineState, Level | None] = {
    EngineState.STALLED: "critical",
    EngineState.UNREACHABLE: "critical",
    EngineState.SLOW: "warning",
    EngineState.STARTING: None,
    EngineState.STOPPED: None,
    EngineState.ASLEEP: None,
    EngineState.OK: "ok",
    EngineState.IDLE: "ok",
}
"""Level of each state; None: the engine serves no requests and is not expected to."""


class Reason(Enum):
    """Reason why an engine is stalled."""

    STEP = "step"
    """A step does not end."""
    NO_STEPS = "no_steps"
    """Requests wait, and no step begins."""
    NO_OUTPUT = "no_output"
    """Steps end, and no request gets any output."""
    PUBLISHER = "publisher"
    """One of its processes sends no heartbeat."""
    FRONT_END = "front_end"
    """The event loop of a front end is blocked, such as that of one of several API servers."""
    QUEUE = "queue"
    """A front end has accepted requests that the engine's core does not answer."""


class Presence(Enum):
    """Presence of an engine's processes at the exporter."""

    CONNECTED = 0
    EXPECTED = 1
    """No process has connected yet, and the exporter has just started."""
    CLOSED = 2
    """The last process, or the core, has announced its end."""
    LOST = 3
    """The last process, or the core, has been silent for 30 s."""


class Process(NamedTuple):
    """A process that feeds the engine.

    Attributes:
        role: ``CORE``, ``FRONT_END`` or empty.
        seen_at: Arrival of its last message, by the clock of ``HealthTracker.health``.
    """

    stream: str
    role: str
    seen_at: float


class Health(NamedTuple):
    """Health of an engine at one moment.

    Attributes:
        reason: Reason why it is stalled, or soon will be; None in other states.
        age: Seconds without progress in the states stalled and slow; else 0.
        step_age: Seconds since the oldest open step began; None without one.
        unfinished: Requests accepted and not finished; None if no process reports them.
        stream: Stream of the process that is silent or stuck; empty if none is.
        stack: Frames of that thread, the innermost last; empty where they are not known.
    """

    state: EngineState
    reason: Reason | None = None
    age: float = 0.0
    step_age: float | None = None
    unfinished: int | None = None
    stream: str = ""
    stack: Sequence[str] = ()
