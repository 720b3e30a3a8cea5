"""States of an engine, the reasons of a stall, and what a state follows from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal, NamedTuple


class EngineState(Enum):
    """State of an engine; docs/health.md has what each means."""

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
"""Level of each state; None: the engine serves no requests, and is not expected to."""


class Reason(Enum):
    """Reason for which an engine is stalled."""

    STEP = "step"
    """A step does not end."""
    NO_STEPS = "no_steps"
    """Requests wait, and no step begins."""
    NO_OUTPUT = "no_output"
    """Steps end, and no request gets any output."""
    PUBLISHER = "publisher"
    """One of its processes sends no heartbeat."""
    FRONT_END = "front_end"
    """The event loop of a front end stands, such as one of several API servers."""
    QUEUE = "queue"
    """A front end has accepted requests that the engine's core does not answer."""


class Presence(Enum):
    """Presence of an engine's processes at the exporter."""

    CONNECTED = 0
    EXPECTED = 1
    """None has connected since the exporter started, a moment ago."""
    CLOSED = 2
    """The last one, or the core, has said that it ends."""
    LOST = 3
    """The last one, or the core, has been silent for 30 s."""


class Process(NamedTuple):
    """A process that feeds the engine.

    Attributes:
        stream: Name of its stream.
        role: ``CORE``, ``FRONT_END`` or empty.
        seen_at: When its last message arrived, by the clock of ``HealthTracker.health``.
    """

    stream: str
    role: str
    seen_at: float


class Health(NamedTuple):
    """Health of an engine at one moment.

    Attributes:
        state: Its state.
        reason: Why it is stalled, or would be if this went on; None in other states.
        age: Seconds for which it has been without progress, in the states stalled and slow; else 0.
        step_age: Seconds since the oldest open step began; None without one.
        unfinished: Requests accepted and not finished; None if no process reports them.
        stream: Stream of the process that is silent, or whose thread is stuck; empty if none is.
        stack: Frames of that thread, the innermost last; empty where they are not known.
    """

    state: EngineState
    reason: Reason | None = None
    age: float = 0.0
    step_age: float | None = None
    unfinished: int | None = None
    stream: str = ""
    stack: Sequence[str] = ()
