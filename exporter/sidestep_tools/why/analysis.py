"""Where the time of an engine's requests went, which limit bound, and what the data say to change.

A cause is named only if enough requests have ended, and it takes a material share of their time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from sidestep.catalog.tuning import CAUSES, Cause
from sidestep_tools.request_records import Record
from sidestep_tools.why.evidence import MIN_REQUESTS, CurvePoint, evidence, quantile
from sidestep_tools.why.timeline import (
    FRONT_END_IN,
    QUEUE,
    EngineTimeline,
    Step,
    parts_of,
    steps_of,
)

MIN_SECONDS = 0.1
"""Least time that a cause takes of one request in twenty to be named."""
MIN_E2E, MIN_TTFT = 0.1, 0.4
"""Least share of all requests' time, or of their time to first token, that a cause takes to be named.

The front end of a small model that is well takes up to a third of the time to first token.
"""
OF_TOP = 1 / 3
"""Share of the largest cause's time below which others are not named: they may be its consequences."""
MAX_GAP = 1.0
"""Seconds between two steps from which on the engine was idle, if nobody waited."""
FIRST = (FRONT_END_IN, QUEUE, "prefill")
"""Beginnings of the names of parts before the first token."""
ABORT = "abort"
"""Reason of the end of a request whose client left."""
NO_LIMIT, NO_QUEUE_LIMIT = "none", f"{QUEUE}unknown"
ALMOST_ALL = 0.8
"""Share of the time of limits from which on a wait without a limit is taken to be one for it."""
TINY = 1e-9


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of the last minute."""

    p50: float
    p95: float


class Row(msgspec.Struct, frozen=True):
    """An engine in ``/api/v1/live``; docs/live.md describes the fields."""

    id: str
    attention: str | None = None
    problem: str | None = None
    cause: str | None = None
    ttft: Percentiles | None = None
    e2e: Percentiles | None = None
    finished: float | None = None
    preemptions: float | None = None


NO_ROW = Row("")
MIN_PREEMPTED = 0.1
"""Least preemptions for each request that ended from which on the KV cache is taken to be full."""
GRAVE = ("stalled", "unreachable")
"""Reasons for attention of an engine that serves nobody: no request of it ends."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """A latency of requests, and the shares of its parts, the largest first; empty: unknown."""

    p50: float
    p95: float
    parts: dict[str, float]


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """A cause that the data support.

    Attributes:
        cause: Its name in docs/tuning.md.
        seconds: The time of requests that it took.
        e2e_share: That as a share of all of their time; None: unknown, and so is the next one.
        ttft_share: Its share of the time to first tokens; 0 if it comes later.
    """

    cause: str
    seconds: float
    e2e_share: float | None
    ttft_share: float | None
    meaning: str
    change: str
    unless: str
    evidence: list[str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report on one engine.

    Attributes:
        attention: For what it needs attention, as the live page says; empty: it needs none.
        problem: The same in words, as the live page says; empty: it needs none.
        aborted: Those of its requests whose clients left.
        seconds: Length of the time in which these requests ended, or steps.
        limits: Share of the busy time by limit, the largest first; empty: unknown.
        causes: The largest first; empty: nothing binds, or too little is known.
        unseen: What cannot be seen, and why.
    """

    id: str
    engine: str
    model: str
    attention: str
    problem: str
    requests: int
    aborted: int
    steps: int
    seconds: float
    ttft: Latency | None
    e2e: Latency | None
    limits: dict[str, float]
    causes: list[Named]
    unseen: list[str]


def report(
    engine: EngineTimeline,
    limits: Sequence[str],
    curve: Sequence[CurvePoint] = (),
    row: Row = NO_ROW,
) -> Report:
    """Return what the timeline of an engine says, with its hit ratio by size of the cache and its live numbers."""
    steps = [*steps_of(engine, limits)]
    binding = limit_shares(steps) or _shares(engine.limit_seconds)
    usual = _usual(binding)
    divided = [
        (record, _limited(parts, usual))
        for record in engine.requests
        if (parts := parts_of(record))
    ]
    firsts = [
        {name: each for name, each in parts.items() if name.startswith(FIRST)}
        for record, parts in divided
        if record.ttft_seconds is not None
    ]
    alls = [parts for _, parts in divided]
    material = _material(alls, firsts) if len(divided) >= MIN_REQUESTS else ()
    return Report(
        id=engine.id,
        engine=engine.engine,
        model=engine.model,
        attention=row.attention or "",
        problem=row.problem or "",
        requests=len(engine.requests),
        aborted=sum(record.reason == ABORT for record in engine.requests),
        steps=len(engine.steps.end),
        seconds=_span(engine),
        ttft=_latency([r.ttft_seconds for r in engine.requests], firsts, row.ttft),
        e2e=_latency([r.e2e_seconds for r in engine.requests], alls, row.e2e),
        limits=binding,
        causes=[
            _named(found, engine.dialect, evidence(found.cause, steps, binding, curve))
            for found in material
        ]
        or [*_by_live_numbers(row, engine)],
        unseen=[*_unseen(engine, row, binding, divided)],
    )


def limit_shares(steps: Sequence[Step]) -> dict[str, float]:
    """Return the share of busy time in which each limit held, the largest first; empty if none is known.

    A limit holds from the start of its step to that of the next one.
    """
    seconds: dict[str, float] = defaultdict(float)
    for step, after in pairwise(steps):
        length = max(after.start - step.start, 0.0)
        if step.limit in ("", NO_LIMIT):
            length = min(length, step.end - step.start + MAX_GAP)
        seconds[step.limit] += length
    if steps:
        seconds[steps[-1].limit] += steps[-1].end - steps[-1].start
    seconds.pop("", None)
    return _shares(seconds)


