"""Health of the engines: progress in, states once a second, and a log line when one changes."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from sidestep.metrics.engine import Engine
from sidestep.metrics.exposed_engines import GAUGES_EXPIRE_SECONDS, MAX_ENGINES
from sidestep.metrics.registry import Registry
from sidestep.metrics.series import requests
from sidestep.protocol.limits import printable
from sidestep.protocol.messages import CORE
from sidestep.protocol.progress import Progress
from sidestep.protocol.receiver import Receiver
from sidestep.protocol.stream import Stream, StreamState
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.tracking.health.machine import HealthTracker
from sidestep.tracking.health.states import LEVELS, EngineState, Health, Presence, Process
from sidestep.tracking.health.step_times import Thresholds

log = logging.getLogger(__name__)

INTERVAL = 1.0
"""Least seconds between two evaluations of an engine."""
BATCH = 64
"""Engines that one call evaluates, at some microseconds each."""
MAX_ADVANCE = 1.0
"""Most seconds between two calls that count; for the rest, the exporter was stopped or starved."""
ABANDONED = 2.0
"""Seconds of silence, two heartbeats, after which a core without front ends was killed."""
MAX_FRAME_CHARS = 200
LOGGED_FRAMES = 3
"""Innermost frames in the log line of a stalled engine."""
ALARMING = frozenset(state for state, level in LEVELS.items() if level == "critical")
"""States in which an engine serves nothing and should."""
NOT_READY = ALARMING | {state for state, level in LEVELS.items() if level is None}
"""States in which an engine does not serve requests."""

_NEW = Health(EngineState.STARTING)
"""Health of an engine before its first evaluation."""


class AwakeClock:
    """Monotonic time without the exporter's own pauses, for which no engine is to blame."""

    def __init__(self) -> None:
        self._pauses = 0.0
        self._advanced_at = math.inf

    def read(self, now: float) -> float:
        """Return the awake time at ``now``."""
        return now - self._pauses - self._pause(now)

    def advance(self, now: float) -> float:
        """Return the seconds of a pause since the last call; call it several times a second."""
        pause = self._pause(now)
        self._pauses += pause
        self._advanced_at = now
        return pause

    def _pause(self, now: float) -> float:
        return max(now - self._advanced_at - MAX_ADVANCE, 0.0)


@dataclasses.dataclass(slots=True)
class _Followed:
    """Health of one engine, and what its next evaluation needs.

    Attributes:
        tracker: Progress of its processes.
        health: At its last evaluation; None before the first.
        has_steps: Whether a process of it reports steps.
        last_seen: The engine's ``last_seen`` then.
        item_at: Awake time of the evaluation that found its last item; None: none has arrived.
    """

    tracker: HealthTracker = dataclasses.field(default_factory=HealthTracker)
    health: Health | None = None
    has_steps: bool = False
    last_seen: float = 0.0
    item_at: float | None = None


