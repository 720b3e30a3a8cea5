"""The state of one engine, from the progress that its processes report and from their silence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from sidestep.protocol.messages import FRONT_END
from sidestep.protocol.progress import ASLEEP, PAUSED, STARTING, Progress
from sidestep.tracking.health.step_times import StepTimes, Thresholds

BUSY = 10.0
"""Seconds after a step or an item for which an engine without requests is not idle yet."""


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
        seen_at: When its last message arrived.
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


@dataclasses.dataclass(slots=True)
class _Report:
    progress: Progress
    at: float


class _Doubt(NamedTuple):
    """Something that has lasted for ``age`` seconds and is a stall after ``limit`` seconds."""

    reason: Reason
    age: float
    limit: float
    stream: str
    stack: Sequence[str] = ()


class HealthTracker:
    """Follows one engine's health."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        self._step_times = StepTimes()
        self._answer_times = StepTimes()
        """Times between two answers that front ends received, by the prompt tokens that they wait for."""
        self._stepped_at: float | None = None

    def report(self, process: Process, progress: Progress, limits: Thresholds, now: float) -> None:
        """Record ``progress`` that a heartbeat of ``process`` has brought."""
        before = self._reports.get(process.stream)
        if progress.longest:
            times = self._answer_times if process.role == FRONT_END else self._step_times
            times.add(progress.longest, progress.longest_tokens, limits, now)
        if before is not None and before.progress.steps != progress.steps:
            self._stepped_at = now
        self._reports[process.stream] = _Report(progress, now)

    def health(
        self,
        presence: Presence,
        processes: Sequence[Process],
        limits: Thresholds,
        item_at: float | None,
        now: float,
    ) -> Health:
        """Return the engine's health at ``now``.

        Args:
            presence: Whether the engine's processes are there.
            processes: Those that are connected.
            limits: Least and most seconds without progress.
            item_at: When the engine's last item arrived; None: none has.
            now: Monotonic time that stands still while the exporter itself does.
        """
        names = {process.stream for process in processes}
        self._reports = {name: r for name, r in self._reports.items() if name in names}
        if presence is not Presence.CONNECTED:
            return Health(_ABSENT[presence])
        cores = self._reported(processes, is_front_end=False)
        front_ends = self._reported(processes, is_front_end=True)
        owing = cores or front_ends
        unfinished = sum(report.progress.unfinished for _, report in owing) if owing else None
        ages = [age for _, r in cores if (age := _grown(r.progress.step_age, r, now)) is not None]
        step_age = max(ages, default=None)
        conditions = {report.progress.condition for report in self._reports.values()}
        doubts = self._silences(processes, limits, now)
        if not conditions & {ASLEEP, PAUSED, STARTING}:
            for process, report in cores:
                doubts += self._core_doubts(process, report, limits, now)
            doubts += self._queue_doubts(cores, front_ends, limits, now)
        worst = max(doubts, key=lambda doubt: doubt.age / doubt.limit, default=None)
        if worst is not None and worst.age > worst.limit / 2:
            state = EngineState.STALLED if worst.age > worst.limit else EngineState.SLOW
            return Health(
                state, worst.reason, worst.age, step_age, unfinished, worst.stream, worst.stack
            )
        state = self._calm_state(conditions, unfinished, item_at, now)
        return Health(state, step_age=step_age, unfinished=unfinished)

    def _reported(
        self, processes: Sequence[Process], *, is_front_end: bool
    ) -> list[tuple[Process, _Report]]:
        """Return the processes of one kind that have reported progress."""
        return [
            (process, self._reports[process.stream])
            for process in processes
            if (process.role == FRONT_END) == is_front_end and process.stream in self._reports
        ]

    def _silences(
        self, processes: Sequence[Process], limits: Thresholds, now: float
    ) -> list[_Doubt]:
        """Return a doubt for each process that has reported progress, which comes every second."""
        return [
            _Doubt(Reason.PUBLISHER, now - process.seen_at, limits.waiting, process.stream)
            for process in processes
            if process.stream in self._reports
        ]

    def _core_doubts(
        self, process: Process, report: _Report, limits: Thresholds, now: float
    ) -> list[_Doubt]:
        progress = report.progress
        name, stack = process.stream, progress.stack
        doubts = []
        if (age := _grown(progress.step_age, report, now)) is not None and progress.unfinished:
            limit = self._step_times.overdue_after(progress.step_tokens, limits)
            doubts.append(_Doubt(Reason.STEP, age, limit, name, stack))
        is_blocked = progress.blocked >= progress.unfinished
        limit = limits.most if is_blocked else limits.waiting
        if (age := _grown(progress.waiting_age, report, now)) is not None:
            doubts.append(_Doubt(Reason.NO_STEPS, age, limit, name, stack))
        if (age := _grown(progress.output_age, report, now)) is not None:
            doubts.append(_Doubt(Reason.NO_OUTPUT, age, limits.waiting, name, stack))
        return doubts

    def _queue_doubts(
        self,
        cores: Sequence[tuple[Process, _Report]],
        front_ends: Sequence[tuple[Process, _Report]],
        limits: Thresholds,
        now: float,
    ) -> list[_Doubt]:
        """Return doubts of front ends that wait for an answer, unless the core knows its requests."""
        if any(report.progress.unfinished for _, report in cores):
            return []
        doubts = []
        for process, report in front_ends:
            progress = report.progress
            if (age := _grown(progress.step_age, report, now)) is None:
                continue
            limit = limits.waiting
            if not cores:
                # The front end cannot tell a long step from none.
                known = self._answer_times.overdue_after(progress.step_tokens, limits)
                limit = max(limit, known)
            doubts.append(_Doubt(Reason.QUEUE, age, limit, process.stream, progress.stack))
        return doubts

    def _calm_state(
        self, conditions: set[str], unfinished: int | None, item_at: float | None, now: float
    ) -> EngineState:
        """Return the state of an engine that nothing is doubtful about."""
        if conditions & {ASLEEP, PAUSED}:
            return EngineState.ASLEEP
        if STARTING in conditions or (not self._reports and item_at is None):
            return EngineState.STARTING
        latest = [at for at in (self._stepped_at, item_at) if at is not None]
        if unfinished or (not self._reports and latest and now - max(latest) < BUSY):
            return EngineState.OK
        if self._stepped_at is not None and now - self._stepped_at < BUSY:
            return EngineState.OK
        return EngineState.IDLE


_ABSENT = {
    Presence.EXPECTED: EngineState.STARTING,
    Presence.CLOSED: EngineState.STOPPED,
    Presence.LOST: EngineState.UNREACHABLE,
}


def _grown(age: float | None, report: _Report, now: float) -> float | None:
    """Return an age now that the report had when it was made."""
    return None if age is None else age + now - report.at