def _usual(binding: Mapping[str, float]) -> str:
    """Return the part of the time in the queue whose limit the requests do not know.

    If almost only one limit held while requests waited, they waited for that one.
    """
    waited = {limit: share for limit, share in binding.items() if limit != NO_LIMIT}
    for limit, each in waited.items():
        if each >= ALMOST_ALL * sum(waited.values()):
            return QUEUE + limit
    return NO_QUEUE_LIMIT


def _limited(parts: Mapping[str, float], usual: str) -> Mapping[str, float]:
    """Return parts with the usual limit in place of an unknown one."""
    if NO_QUEUE_LIMIT not in parts or usual == NO_QUEUE_LIMIT:
        return parts
    known = {name: each for name, each in parts.items() if name != NO_QUEUE_LIMIT}
    known[usual] = known.get(usual, 0.0) + parts[NO_QUEUE_LIMIT]
    return known


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda each: -each[1])
    return {name: each / total for name, each in ordered if each > 0.0}


def _latency(
    latencies: Sequence[float | None],
    parts: Sequence[Mapping[str, float]],
    live: Percentiles | None,
) -> Latency | None:
    known = sorted(seconds for seconds in latencies if seconds is not None)
    if not known:
        return None if live is None else Latency(p50=live.p50, p95=live.p95, parts={})
    return Latency(p50=quantile(known, 0.5), p95=quantile(known, 0.95), parts=_shares(_sum(parts)))


def _sum(parts: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    total: dict[str, float] = defaultdict(float)
    for each in parts:
        for name, seconds in each.items():
            total[name] += seconds
    return total


def _span(engine: EngineTimeline) -> float:
    ends = [record.time.timestamp() for record in engine.requests] + engine.steps.end
    return max(ends) - min(ends) if ends else 0.0


class _Material(NamedTuple):
    cause: Cause
    seconds: float
    e2e_share: float | None = None
    ttft_share: float | None = None


def _by_live_numbers(row: Row, engine: EngineTimeline) -> Iterator[Named]:
    """Yield the cause for which an engine needs attention, or for which it preempts unknown requests."""
    name, found = row.cause, f"it {row.problem}"
    preempted, ended = row.preemptions or 0.0, row.finished or 0.0
    if name is None and not engine.requests and preempted >= MIN_PREEMPTED * max(ended, 1.0):
        name = "kv_blocks"
        found = (
            f"{preempted:.0f} preemptions in the last minute, in which {ended:.0f} requests ended"
        )
    for cause in CAUSES:
        if cause.name == name:
            yield _named(_Material(cause, 0.0), engine.dialect, [found])


def _material(
    alls: Sequence[Mapping[str, float]], firsts: Sequence[Mapping[str, float]]
) -> Iterator[_Material]:
    """Yield the causes that take a material share of the requests' time, the largest first.

    ``alls`` has the parts of each request, ``firsts`` those before its first token.
    """
    total, first = _sum(alls), _sum(firsts)
    taken = {cause: _taken(cause, total) for cause in CAUSES}
    waited = {cause: _taken(cause, first) for cause in CAUSES}
    for cause in sorted(CAUSES, key=lambda each: -taken[each]):
        e2e = taken[cause] / max(sum(total.values()), TINY)
        ttft = waited[cause] / max(sum(first.values()), TINY)
        each_took = sorted(_taken(cause, parts) for parts in alls)
        is_large = e2e >= MIN_E2E and taken[cause] >= OF_TOP * max(taken.values())
        is_first = ttft >= MIN_TTFT and waited[cause] >= OF_TOP * max(waited.values())
        if (is_large or is_first) and quantile(each_took, 0.95) >= MIN_SECONDS:
            yield _Material(cause, taken[cause], e2e, ttft)


def _named(found: _Material, dialect: str, numbers: Iterable[str]) -> Named:
    cause = found.cause
    change = next((each.text for each in cause.changes if each.dialect == dialect), "")
    return Named(
        cause=cause.name,
        seconds=found.seconds,
        e2e_share=found.e2e_share,
        ttft_share=found.ttft_share,
        meaning=cause.meaning,
        change=f"{change}. {cause.otherwise}" if change else cause.otherwise,
        unless=cause.unless,
        evidence=[*numbers],
    )


def _taken(cause: Cause, parts: Mapping[str, float]) -> float:
    return sum(parts.get(part, 0.0) for part in cause.parts)


def _unseen(
    engine: EngineTimeline,
    row: Row,
    binding: Mapping[str, float],
    divided: Sequence[tuple[Record, Mapping[str, float]]],
) -> Iterator[str]:
    if not engine.requests and row.finished:
        yield "its requests: it sends no request events (docs/requests.md)"
    elif not engine.requests and engine.steps.end:
        yield "no request has ended"
    elif not engine.requests:
        yield "its requests: none has ended, or it sends no request events (docs/requests.md)"
    elif len(divided) < MIN_REQUESTS:
        yield f"the time of only {len(divided)} requests is known, too few to name a cause"
    if not binding:
        has_steps = bool(engine.steps.end)
        reason = "its sender does not say them" if has_steps else "they come with steps"
        yield f"limits: {reason}, of vLLM by the tap (docs/vllm-core.md)"
    if divided and all(not record.parts for record, _ in divided):
        yield "parts of its requests but for their intervals: no interference, no limit of the queue"