class _Streams:
    """The streams at the beginning of a round, by what the evaluation of an engine needs."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.by_incarnation = {stream.incarnation: stream for stream in streams}
        self.roles: dict[tuple[int, str], str] = {}
        self.latest: dict[str, Stream] = {}
        """By engine: the stream that was received from last, of those that name it."""
        for stream in streams:
            for info in stream.engines:
                self.roles[stream.incarnation, info.id] = info.role
                known = self.latest.get(info.id)
                if known is None or known.seen_at < stream.seen_at:
                    self.latest[info.id] = stream


class HealthMonitor:
    """Follows the health of all engines but those that a polled server no longer has.

    ``limits`` has the least and the most seconds without progress; ``clock`` limits the log's rate.
    """

    def __init__(
        self, registry: Registry, receiver: Receiver, limits: Thresholds, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._receiver = receiver
        self._limits = limits
        self._awake = AwakeClock()
        self._followed: dict[Engine, _Followed] = {}
        self._reporting: set[int] = set()
        """Incarnations that have reported progress."""
        self._expected: set[str] = set()
        """Streams from a snapshot that have not connected yet."""
        self._expected_until = 0.0
        self._streams = _Streams(())
        self._due: list[Engine] = []
        self._next = float("-inf")
        # A kind for each engine and alarming state, so that no engine suppresses another's line.
        self._lines = RateLimitedLog(log, 2 * len(ALARMING) * MAX_ENGINES, clock)

    def __iter__(self) -> Iterator[tuple[Engine, Health]]:
        """Yield the engines that have a state, with their health."""
        for engine in self._registry.engines.values():
            health = self.of(engine)
            if health is not None:
                yield engine, health

    def of(self, engine: Engine) -> Health | None:
        """Return the health of ``engine`` at its last evaluation; None if it has none."""
        if engine.absent:
            return None
        found = self._followed.get(engine)
        return _NEW if found is None or found.health is None else found.health

    def has_steps(self, engine: Engine) -> bool:
        """Return whether a connected process of ``engine`` reports steps."""
        found = self._followed.get(engine)
        return found is not None and found.has_steps

    def restored(self, streams: Sequence[Stream], now: float) -> None:
        """Expect ``streams`` of a snapshot to connect within 30 s."""
        self._expected = {s.id for s in streams if s.state is not StreamState.CLOSED}
        self._expected_until = self._awake.read(now) + GAUGES_EXPIRE_SECONDS

    def report(
        self, stream: Stream, reports: Iterable[tuple[Engine, str, Progress]], now: float
    ) -> None:
        """Record what ``stream`` reports: engines, its process's role for each, and their progress."""
        awake = self._awake.read(now)
        self._reporting.add(stream.incarnation)
        for engine, role, progress in reports:
            progress.stack = [_frame(text) for text in progress.stack]
            process = Process(stream.id, role, awake)
            followed = self._followed.setdefault(engine, _Followed())
            followed.tracker.report(process, progress, self._limits, awake)

    def update(self, now: float) -> None:
        """Evaluate the next batch of engines; call it several times a second."""
        pause = self._awake.advance(now)
        if pause:
            self._receiver.paused(pause, now)
        if not self._due:
            if now < self._next:
                return
            self._next = now + INTERVAL
            self._begin_round(now)
        for engine in self._due[-BATCH:]:
            self._evaluate(engine, now)
        del self._due[-BATCH:]

    def _begin_round(self, now: float) -> None:
        streams = list(self._receiver.streams.values())
        self._streams = _Streams(streams)
        self._reporting &= self._streams.by_incarnation.keys()
        if self._expected:
            is_over = self._awake.read(now) >= self._expected_until
            self._expected &= set() if is_over else {s.id for s in streams if s.silent}
        engines = self._registry.engines
        self._due = [engine for engine in engines.values() if not engine.absent]
        self._followed = {e: self._followed.get(e) or _Followed() for e in self._due}

    def _evaluate(self, engine: Engine, now: float) -> None:
        followed = self._followed[engine]
        awake = self._awake.read(now)
        if engine.last_seen != followed.last_seen:
            followed.last_seen, followed.item_at = engine.last_seen, awake
        processes = self._processes(engine, now)
        followed.has_steps = any(process.role == CORE for process in processes)
        before = followed.health
        followed.health = health = followed.tracker.health(
            self._presence(engine, now),
            processes,
            self._limits,
            followed.item_at,
            awake,
            requests=requests(engine),
        )
        self._log(engine, before, health)

    def _processes(self, engine: Engine, now: float) -> list[Process]:
        """Return the processes of ``engine`` that report progress, and should.

        A silent front end no longer feeds the engine, but the requests that it has accepted still wait.
        """
        awake = self._awake.read(now)
        front_ends = [self._receiver.streams.get(name) for name in engine.feeds.front_ends]
        waiting = {s.incarnation for s in front_ends if s and s.state is not StreamState.CLOSED}
        found: list[Process] = []
        for incarnation in (engine.feeds.streams | waiting) & self._reporting:
            stream = self._streams.by_incarnation.get(incarnation)
            if stream is not None:
                role = self._streams.roles.get((incarnation, engine.id), "")
                found.append(Process(stream.id, role, awake - (now - stream.seen_at)))
        return found

    def _is_abandoned(self, engine: Engine, now: float) -> bool:
        """Return whether all front ends have said goodbye and the core, which has not, is silent.

        A server ends when its core is killed; a core that it stops says goodbye itself.
        """
        front_ends = [self._receiver.streams.get(name) for name in engine.feeds.front_ends]
        feeding = map(self._streams.by_incarnation.get, engine.feeds.streams)
        return (
            bool(front_ends)
            and all(s is None or s.state is StreamState.CLOSED for s in front_ends)
            and all(s is None or now - s.seen_at >= ABANDONED for s in feeding)
        )

    def _presence(self, engine: Engine, now: float) -> Presence:
        """Return whether the engine's processes are there."""
        if engine.is_up:
            feeding = map(self._streams.by_incarnation.get, engine.feeds.streams)
            is_unanswered = all(s is not None and s.unanswered for s in feeding)
            is_lost = is_unanswered or self._is_abandoned(engine, now)
            return Presence.LOST if is_lost else Presence.CONNECTED
        streams = self._receiver.streams
        lost = [streams[name] for name in engine.feeds.lost_cores if name in streams]
        if not engine.feeds.lost_cores and engine.id in self._streams.latest:
            lost = [self._streams.latest[engine.id]]
        if any(stream.id in self._expected for stream in lost):
            return Presence.EXPECTED
        # A process that no longer names the engine has closed it, too.
        is_closed = all(stream.state is StreamState.CLOSED for stream in lost)
        return Presence.CLOSED if is_closed else Presence.LOST

    def _log(self, engine: Engine, before: Health | None, health: Health) -> None:
        """Log that an engine has become stalled or unreachable, or no longer is."""
        state = health.state
        was = None if before is None else before.state
        if was is state:
            return
        if state is EngineState.STALLED:
            reason = "" if health.reason is None else health.reason.value
            self._lines.warning(
                f"{state.value} {engine.id}",
                "engine %s is stalled: %s for %.0f s, stream %s%s",
                engine.id,
                reason,
                health.age,
                health.stream,
                "".join(f", in {frame}" for frame in health.stack[: -LOGGED_FRAMES - 1 : -1]),
            )
        elif state is EngineState.UNREACHABLE:
            self._lines.warning(
                f"{state.value} {engine.id}",
                "engine %s is unreachable: its processes or its server do not answer",
                engine.id,
            )
        elif was in ALARMING:
            self._lines.info(
                f"no longer {was.value} {engine.id}",
                "engine %s is no longer %s, its state is %s",
                engine.id,
                was.value,
                state.value,
            )


def _frame(text: str) -> str:
    """Return a frame of a stack in printable ASCII, cut to the length that log lines and pages may have."""
    return printable(text[:MAX_FRAME_CHARS]).encode("ascii", "replace").decode()
