"""The phases of a request that has ended, in nanoseconds since 1970, from its record."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from sidestep.requests.record import RequestRecord

MAX_NANOS = (1 << 63) - 1


class Phase(NamedTuple):
    """A part of a request: ``queue``, ``prefill``, ``decode`` or ``preempted``."""

    name: str
    start: int
    end: int


class Timeline(NamedTuple):
    """A request and its phases, in the order of their starts but for preemptions, which are last."""

    start: int
    end: int
    phases: list[Phase]


def timeline(record: RequestRecord) -> Timeline:
    """Return the timeline of a request; lengths are exactly those of its record.

    A phase that the request's end has cut off has no length in the record; it lasts until that end.
    """
    end = nanos(record.time)
    arrival = None if record.arrival is None else nanos(record.arrival)
    queued = None if record.queued is None else nanos(record.queued)
    phases = list(_phases(record, arrival, queued, end))
    start = arrival if arrival is not None else queued
    if start is None:
        start = phases[0].start if phases else end
    if record.e2e_seconds is not None:
        end = start + _length(record.e2e_seconds)
    if queued is not None:
        for offset, length in record.preempted_at:
            begin = queued + _length(offset)
            phases.append(Phase("preempted", begin, begin + _length(length)))
    return Timeline(
        _bounded(start),
        _bounded(max(start, end)),
        [Phase(name, _bounded(begin), _bounded(until)) for name, begin, until in phases],
    )


def _phases(
    record: RequestRecord, arrival: int | None, queued: int | None, end: int
) -> Iterator[Phase]:
    """Yield the phases one after the other: each begins where the one before it ends."""
    queue, prefill, decode = record.queue_seconds, record.prefill_seconds, record.decode_seconds
    first = None
    if arrival is not None and record.ttft_seconds is not None:
        first = arrival + _length(record.ttft_seconds)
    begin = queued if queued is not None else arrival
    scheduled = None
    if queue is not None and begin is not None:
        if queued is None and first is not None:
            begin = first - _length(prefill or 0.0) - _length(queue)
        scheduled = begin + _length(queue)
        yield Phase("queue", begin, scheduled)
    elif queued is not None and record.reason != "refused" and first is None and decode is None:
        # It was never scheduled.
        yield Phase("queue", queued, max(queued, end))
        return
    if prefill is not None:
        if scheduled is None:
            known = first if first is not None else end - _length(decode or 0.0)
            scheduled = known - _length(prefill)
        first = scheduled + _length(prefill)
        yield Phase("prefill", scheduled, first)
    elif scheduled is not None and first is None:
        yield Phase("prefill", scheduled, max(scheduled, end))
        return
    if decode is not None:
        begin = first if first is not None else end - _length(decode)
        yield Phase("decode", begin, begin + _length(decode))


def nanos(time: datetime) -> int:
    """Return a time of a record, which has microseconds."""
    return round(time.timestamp() * 1e6) * 1000


def _length(seconds: float) -> int:
    return round(seconds * 1e9)


def _bounded(nanos: int) -> int:
    return min(max(nanos, 0), MAX_NANOS)
