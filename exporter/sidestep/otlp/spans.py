"""Spans and log records of requests that have ended, from their records."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace.status import Status, StatusCode

from sidestep.otlp.resource import SCOPE, Resource
from sidestep.requests.record import DIGITS, RequestRecord
from sidestep.requests.timeline import MAX_NANOS, nanos, timeline
from sidestep.tracking.requests.outcomes import FAILED

NAME = "llm_request"
"""Name of a request's span, which is vLLM's: conventions have none for the server's side."""
OPERATIONS: Mapping[str, str] = {"chatcmpl": "chat", "embd": "embeddings"}
"""Values of ``gen_ai.operation.name`` by the prefix of an OpenAI id."""
COMPLETION = "text_completion"
"""The operation where the id does not say: an engine completes a sequence of tokens."""
SEVERITIES: Mapping[str, SeverityNumber] = {
    "abort": SeverityNumber.WARN,
    "refused": SeverityNumber.WARN,
    "error": SeverityNumber.ERROR,
    "engine_died": SeverityNumber.ERROR,
    "expired": SeverityNumber.ERROR,
}
"""Severity by reason, where a request was not served."""
Attribute = str | bool | int | float | tuple[str, ...]


def contexts(record: RequestRecord) -> tuple[SpanContext, SpanContext | None]:
    """Return the context of a request's span, and that of its parent.

    The ids follow from its trace context and its key, so that a record that is sent twice is the same span.
    """
    digest = blake2b(record.key.encode(), digest_size=24).digest()
    trace = int(record.trace_id, 16) if record.trace_id else int.from_bytes(digest[:16], "big")
    parent = None
    flags = TraceFlags(TraceFlags.SAMPLED)
    if record.parent_span_id:
        flags = TraceFlags(record.trace_flags)
        parent = SpanContext(trace, int(record.parent_span_id, 16), is_remote=True)
    own = int.from_bytes(digest[16:], "big")
    return SpanContext(trace, own, is_remote=False, trace_flags=flags), parent


def spans(record: RequestRecord, _: bytes, resource: Resource) -> list[ReadableSpan]:
    """Return the spans of a request: its own, and one for each of its phases.

    A request whose caller does not record its trace has none.
    """
    own, parent = contexts(record)
    if not own.trace_flags.sampled:
        return []
    found = timeline(record)
    error = error_type(record)
    request = ReadableSpan(
        NAME,
        own,
        parent,
        resource,
        present(_attributes(record)),
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR, error) if error else Status(),
        start_time=found.start,
        end_time=found.end,
        instrumentation_scope=SCOPE,
    )
    phases = [
        ReadableSpan(
            phase.name,
            SpanContext(own.trace_id, own.span_id ^ place, False, own.trace_flags),
            own,
            resource,
            kind=SpanKind.INTERNAL,
            start_time=phase.start,
            end_time=phase.end,
            instrumentation_scope=SCOPE,
        )
        for place, phase in enumerate(found.phases, 1)
    ]
    return [request, *phases]


def log_records(record: RequestRecord, line: bytes, resource: Resource) -> list[ReadableLogRecord]:
    """Return the log record of a request, whose body is the record's line."""
    own, _ = contexts(record)
    severity = SEVERITIES.get(record.reason, SeverityNumber.INFO)
    end = min(nanos(record.time), MAX_NANOS)
    attributes = {
        "sidestep.request.key": record.key,
        "sidestep.request.reason": record.reason,
        "sidestep.engine": record.engine,
        "sidestep.tenant": record.tenant,
        "gen_ai.provider.name": record.dialect,
        "gen_ai.request.model": record.adapter or record.model,
        "gen_ai.response.id": record.id,
        "sidestep.join_key": record.join_key,
        "error.type": error_type(record),
    }
    found = LogRecord(
        timestamp=end,
        observed_timestamp=end,
        context=set_span_in_context(NonRecordingSpan(own)),
        severity_text=severity.name,
        severity_number=severity,
        body=line.decode().rstrip("\n"),
        attributes=present(attributes),
    )
    return [ReadableLogRecord(found, resource, SCOPE)]


def error_type(record: RequestRecord) -> str:
    """Return why a request failed; empty if it was served."""
    return record.refused or record.reason if record.reason in FAILED else ""


def present(found: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    """Return the attributes that have a value; an empty text is none."""
    return {name: value for name, value in found.items() if value not in (None, "", ())}


def _attributes(record: RequestRecord) -> dict[str, Attribute | None]:
    """Return the attributes of a request's span; None or an empty text where they are unknown."""
    operation = COMPLETION
    if record.id:
        operation = OPERATIONS.get(record.id.partition("-")[0], COMPLETION)
    prefill, decode = record.prefill_seconds, record.decode_seconds
    inference = None if prefill is None or decode is None else round(prefill + decode, DIGITS)
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": record.dialect,
        "gen_ai.request.model": record.adapter or record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": () if record.reason in FAILED else (record.reason,),
        "gen_ai.response.id": record.id,
        "gen_ai.request.id": record.id,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.latency.time_to_first_token": record.ttft_seconds,
        "gen_ai.latency.e2e": record.e2e_seconds,
        "gen_ai.latency.time_in_queue": record.queue_seconds,
        "gen_ai.latency.time_in_model_prefill": prefill,
        "gen_ai.latency.time_in_model_decode": decode,
        "gen_ai.latency.time_in_model_inference": inference,
        "error.type": error_type(record),
        "sidestep.request.key": record.key,
        "sidestep.engine": record.engine,
        "sidestep.tenant": record.tenant,
        "sidestep.role": record.role,
        "sidestep.transfer": record.transfer,
        "sidestep.join_key": record.join_key,
        "sidestep.inter_token_latency.max": record.max_itl_seconds,
        "sidestep.priority": record.priority or None,
        "sidestep.sample": record.sample or None,
        "sidestep.preemptions": record.preemptions or None,
        "sidestep.preempted_time": record.preempted_seconds or None,
        **{f"sidestep.objective.{name}": is_met for name, is_met in record.objectives.items()},
        **{f"sidestep.part.{name}": seconds for name, seconds in record.parts.items()},
    }
