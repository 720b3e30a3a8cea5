"""Spans of requests that have ended, from their records."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

from sidestep.exposition.proto_format import sized
from sidestep.otlp.attributes import SPAN, encoded
from sidestep.otlp.envelope import Piece
from sidestep.otlp.messages import AnyValue, ArrayValue, KeyValue, Span, Status
from sidestep.otlp.timeline import timeline
from sidestep.requests.record import DIGITS, FAILED, RequestRecord

NAME = "llm_request"
"""Name of a request's span, which is vLLM's: conventions have none for the server's side."""
SAMPLED = 1
FLAGS, REMOTE_FLAGS = 0x100, 0x300
"""The parent is of this process, or of another one; trace flags are added."""
OPERATIONS: Mapping[str, str] = {"chatcmpl": "chat", "embd": "embeddings"}
"""Values of ``gen_ai.operation.name`` by the prefix of an OpenAI id."""
COMPLETION = "text_completion"
"""The operation where the id does not say: an engine completes a sequence of tokens."""


class Ids(NamedTuple):
    """Trace id and span id of a request, and its parent's; an empty parent is none."""

    trace: bytes
    span: bytes
    parent: bytes


def ids(record: RequestRecord) -> Ids:
    """Return the ids of a request.

    They follow from its trace context and its key, so that a record that is sent twice is the same span.
    """
    digest = blake2b(record.key.encode(), digest_size=24).digest()
    trace, parent = bytes.fromhex(record.trace_id), bytes.fromhex(record.parent_span_id)
    return Ids(trace or digest[:16], digest[16:], parent)


def spans(record: RequestRecord, _: bytes = b"") -> Piece:
    """Encode the spans of a request: its own, and one for each of its phases.

    A request whose caller does not record its trace has none.
    """
    own = ids(record)
    flags = record.trace_flags if own.parent else SAMPLED
    if not flags & SAMPLED:
        return Piece(0, b"")
    found = timeline(record)
    request = Span(
        trace_id=own.trace,
        span_id=own.span,
        parent_span_id=own.parent,
        flags=flags | (REMOTE_FLAGS if own.parent else FLAGS),
        name=NAME,
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=found.start,
        end_time_unix_nano=found.end,
    )
    if record.reason in FAILED:
        request.status.code = Status.STATUS_CODE_ERROR
        request.status.message = error_type(record)
    # The fields of a message may be encoded one after the other.
    parts = [sized(b"\x12", request.SerializeToString() + _shared(record) + _own(record))]
    number = int.from_bytes(own.span, "big")
    for place, (name, start, end) in enumerate(found.phases, 1):
        phase = Span(
            trace_id=own.trace,
            span_id=(number ^ place).to_bytes(8, "big"),
            parent_span_id=own.span,
            flags=flags | FLAGS,
            name=name,
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=start,
            end_time_unix_nano=end,
        )
        parts.append(sized(b"\x12", phase.SerializeToString()))
    return Piece(len(parts), b"".join(parts))


def error_type(record: RequestRecord) -> str:
    """Return why a request failed; empty if it was served."""
    return record.refused or record.reason if record.reason in FAILED else ""


def _shared(record: RequestRecord) -> bytes:
    """Return the attributes that many requests share, encoded once."""
    operation = COMPLETION
    if record.id:
        operation = OPERATIONS.get(record.id.partition("-")[0], COMPLETION)
    finish = "" if record.reason in FAILED else record.reason
    described = (
        ("gen_ai.operation.name", operation),
        ("gen_ai.provider.name", record.dialect),
        ("gen_ai.request.model", record.adapter or record.model),
        ("gen_ai.response.model", record.model),
        ("sidestep.engine", record.engine),
        ("error.type", error_type(record)),
    )
    return _encoded(described, finish)


@functools.lru_cache(1024)
def _encoded(described: tuple[tuple[str, str], ...], finish: str) -> bytes:
    """Encode attributes of a span, and the finish reason as a list of one."""
    found = encoded(SPAN, described)
    if finish:
        reasons = AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=finish)]))
        pair = KeyValue(key="gen_ai.response.finish_reasons", value=reasons)
        found += sized(SPAN, pair.SerializeToString())
    return found


def _own(record: RequestRecord) -> bytes:
    """Encode the attributes of a request's span that are not shared; unknown ones are left out."""
    prefill, decode = record.prefill_seconds, record.decode_seconds
    inference = None if prefill is None or decode is None else round(prefill + decode, DIGITS)
    objectives = record.objectives.items()
    return encoded(
        SPAN,
        (
            ("sidestep.request.key", record.key),
            ("gen_ai.response.id", record.id),
            ("gen_ai.request.id", record.id),
            ("gen_ai.request.max_tokens", record.max_tokens),
            ("gen_ai.usage.input_tokens", record.prompt_tokens),
            ("gen_ai.usage.output_tokens", record.output_tokens),
            ("gen_ai.usage.cache_read.input_tokens", record.cached_tokens),
            ("gen_ai.latency.time_to_first_token", record.ttft_seconds),
            ("gen_ai.latency.e2e", record.e2e_seconds),
            ("gen_ai.latency.time_in_queue", record.queue_seconds),
            ("gen_ai.latency.time_in_model_prefill", prefill),
            ("gen_ai.latency.time_in_model_decode", decode),
            ("gen_ai.latency.time_in_model_inference", inference),
            ("sidestep.inter_token_latency.max", record.max_itl_seconds),
            ("sidestep.tenant", record.tenant),
            ("sidestep.priority", record.priority or None),
            ("sidestep.sample", record.sample or None),
            ("sidestep.preemptions", record.preemptions or None),
            ("sidestep.preempted_time", record.preempted_seconds or None),
            *((f"sidestep.objective.{name}", is_met) for name, is_met in objectives),
        ),
    )
