"""The answer of ``/api/v1/timeline``: the recent steps and ended requests of engines."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from sidestep import __version__
from sidestep.exposition.renders import Body, SharedRenders
from sidestep.ingest.intake import Intake
from sidestep.metrics.engine import Engine
from sidestep.metrics.timeline import SECONDS, KeptRequest, StepColumns, Timeline
from sidestep.protocol.request_events import LIMITS
from sidestep.requests.record import DIGITS, RequestRecord, make_record

MAX_MINUTES = int(SECONDS) // 60
CACHE_SECONDS = 1.0
"""How long an answer is sent to further readers."""


class Steps(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Steps of an engine, a list for each number, in the order of their arrival.

    Attributes:
        end: Unix time of its output, by the engine's clock.
        seconds: Its duration; None: unknown.
        limit: Index into ``TimelineAnswer.limits``; -1: unknown.
    """

    end: list[float]
    seconds: list[float | None]
    prefill_requests: list[int]
    prefill_tokens: list[int]
    decode_requests: list[int]
    decode_tokens: list[int]
    limit: list[int]


class EngineTimeline(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One engine.

    Attributes:
        id: Its identity.
        engine: What people call it.
        state: A state of docs/health.md; None where no process reports progress.
        reason: Why it is slow or stalled.
        requests: Records of the requests that ended, as in ``--requests.log``.
    """

    id: str
    engine: str
    model: str
    dialect: str
    state: str | None
    reason: str | None
    steps: Steps
    requests: list[RequestRecord]


class TimelineAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answer of ``/api/v1/timeline``.

    Attributes:
        time: Unix time of the answer.
        limits: Names of limits.
    """

    version: str
    time: float
    minutes: int
    limits: Sequence[str]
    engines: list[EngineTimeline]


class _Copy(NamedTuple):
    """What an engine has at one moment."""

    engine: Engine
    state: str | None
    reason: str | None
    steps: StepColumns
    requests: list[KeptRequest]


class Timelines:
    """Answers with what the engines' timelines have."""

    def __init__(self, intake: Intake, wall: Callable[[], float] = time.time) -> None:
        self._intake = intake
        self._wall = wall
        self._renders: SharedRenders[tuple[str | None, int]] = SharedRenders(CACHE_SECONDS)

    async def answer(self, identity: str | None, minutes: int) -> Body | None:
        """Return the answer for an engine or for all; None if there is no such engine."""
        if identity is not None and identity not in self._intake.registry.engines:
            return None
        return await self._renders.get((identity, minutes), lambda: self._render(identity, minutes))

    async def _render(self, identity: str | None, minutes: int) -> Body:
        now = self._wall()
        engines = self._intake.registry.engines.values()
        copies = [
            self._copy(engine, now - 60 * minutes)
            for engine in engines
            if identity in (None, engine.id) and not engine.layout.tables.is_part(engine.labels)
        ]
        return await asyncio.to_thread(_encode, copies, now, minutes)

    def _copy(self, engine: Engine, since: float) -> _Copy:
        timeline, health = engine.find_part(Timeline) or Timeline(), self._intake.health.of(engine)
        first = bisect_left(timeline.steps.received, int(since))
        return _Copy(
            engine,
            None if health is None else health.state.value,
            None if health is None or health.reason is None else health.reason.value,
            StepColumns._make(column[first:] for column in timeline.steps),
            [kept for kept in timeline.requests if kept.received >= since],
        )


def _encode(copies: Iterable[_Copy], now: float, minutes: int) -> Body:
    """Return the answer, which takes a microsecond a step and 20 a request."""
    engines = [_engine(copy) for copy in copies]
    answer = TimelineAnswer(
        version=__version__, time=now, minutes=minutes, limits=LIMITS, engines=engines
    )
    return Body([msgspec.json.encode(answer)])


def _engine(copy: _Copy) -> EngineTimeline:
    engine, steps = copy.engine, copy.steps
    return EngineTimeline(
        id=engine.id,
        engine=engine.name,
        model=engine.labels.get("model_name", ""),
        dialect=engine.layout.dialect,
        state=copy.state,
        reason=copy.reason,
        steps=Steps(
            end=[round(end, DIGITS) for end in steps.end],
            seconds=[None if math.isnan(each) else round(each, DIGITS) for each in steps.seconds],
            prefill_requests=steps.prefill_requests.tolist(),
            prefill_tokens=steps.prefill_tokens.tolist(),
            decode_requests=steps.decode_requests.tolist(),
            decode_tokens=steps.decode_tokens.tolist(),
            limit=steps.limit.tolist(),
        ),
        requests=[make_record(engine, ended, received) for received, ended in copy.requests],
    )
