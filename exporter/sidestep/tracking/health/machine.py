"""The state of one engine, from the progress that its processes report and from their silence."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from sidestep.protocol.messages import CORE
from sidestep.protocol.progress import ASLEEP, OVERDUE, PAUSED, STARTING, Progress
from sidestep.tracking.health.states import EngineState, Health, Presence, Process, Reason
from sidestep.tracking.health.step_times import FACTOR, StepTimes, Thresholds

__all__ = ["EngineState", "Health", "HealthTracker", "Presence", "Process", "Reason", "Thresholds"]

BUSY = 10.0
"""Seconds after a step or an item for which an engine without requests is not idle yet."""
GROWTH = 1.0
"""Seconds between two heartbeats at most; an age grows by no more after its report."""
_COMPILER = re.compile(
    r"torch/_dynamo/(bytecode|convert_frame|output_graph|symbolic_convert|variables/)"
    r"|torch/_inductor/(async_compile|codegen|cpp_builder|fx_passes|graph|ir|lowering|scheduler)\b"
    r"|triton/compiler/"
)
"""Frames of a thread that compiles kernels, as any request may require; compiled code has none."""
ON_PURPOSE = frozenset({STARTING, ASLEEP, PAUSED})


class _Doubt(NamedTuple):
    """A lack of progress for ``age`` seconds, which is a stall after ``limit`` seconds."""

    reason: Reason
    age: float
    limit: float
    stream: str
    stack: Sequence[str] = ()


@dataclasses.dataclass(slots=True)
class _Report:
    """Latest report of one process.

    Attributes:
        ages_from: Earliest start of any age: the end of its last condition.
        condition_since: Time since which it reports its present condition.
        idle_since: Time since which it reports no unfinished request; None: some are unfinished.
        stepped_at: Time at which it last reported ended steps; None: never.
        times: Times of its steps; for a front end, times between two answers of the engine.
    """

    process: Process
    progress: Progress
    at: float
    ages_from: float
    condition_since: float
    idle_since: float | None
    stepped_at: float | None
    times: StepTimes

    def grown(self, age: float | None, now: float) -> float | None:
        """Return what a reported ``age`` has become by ``now``; None if none was reported."""
        if age is None:
            return None
        return min(age + min(now - self.at, GROWTH), now - self.ages_from)


class HealthTracker:
    """Follows one engine's health."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        self._stepped_at: float | None = None
        self._stall: tuple[Reason, str] | None = None
        """Reason and stream of the present stall, which stay the same while it lasts."""

    def report(self, process: Process, progress: Progress, limits: Thresholds, now: float) -> None:
        """Record ``progress`` that a heartbeat of ``process`` has brought."""
        before = self._reports.get(process.stream)
        if before is None or progress.steps < before.progress.steps:
            # A new process: its first steps compile again.
            report = _Report(process, progress, now, -math.inf, now, None, None, StepTimes())
        else:
            report = dataclasses.replace(before, process=process, progress=progress, at=now)
            if progress.condition != before.progress.condition:
                report.condition_since = report.ages_from = now
            if progress.steps != before.progress.steps:
                report.stepped_at = self._stepped_at = now
        if progress.unfinished:
            report.idle_since = None
        elif report.idle_since is None:
            report.idle_since = now
        if progress.longest:
            report.times.add(progress.longest, progress.longest_tokens, limits)
        self._reports[process.stream] = report

    def health(
        self,
        presence: Presence,
        processes: Sequence[Process],
        limits: Thresholds,
        item_at: float | None,
        now: float,
        *,
        requests: float = 0.0,
    ) -> Health:
        """Return the engine's health at ``now``, from its connected ``processes``.

        ``now`` is monotonic, and stands still while the exporter itself does. The engine's last item
        arrived at ``item_at``. ``requests`` run or wait according to its gauges.
        """
        reports = self._refresh(processes, limits)
        if presence is not Presence.CONNECTED:
            self._stall = None
            return Health(_ABSENT[presence])
        # A process without a role runs no steps, such as a front end of an engine whose core has no tap.
        cores = [report for report in reports if report.process.role == CORE]
        front_ends = [report for report in reports if report.process.role != CORE]
        # The core may not have received all requests that a front end has accepted.
        counts = [sum(each.progress.unfinished for each in side) for side in (cores, front_ends)]
        unfinished = max(counts) if reports else None
        ages = [age for r in cores if (age := r.grown(r.progress.step_age, now)) is not None]
        step_age = max(ages, default=None)
        conditions = _conditions(cores, front_ends, limits)
        silences = [_silence(report, limits, now) for report in reports]
        doubts = [*silences, *_loop_doubts(front_ends, limits, now)]
        if not conditions:
            silent = {doubt.stream for doubt in silences if doubt.age > doubt.limit}
            received = [report for report in cores if report.process.stream not in silent]
            doubts += [doubt for report in received for doubt in _core_doubts(report, limits, now)]
            doubts += self._queue_doubts(cores, front_ends, limits, now)
        worst = self._worst(doubts)
        if worst is not None and worst.age > worst.limit / 2:
            state = EngineState.SLOW if self._stall is None else EngineState.STALLED
            return Health(
                state, worst.reason, worst.age, step_age, unfinished, worst.stream, worst.stack
            )
        silence = 0.0 if reports or item_at is None else now - item_at
        if requests and silence > limits.most:
            # Without reports of progress, a long step looks like a stall.
            return Health(EngineState.SLOW, age=silence)
        state = self._calm_state(conditions, unfinished or requests, item_at, now)
        return Health(state, step_age=step_age, unfinished=unfinished)

    def _refresh(self, processes: Sequence[Process], limits: Thresholds) -> list[_Report]:
        """Return the current reports, and forget those of processes that no longer report."""
        reports = {}
        for process in processes:
            report = self._reports.get(process.stream)
            if report is not None and process.seen_at - report.at <= limits.waiting:
                report.process = process
                reports[process.stream] = report
        self._reports = reports
        return list(reports.values())

    def _worst(self, doubts: Sequence[_Doubt]) -> _Doubt | None:
        """Return the doubt closest to its limit, or farthest beyond; a stall keeps its reason."""
        stalls = [doubt for doubt in doubts if doubt.age > doubt.limit]
        same = [doubt for doubt in stalls if (doubt.reason, doubt.stream) == self._stall]
        worst = max(same or stalls or doubts, key=lambda each: each.age / each.limit, default=None)
        self._stall = (worst.reason, worst.stream) if stalls and worst is not None else None
        return worst

    def _queue_doubts(
        self,
        cores: Sequence[_Report],
        front_ends: Sequence[_Report],
        limits: Thresholds,
        now: float,
    ) -> list[_Doubt]:
        """Return doubts about front ends that wait for an answer, unless a core has requests."""
        if any(core.idle_since is None for core in cores):
            return []
        # The core may have been idle for up to a heartbeat longer than it has reported.
        since = [core.idle_since - GROWTH for core in cores if core.idle_since is not None]
        if not cores and len(front_ends) > 1 and self._stepped_at is not None:
            # Requests of one front end may wait in the queue while others get answers.
            since = [self._stepped_at]
        tokens = sum(report.progress.step_tokens for report in front_ends)
        doubts = []
        for report in front_ends:
            progress, times = report.progress, report.times
            age = report.grown(progress.step_age, now)
            # A blocked event loop of its own is why a front end gets no answer.
            if age is None or (progress.loop_age or 0.0) >= OVERDUE:
                continue
            limit = limits.waiting
            if not cores:
                # A front end cannot tell a long step from none, and does not know whose prompts are in it.
                slowest = limits.waiting + FACTOR * times.longest
                limit = min(max(slowest, times.overdue_after(tokens, limits)), limits.most)
            age = min([age, *(now - each for each in since)])
            name = report.process.stream
            doubts.append(_Doubt(Reason.QUEUE, age, limit, name, progress.stack))
        return doubts

    def _calm_state(
        self, conditions: set[str], requests: float, item_at: float | None, now: float
    ) -> EngineState:
        """Return the state of an engine without doubts."""
        if conditions & {ASLEEP, PAUSED}:
            return EngineState.ASLEEP
        latest = self._stepped_at if self._reports else item_at
        if conditions or (latest is None and not self._reports):
            return EngineState.STARTING
        is_busy = requests > 0 or (latest is not None and now - latest < BUSY)
        return EngineState.OK if is_busy else EngineState.IDLE


