"""The record of one request that has ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone

import msgspec

from sidestep.catalog.slo import AVAILABILITY, LATENCIES
from sidestep.metrics.engine import Engine
from sidestep.protocol.messages import BOTH
from sidestep.protocol.request_events import Identity
from sidestep.tracking.requests.inflight import Request
from sidestep.tracking.requests.outcomes import FAILED, EndedRequest
from sidestep.tracking.requests.parts import PREFILL_REMOTE

UNIDENTIFIED = Identity()
DIGITS = 6
"""Decimal places of seconds: an engine's clock does not have more."""
TRANSFERS = ("", "handed_over", "received")
"""Names of what a request was to its engine, in the order of ``protocol.request_events``."""
MAX_TIME = 9e9
"""Latest Unix time of a record: a sender's clock may be wrong by any amount."""
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that has ended, as a line of ``--requests.log``; null is unknown.

    Attributes:
        key: Identity of the engine, of the process that numbered the request, and its number. A record
            that is written twice has the same key twice.
        time: When the request ended.
        engine: The label ``engine``, or the engine's identity.
        dialect: The kind of engine, such as ``vllm``.
        id: The request's id as the engine sent it, or its hash; empty if engines send none.
        trace_id: Of its trace context, as are the next two; empty and 0 if engines send none.
        trace_flags: 1 is set if its caller records the trace.
        tenant: Whose request it is, by ``--tenants.by``; empty if tenants are not counted.
        sample: Index among the parallel samples of one request.
        reason: ``stop``, ``length``, ``abort``, ``error``, ``repetition``; ``refused``; ``engine_died`` if
            the engine's process ended before the request; ``expired`` after --requests.max-age.
        refused: Why the engine refused it.
        arrival: When the front end received it.
        queued: When it entered the engine's queue.
        queue_seconds: From the queue's entry to the first time in the batch.
        prefill_seconds: From there to the first output.
        decode_seconds: From the first output to the last.
        preempted_seconds: Time spent out of the batch after preemptions, included in the above.
        preempted_at: Seconds from ``queued`` to a preemption, and its length, of the first eight.
        ttft_seconds: From arrival to the first output.
        mean_itl_seconds: ``decode_seconds`` for each output token after the first.
        max_itl_seconds: Longest time between two outputs.
        cached_tokens: Prompt tokens whose KV was not computed, ``external_tokens`` of them loaded
            from another engine or an external cache.
        extra_tokens: Output tokens beyond one a step: accepted drafts of speculative decoding.
        max_tokens: Limit on output tokens.
        objectives: Whether it met each objective of ``--slo`` that can be decided.
        parts: ``e2e_seconds`` in parts that sum to it, by ``tracking.requests.parts.KEYS``; empty: unknown.
            ``prefill_remote`` comes on top, where the exporter knows both parts of the request.
        role: The engine's role: ``prefill``, ``decode`` or ``both``.
        transfer: ``handed_over`` if another engine continues the request and counts it, ``received`` if
            another one has computed its prompt; else empty.
        join_key: What the connectors of both engines call it, as the engine sent it; empty: unknown.
    """

    key: str
    time: datetime
    engine: str
    dialect: str = ""
    model: str
    adapter: str
    id: str
    trace_id: str
    parent_span_id: str
    trace_flags: int = 0
    tenant: str
    priority: int
    sample: int
    reason: str
    refused: str
    arrival: datetime | None
    queued: datetime | None = None
    e2e_seconds: float | None
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    preempted_seconds: float
    preemptions: int
    preempted_at: list[tuple[float, float]] = []
    ttft_seconds: float | None
    mean_itl_seconds: float | None
    max_itl_seconds: float | None
    prompt_tokens: int
    cached_tokens: int
    external_tokens: int
    output_tokens: int
    extra_tokens: int
    max_tokens: int | None
    objectives: dict[str, bool]
    parts: dict[str, float] = {}
    role: str = BOTH
    transfer: str = ""
    join_key: str = ""


def output_tokens(ended: EndedRequest) -> int:
    """Return the tokens that a request generated."""
    request = ended.request
    if request is None or request.first is None:
        return ended.generation_tokens
    if ended.reason == "abort":
        return ended.generation_tokens or request.tokens
    return request.tokens


def make_record(engine: Engine, ended: EndedRequest, now: float) -> RequestRecord:
    """Return the record of a request; one without an event at its end has ended ``now``."""
    request = ended.request or Request(ended.stamp)
    identity = request.identity or UNIDENTIFIED
    trace_id, parent, flags = trace_context(identity.trace) if identity.trace else ("", "", 0)
    queued, first, arrival = request.queued, request.first, request.arrival
    begin = _queued_at(ended, request)
    labels, transfer = engine.labels, ended.transfer
    has_objectives = bool(engine.settings.objectives.names)
    return RequestRecord(
        key=f"{engine.id}/{ended.source:x}/{ended.number}",
        time=_utc(_ended_at(ended, request, now)),
        engine=labels.get("engine") or engine.id,
        dialect=engine.layout.dialect,
        model=labels.get("model_name", ""),
        adapter=request.adapter,
        id=identity.id,
        trace_id=trace_id,
        parent_span_id=parent,
        trace_flags=flags,
        tenant=request.tenant,
        priority=identity.priority,
        sample=request.sample,
        reason=ended.reason,
        refused=ended.refused,
        arrival=None if arrival is None else _utc(arrival),
        queued=None if begin is None else _utc(begin),
        e2e_seconds=_rounded(ended.latency),
        queue_seconds=_rounded(_between(queued, request.scheduled)),
        prefill_seconds=_rounded(_between(request.scheduled, first)),
        decode_seconds=_rounded(_between(first, _decoded_until(ended, request))),
        preempted_seconds=round(request.preempted_seconds, DIGITS),
        preemptions=max(ended.preemptions, request.preemptions),
        preempted_at=_preemptions(request) if request.pauses else [],
        ttft_seconds=_rounded(ended.ttft),
        mean_itl_seconds=_rounded(_mean_itl(request)),
        max_itl_seconds=_rounded(request.longest_gap) or None,
        prompt_tokens=ended.prompt_tokens or request.prompt_tokens,
        cached_tokens=request.cached,
        external_tokens=request.external,
        output_tokens=output_tokens(ended),
        extra_tokens=request.extra_tokens,
        max_tokens=request.max_tokens if ended.max_tokens is None else ended.max_tokens,
        objectives=objectives_met(engine, ended, latencies(ended)) if has_objectives else {},
        parts=_rounded_parts(_with_remote(ended)),
        role=engine.role,
        transfer=TRANSFERS[transfer] if transfer < len(TRANSFERS) else "",
        join_key=identity.join,
    )


def latencies(ended: EndedRequest) -> dict[str, float | None]:
    """Return the latencies that objectives may limit, by ``slo.LATENCIES``; None is unknown."""
    request = ended.request
    if request is None:
        return dict.fromkeys(LATENCIES)
    return {
        "e2e": _plus(ended.latency, ended.remote),
        "queue": _between(request.queued, request.scheduled),
        "ttft": _plus(ended.ttft, ended.remote),
        "time_per_output_token": _mean_itl(request),
        "inter_token": request.longest_gap or None,
    }


def objectives_met(
    engine: Engine, ended: EndedRequest, times: Mapping[str, float | None]
) -> dict[str, bool]:
    """Return whether the request met each objective that can be decided.

    A request that was not served meets none. One of inter-token latency is met if the longest
    time between two outputs meets it.
    """
    objectives = engine.settings.objectives
    is_served = ended.reason not in FAILED
    found: dict[str, bool] = {}
    for name, family in engine.layout.tables.latencies.items():
        seconds = times.get(name)
        if seconds is not None:
            for limit in objectives.limits(family):
                found[limit.objective] = is_served and seconds <= limit.threshold
    if objectives.availability:
        found[AVAILABILITY] = is_served
    return found


def _with_remote(ended: EndedRequest) -> dict[str, float]:
    """Return the parts of a request, with what the exporter knows of the engine before."""
    parts = ended.parts or {}
    if not ended.remote:
        return parts
    return {
        PREFILL_REMOTE: ended.remote + parts.get(PREFILL_REMOTE, 0.0),
        **{key: seconds for key, seconds in parts.items() if key != PREFILL_REMOTE},
    }


def _plus(seconds: float | None, more: float) -> float | None:
    return None if seconds is None else seconds + more


def _ended_at(ended: EndedRequest, request: Request, now: float) -> float:
    """Return the Unix time of the end."""
    if ended.e2e is not None and request.arrival is not None:
        return request.arrival + ended.e2e
    return now if ended.wall is None else ended.wall


def _decoded_until(ended: EndedRequest, request: Request) -> float | None:
    """Return the time of the last output, or that of the end if a front end has ended the request before.

    The core goes on after a stop string, which only the front end finds.
    """
    core = _between(request.arrival, ended.wall)
    if ended.e2e is None or core is None or request.first is None or request.last is None:
        return request.last
    return max(request.first, min(request.last, ended.stamp + ended.e2e - core))


def _between(start: float | None, end: float | None) -> float | None:
    if start is None or end is None or end < start:
        return None
    return end - start


def _mean_itl(request: Request) -> float | None:
    decode, more = _between(request.first, request.last), request.tokens - 1
    return decode / more if decode is not None and more > 0 else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, DIGITS)


def _rounded_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts that are not 0 when their ends are rounded, so that they sum to the rounded total."""
    found: dict[str, float] = {}
    total = end = 0.0
    for key, seconds in parts.items():
        begin, total = end, total + seconds
        end = round(total, DIGITS)
        if end > begin:
            found[key] = round(end - begin, DIGITS)
    return found


def _utc(time: float) -> datetime:
    return datetime.fromtimestamp(min(MAX_TIME, time), timezone.utc)


def _queued_at(ended: EndedRequest, request: Request) -> float | None:
    """Return the Unix time of the entry into the queue.

    The engine's clock of intervals is compared with Unix time at the end of the request or, where that
    had no event, at its first output.
    """
    if request.queued is None:
        return None
    if ended.wall is not None:
        return max(ended.wall - (ended.stamp - request.queued), 0.0)
    if request.first is None or request.ttft is None or request.arrival is None:
        return None
    return max(request.arrival + request.ttft - (request.first - request.queued), 0.0)


def _preemptions(request: Request) -> list[tuple[float, float]]:
    queued = request.queued
    if queued is None:
        return []
    return [(round(at - queued, DIGITS), round(length, DIGITS)) for at, length in request.pauses]


def trace_context(traceparent: str) -> tuple[str, str, int]:
    """Return trace id, parent's span id and flags of a W3C ``traceparent``; empty and 0 if it is none."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return (found[1], found[2], int(found[3], 16)) if found else ("", "", 0)
