"""Steps and ended requests of engines, as an exporter's ``/api/v1/timeline`` has them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from sidestep.protocol.limits import Seconds
from sidestep.protocol.request_events import LIMITS
from sidestep_tools.request_records import Record

FRONT_END_IN, PREFILL, DECODE, PREEMPTED, FRONT_END_OUT = (
    "front_end_in",
    "prefill",
    "decode",
    "preempted",
    "front_end_out",
)
QUEUE = "queue."
"""Beginning of the names of parts in the queue, before that of the limit."""


class Steps(msgspec.Struct, kw_only=True):
    """Columns of steps in the order of their arrival; ``limit`` is an index into ``Timeline.limits`` or -1."""

    end: list[float] = []
    seconds: list[Seconds | None] = []
    prefill_requests: list[int] = []
    prefill_tokens: list[int] = []
    decode_requests: list[int] = []
    decode_tokens: list[int] = []
    limit: list[int] = []

    def __post_init__(self) -> None:
        """Refuse columns of different lengths."""
        if len({len(column) for column in msgspec.structs.astuple(self)}) > 1:
            raise ValueError("columns of steps differ in length")


class EngineTimeline(msgspec.Struct, kw_only=True):
    """The steps and the requests of one engine.

    Attributes:
        state: A state of docs/health.md; None: not known.
        reason: Why it is slow or stalled.
        limit_seconds: Time by limit, of an engine that counts it without steps.
    """

    id: str
    engine: str = ""
    model: str = ""
    dialect: str = ""
    state: str | None = None
    reason: str | None = None
    limit_seconds: dict[str, Seconds] = {}
    steps: Steps = msgspec.field(default_factory=Steps)
    requests: list[Record] = []


class Timeline(msgspec.Struct, kw_only=True):
    """The steps and requests of engines, of an exporter or of a file."""

    engines: list[EngineTimeline]
    limits: Sequence[str] = LIMITS


class Step(NamedTuple):
    """One step; ``limit`` is empty where it is unknown.

    With asynchronous scheduling a step is scheduled while another runs: it begins after that one.
    """

    start: float
    begin: float
    end: float
    size: int
    prefill_requests: int
    prefill_tokens: int
    decode_tokens: int
    limit: str


def steps_of(engine: EngineTimeline, limits: Sequence[str]) -> Iterator[Step]:
    """Yield the steps of an engine whose duration is known."""
    steps, before = engine.steps, -math.inf
    for end, seconds, prefills, prefill_tokens, decodes, tokens, limit in zip(
        steps.end,
        steps.seconds,
        steps.prefill_requests,
        steps.prefill_tokens,
        steps.decode_requests,
        steps.decode_tokens,
        steps.limit,
        strict=True,
    ):
        if seconds is not None:
            name = limits[limit] if 0 <= limit < len(limits) else ""
            size = prefills + decodes
            start = end - seconds
            # Times of a recording that is replayed again go back.
            begin = max(start, before) if before <= end else start
            yield Step(start, begin, end, size, prefills, prefill_tokens, tokens, name)
        before = end


def parts_of(record: Record) -> Mapping[str, float]:
    """Return the parts of a request's e2e latency; empty if that is unknown.

    Without parts in the record they follow from its intervals, of which fewer are known.
    """
    if record.parts:
        return record.parts
    if record.e2e_seconds is None:
        return {}
    preempted = min(record.preempted_seconds, record.decode_seconds or 0.0)
    parts = {
        FRONT_END_IN: _between(record.arrival, record.queued),
        f"{QUEUE}unknown": record.queue_seconds or 0.0,
        PREFILL: record.prefill_seconds or 0.0,
        DECODE: (record.decode_seconds or 0.0) - preempted,
        PREEMPTED: preempted,
    }
    # The rest is the front end's only if all of the others are known.
    if record.decode_seconds is not None and record.queued is not None:
        parts[FRONT_END_OUT] = record.e2e_seconds - sum(parts.values())
    return {name: seconds for name, seconds in parts.items() if seconds > 0.0}


def _between(start: datetime | None, end: datetime | None) -> float:
    return 0.0 if start is None or end is None else max((end - start).total_seconds(), 0.0)


class Phase(msgspec.Struct, frozen=True):
    """A stretch of a request, in whole microseconds since 1970, with the parts that it has."""

    name: str
    start: int
    end: int
    parts: Mapping[str, float]


PHASES = {
    FRONT_END_IN: (FRONT_END_IN,),
    "queue": (QUEUE, "transfer"),
    PREFILL: (PREFILL, "prefill_gap"),
    DECODE: (DECODE, "interference", PREEMPTED, "recompute", "stalled"),
    FRONT_END_OUT: (FRONT_END_OUT,),
}
"""The parts of each phase, by the beginnings of their names; a phase follows the one before."""


def phases_of(record: Record) -> list[Phase]:
    """Return the phases of a request, one after the other from its arrival; empty if it is unknown.

    Their ends are those of its record, so that a preemption before the first output is in ``prefill``.
    """
    begin = record.arrival or record.queued
    if begin is None:
        return []
    start = at = micros(begin)
    end = micros(record.time)
    if record.e2e_seconds is not None and record.arrival is not None:
        end = start + round(record.e2e_seconds * 1e6)
    lengths = {
        FRONT_END_IN: _between(record.arrival, record.queued),
        "queue": record.queue_seconds,
        PREFILL: record.prefill_seconds,
        DECODE: record.decode_seconds,
    }
    parts, found = parts_of(record), []
    for name, beginnings in PHASES.items():
        length = lengths.get(name)
        # A phase without a length was the last one.
        until = max(end, at) if length is None else min(at + round(length * 1e6), max(end, at))
        own = {part: seconds for part, seconds in parts.items() if part.startswith(beginnings)}
        if until > at:
            found.append(Phase(name, at, until, own))
        at = until
    return found


def preemptions_of(record: Record) -> list[tuple[int, int]]:
    """Return the begin and the end of each known preemption, in whole microseconds since 1970."""
    if record.queued is None:
        return []
    queued = micros(record.queued)
    return [
        (queued + round(at * 1e6), queued + round((at + length) * 1e6))
        for at, length in record.preempted_at
    ]


def micros(time: datetime) -> int:
    """Return a time in microseconds since 1970."""
    return round(time.timestamp() * 1e6)