_ABSENT = {
    Presence.EXPECTED: EngineState.STARTING,
    Presence.CLOSED: EngineState.STOPPED,
    Presence.LOST: EngineState.UNREACHABLE,
}


def _conditions(
    cores: Sequence[_Report], front_ends: Sequence[_Report], limits: Thresholds
) -> set[str]:
    """Return the conditions in which the engine makes no progress on purpose."""
    found = {report.progress.condition for report in cores}
    stepped_at = max((r.stepped_at for r in cores if r.stepped_at is not None), default=None)
    for report in front_ends:
        # Another front end may have woken the engine up.
        is_refuted = stepped_at is not None and stepped_at > report.condition_since + limits.waiting
        if not is_refuted:
            found.add(report.progress.condition)
    return found & ON_PURPOSE


def _silence(report: _Report, limits: Thresholds, now: float) -> _Doubt:
    """Return a doubt about a process that should report progress every second."""
    process, limit = report.process, _longest_silence(report, limits)
    return _Doubt(Reason.PUBLISHER, now - process.seen_at, limit, process.stream)


def _longest_silence(report: _Report, limits: Thresholds) -> float:
    """Return the seconds for which a process, or its event loop, may do nothing."""
    # Loading, compiling and moving weights may hold Python's lock for long.
    return limits.most if report.progress.condition in ON_PURPOSE else limits.waiting


def _loop_doubts(front_ends: Sequence[_Report], limits: Thresholds, now: float) -> list[_Doubt]:
    """Return doubts about front ends whose event loops are blocked."""
    return [
        _Doubt(
            Reason.FRONT_END,
            age,
            _longest_silence(report, limits),
            report.process.stream,
            report.progress.stack,
        )
        for report in front_ends
        if (age := report.grown(report.progress.loop_age, now)) is not None
    ]


def _core_doubts(report: _Report, limits: Thresholds, now: float) -> list[_Doubt]:
    """Return doubts about a process that runs steps and has unfinished requests."""
    progress, times = report.progress, report.times
    if not progress.unfinished:
        return []
    is_blocked = progress.blocked >= progress.unfinished
    step_limit = times.overdue_after(progress.step_tokens, limits)
    if any(_COMPILER.match(frame) for frame in progress.stack):
        step_limit = limits.most
    lateness = [
        (Reason.STEP, progress.step_age, step_limit),
        (Reason.NO_STEPS, progress.waiting_age, limits.most if is_blocked else limits.waiting),
        # Some steps may end without output, such as long ones.
        (Reason.NO_OUTPUT, progress.output_age, limits.waiting + FACTOR * times.longest),
    ]
    return [
        _Doubt(reason, age, min(limit, limits.most), report.process.stream, progress.stack)
        for reason, reported, limit in lateness
        if (age := report.grown(reported, now)) is not None
    ]
