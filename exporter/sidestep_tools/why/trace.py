"""Timelines as a trace for Perfetto and Chrome, in the JSON of Chrome's Trace Event Format.

Each engine is a process of the trace. It has a track of steps, one of limits, and one for each request that
is in flight at a time, with the request's phases and parts as slices within it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from sidestep_tools.request_records import Record
from sidestep_tools.why.timeline import (
    EngineTimeline,
    Step,
    Timeline,
    phases_of,
    preemptions_of,
    steps_of,
)

STEPS, LIMITS, REQUESTS = 1, 2, 10
"""Numbers of the tracks; the first of the requests' tracks."""
REPLAYED = 10.0
"""Seconds by which times go back where a recording is replayed again."""
Event = dict[str, Any]


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace of a timeline; its events are sorted, an outer slice before those within it."""
    events: list[Event] = []
    metadata: list[Event] = []
    for pid, engine in enumerate(timeline.engines, start=1):
        found = [*_events(engine, timeline.limits)]
        names = {STEPS: "steps", LIMITS: "limit of admission"}
        for event in found:
            event["pid"] = pid
            number = event["tid"]
            names.setdefault(number, f"requests {number - REQUESTS + 1}")
        title = " ".join(filter(None, (engine.model, engine.engine, f"({engine.id})")))
        metadata.append(_meta("process_name", pid, 0, name=title))
        for number, name in sorted(names.items()):
            metadata.append(_meta("thread_name", pid, number, name=name))
            metadata.append(_meta("thread_sort_index", pid, number, sort_index=number))
        events += found
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {"traceEvents": [*metadata, *events], "displayTimeUnit": "ms"}


def _meta(kind: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slice(tid: int, name: str, start: int, end: int, **args: object) -> Event:
    return {"ph": "X", "name": name, "tid": tid, "ts": start, "dur": end - start, "args": args}


def _events(engine: EngineTimeline, limits: Sequence[str]) -> Iterator[Event]:
    steps = [*steps_of(engine, limits)]
    first = _last_round([step.end for step in steps])
    yield from _step_events(steps[first:])
    first = _last_round([record.time.timestamp() for record in engine.requests])
    yield from _request_events(engine.requests[first:])


def _last_round(times: Sequence[float]) -> int:
    """Return the index after which times only grow: a recording that is replayed again has its own times."""
    last, latest = 0, float("-inf")
    for index, time in enumerate(times):
        if time < latest - REPLAYED:
            last, latest = index, time
        latest = max(latest, time)
    return last


def _step_events(steps: Sequence[Step]) -> Iterator[Event]:
    """Yield a slice for each step, and one for each stretch of the same limit.

    With asynchronous scheduling a step is scheduled while another runs; its slice begins after that one.
    """
    end = since = 0
    limit = ""
    for step in steps:
        start, until = (round(time * 1e6) for time in (step.start, step.end))
        if step.limit != limit:
            if limit:
                yield _slice(LIMITS, limit, since, max(start, since))
            since, limit = max(start, since), step.limit
        start = max(start, end)
        end = max(until, start)
        phase = "prefill" if step.prefill_requests else "decode"
        yield _slice(
            STEPS,
            f"{phase} {step.size}",
            start,
            end,
            requests=step.size,
            prefill_requests=step.prefill_requests,
            prefill_tokens=step.prefill_tokens,
            decode_tokens=step.decode_tokens,
            limit=step.limit or "unknown",
            seconds=round(step.end - step.start, 6),
        )
    if limit:
        yield _slice(LIMITS, limit, since, max(end, since))


def _request_events(requests: Sequence[Record]) -> Iterator[Event]:
    """Yield slices of the requests, each on the first track that is free."""
    known = [(phases, record) for record in requests if (phases := phases_of(record))]
    known.sort(key=lambda each: each[0][0].start)
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for phases, record in known:
        start, end = phases[0].start, phases[-1].end
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        track = heapq.heappop(free) if free else REQUESTS + len(busy)
        heapq.heappush(busy, (end, track))
        yield _slice(
            track,
            record.name,
            start,
            end,
            reason=record.reason,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            ttft_seconds=record.ttft_seconds,
            parts=record.parts or {},
        )
        for phase in phases:
            yield _slice(track, phase.name, phase.start, phase.end, parts=dict(phase.parts))
            if phase.name == "queue":
                # Its limits have no times of their own: they follow one another in any order.
                at = phase.start
                for part, seconds in phase.parts.items():
                    until = min(at + round(seconds * 1e6), phase.end)
                    if until > at:
                        yield _slice(track, part, at, until)
                    at = until
        yield from _preemptions(track, record, start, end)


def _preemptions(track: int, record: Record, start: int, end: int) -> Iterator[Event]:
    """Yield an instant for each preemption, and a slice until the request is in the batch again."""
    ends = [phase.end for phase in phases_of(record)]
    for begin, back in preemptions_of(record):
        if start <= begin <= end:
            yield {"ph": "i", "name": "preempted", "tid": track, "ts": begin, "s": "t", "args": {}}
            # A slice must end within the phase in which it begins.
            until = min(back, next((each for each in ends if each > begin), begin))
            if until > begin:
                yield _slice(track, "preempted", begin, until)
