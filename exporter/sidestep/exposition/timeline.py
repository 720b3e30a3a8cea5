"""The answer of ``/api/v1/timeline``: the recent steps and ended requests of engines."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import NamedTuple

import msgspec

from sidestep import __version__
from sidestep.exposition.renders import Body, SharedRenders
from sidestep.ingest.intake import Intake
from sidestep.metrics.engine import Engine, distinct_names
from sidestep.metrics.step_limits import limit_seconds
from sidestep.metrics.timeline import SECONDS, KeptRequest, StepColumns, Timeline
from sidestep.protocol.request_events import LIMITS
from sidestep.requests.record import DIGITS, make_record

MAX_MINUTES = int(SECONDS) // 60
CACHE_SECONDS = 1.0
"""How long an answer is sent to further readers."""
CHUNK = 256
"""Numbers, or records, that are encoded at once."""


class EngineHead(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One engine, before its ``steps`` and ``requests``.

    ``steps`` has a list for each column of ``StepColumns`` but ``received``; an unknown duration is null.
    ``requests`` has the records of the requests that ended, as in ``--requests.log``.

    Attributes:
        state: A state of docs/health.md; None where no process reports progress.
        reason: Why it is slow or stalled.
        limit_seconds: Time by limit, of an engine that counts it without steps; else empty.
    """

    id: str
    engine: str
    model: str
    dialect: str
    state: str | None
    reason: str | None
    limit_seconds: dict[str, float]


class Head(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answer of ``/api/v1/timeline``, before its ``engines``.

    Attributes:
        limits: Names of limits: a step has an index into them, or -1 for an unknown limit.
    """

    version: str
    time: float
    minutes: int
    limits: Sequence[str]


class _Copy(NamedTuple):
    """An engine at one moment."""

    engine: Engine
    head: EngineHead
    steps: StepColumns
    requests: list[KeptRequest]


class Timelines:
    """Answers with the recent steps and requests of engines."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._renders: SharedRenders[tuple[str | None, int, int]] = SharedRenders(CACHE_SECONDS)

    async def answer(self, identity: str | None, minutes: int, slowest: int = 0) -> Body | None:
        """Return the answer for an engine or for all; None if there is no such engine.

        With ``slowest`` it has only so many requests of each engine, the slowest first, and no steps.
        """
        if identity is not None and identity not in self._intake.registry.engines:
            return None
        key = identity, minutes, slowest
        return await self._renders.get(key, lambda: self._render(*key))

    async def _render(self, identity: str | None, minutes: int, slowest: int) -> Body:
        # The wall clock may be set: it must not change what counts as recent.
        now = time.monotonic()
        offset = time.time() - now
        copies = []
        known = self._intake.registry.engines.values()
        engines = [each for each in known if not each.layout.tables.is_part(each.labels)]
        names = distinct_names(engines)
        for engine in engines:
            if identity in (None, engine.id):
                found = self._copy(engine, names[engine.id], now - 60 * minutes)
                copies.append(_slowest(found, slowest) if slowest else found)
                # A copy takes up to some milliseconds: other tasks run in between.
                await asyncio.sleep(0)
        head = Head(version=__version__, time=now + offset, minutes=minutes, limits=LIMITS)
        return Body(await asyncio.to_thread(lambda: [*_pieces(head, copies, offset)]))

    def _copy(self, engine: Engine, name: str, since: float) -> _Copy:
        timeline, health = engine.find_part(Timeline) or Timeline(), self._intake.health.of(engine)
        first = bisect_left(timeline.steps.received, int(since))
        head = EngineHead(
            id=engine.id,
            engine=name,
            model=engine.labels.get("model_name", ""),
            dialect=engine.layout.dialect,
            state=None if health is None else health.state.value,
            reason=None if health is None or health.reason is None else health.reason.value,
            limit_seconds=_limit_seconds(engine, timeline, since),
        )
        return _Copy(
            engine,
            head,
            StepColumns._make(column[first:] for column in timeline.steps),
            [kept for kept in timeline.requests if kept.received >= since],
        )


def _slowest(found: _Copy, count: int) -> _Copy:
    requests = heapq.nlargest(
        count, found.requests, key=lambda kept: kept.ended.e2e or kept.ended.core_e2e or 0.0
    )
    steps = StepColumns._make(column[:0] for column in found.steps)
    return found._replace(steps=steps, requests=requests)


def _limit_seconds(engine: Engine, timeline: Timeline, since: float) -> dict[str, float]:
    """Return the time by limit since the first known moment after ``since``."""
    first = next((each.seconds for each in timeline.limits if each.received >= since), None)
    if first is None:
        return {}
    increases = {
        limit: round(seconds - first.get(limit, 0.0), DIGITS)
        for limit, seconds in limit_seconds(engine).items()
    }
    return {limit: seconds for limit, seconds in increases.items() if seconds > 0.0}


def _pieces(head: Head, copies: Iterable[_Copy], offset: float) -> Iterator[bytes]:
    """Yield the JSON in pieces, of which each holds the interpreter's lock for about a millisecond.

    ``offset`` is the Unix time at the monotonic time 0.
    """
    yield _opened(head) + b',"engines":['
    for comma, (engine, engine_head, steps, requests) in zip(_commas(), copies, strict=False):
        yield comma + _opened(engine_head) + b',"steps":{'
        for separator, name in zip(_commas(), steps._fields[1:], strict=False):
            yield separator + b'"%b":[' % name.encode()
            yield from _items(map(_number, getattr(steps, name)))
            yield b"]"
        yield b'},"requests":['
        yield from _items(
            make_record(engine, ended, received + offset) for received, ended in requests
        )
        yield b"]}"
    yield b"]}"


def _opened(head: msgspec.Struct) -> bytes:
    """Return a JSON object without its closing brace."""
    return msgspec.json.encode(head)[:-1]


def _commas() -> Iterator[bytes]:
    return chain([b""], repeat(b","))


def _items(items: Iterator[object]) -> Iterator[bytes]:
    """Yield the items of a JSON array, some at a time."""
    for comma in _commas():
        some = [*islice(items, CHUNK)]
        if not some:
            return
        yield comma + msgspec.json.encode(some)[1:-1]


def _number(number: float) -> float | None:
    """Return a number of a column as JSON has it: rounded, and null for NaN."""
    if isinstance(number, int):
        return number
    return None if math.isnan(number) else round(number, DIGITS)
