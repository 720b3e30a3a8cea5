"""Spans and log records of requests: what they say is what the record says."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from otlp_receiver import Receiver, encoded_spans, values
from records_of import made_record, recorded
from schedulers import WALL, Scheduler, actions
from sidestep.otlp.resource import Resource
from sidestep.otlp.spans import log_records, spans
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.request_events import (
    Finished,
    Identity,
    Iteration,
    Output,
    Preempted,
    Prompt,
    Queued,
    Scheduled,
)
from sidestep.requests.record import RequestRecord, trace_context
from sidestep.tracking.requests.outcomes import FAILED

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
NANO = 1e-9
TIMES = ("queued", "scheduled", "first", "last", "arrival", "ttft")
RESOURCE = Resource({"service.name": "s"})


def spans_of(record: RequestRecord) -> list[Span]:
    """Return the spans of a record that went through a queue."""
    line = msgspec.json.encode(record)
    return encoded_spans(spans(msgspec.json.decode(line, type=RequestRecord), line, RESOURCE))


def preempted_request(identity: Identity | None = None) -> list[Any]:
    """Return the events of a request that is preempted once while it decodes."""

    def step(stamp: float, **more: Any) -> Iteration:
        return Iteration(stamp - 0.01, stamp, WALL + stamp, [Output(stamp, [7])], **more)

    return [
        Queued(7, 1.25, WALL + 1.0, 512, adapter="a", identity=identity),
        Scheduled(7, 1.5),
        step(2.0, prompts=[Prompt(7, 256, 256, 0)]),
        Preempted(7, 2.5),
        Scheduled(7, 3.0),
        step(3.25),
        step(3.5),
        Finished(7, 3.5, WALL + 3.5, FINISH_REASONS.index("stop"), 512, 3, 1, 64),
    ]


def test_the_spans_of_a_request() -> None:
    """One of the server, and one for each phase and preemption, below the client's span."""
    (record,) = recorded(preempted_request(Identity("chatcmpl-1", trace=TRACEPARENT))).records
    request, *phases = spans_of(record)

    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert (request.name, request.kind, request.flags) == ("llm_request", 2, 0x300)
    assert request.status == Status(code=Status.STATUS_CODE_UNSET)
    begin = int(WALL) * 10**9
    ms = 10**6
    assert (request.start_time_unix_nano, request.end_time_unix_nano) == (
        begin + 1000 * ms,
        begin + 3500 * ms,
    )
    times = [(p.name, p.start_time_unix_nano - begin, p.end_time_unix_nano - begin) for p in phases]
    assert times == [
        ("queue", 1250 * ms, 1500 * ms),
        ("prefill", 1500 * ms, 2000 * ms),
        ("decode", 2000 * ms, 3500 * ms),
        ("preempted", 2500 * ms, 3000 * ms),
    ]
    assert {(p.trace_id, p.parent_span_id, p.kind, p.flags) for p in phases} == {
        (request.trace_id, request.span_id, 1, 0x100)
    }
    assert len({one.span_id for one in (request, *phases)}) == 5
    assert values(request.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "a",
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 512,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 256,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.e2e": 2.5,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 1.5,
        "gen_ai.latency.time_in_model_inference": 2.0,
        "sidestep.request.key": "e/1/7",
        "sidestep.engine": "0",
        "sidestep.role": "both",
        "sidestep.inter_token_latency.max": 1.25,
        "sidestep.preemptions": 1,
        "sidestep.preempted_time": 0.5,
        "sidestep.part.front_end_in": 0.25,
        "sidestep.part.queue.unknown": 0.25,
        "sidestep.part.prefill": 0.01,
        "sidestep.part.prefill_gap": 0.49,
        "sidestep.part.decode": 0.51,
        "sidestep.part.preempted": 0.5,
        "sidestep.part.recompute": 0.25,
        "sidestep.part.stalled": 0.24,
    }


@given(actions)
def test_any_requests(chosen: list[tuple[str, int, int]]) -> None:
    """Lengths are exactly the record's, phases follow each other, and failed ones are errors."""
    for record in recorded(Scheduler().run(chosen)).records:
        request, *phases = spans_of(record)
        lengths = {p.name: p.end_time_unix_nano - p.start_time_unix_nano for p in phases}
        whole = request.end_time_unix_nano - request.start_time_unix_nano
        assert record.e2e_seconds is not None
        assert whole == round(record.e2e_seconds / NANO)
        known = {
            "queue": record.queue_seconds,
            "prefill": record.prefill_seconds,
            "decode": record.decode_seconds,
        }
        for name, seconds in known.items():
            if seconds is not None:
                assert lengths[name] == round(seconds / NANO)
        chain = [phase for phase in phases if phase.name != "preempted"]
        assert all(a.end_time_unix_nano == b.start_time_unix_nano for a, b in pairwise(chain))
        paused = [phase for phase in phases if phase.name == "preempted"]
        assert len(paused) == min(record.preemptions, 8)
        assert all(request.span_id == phase.parent_span_id for phase in phases)
        assert (request.status.code == Status.STATUS_CODE_ERROR) is (record.reason in FAILED)
        end = request.end_time_unix_nano
        # A step ends before the time that the record has: within the clocks' resolution.
        assert all(phase.end_time_unix_nano <= end + 2_000_000 for phase in chain)
        assert request.parent_span_id == b""
        assert len(request.trace_id) == 16


def test_ids_follow_from_the_key() -> None:
    """A record that is sent twice is the same span; other requests have other ones."""
    (record,) = recorded(preempted_request()).records
    other = msgspec.structs.replace(record, key="e/1/8")

    assert spans_of(record) == spans_of(record)
    assert spans_of(record)[0].trace_id != spans_of(other)[0].trace_id
    one = spans_of(record)[0]
    (logged,) = logs_of(record)
    assert (one.trace_id, one.span_id) == (logged.trace_id, logged.span_id)


def test_a_trace_that_its_caller_does_not_record() -> None:
    """The request has no spans; the log record says so."""
    (record,) = recorded(preempted_request(Identity(trace=f"00-{TRACE}-{PARENT}-00"))).records

    assert spans_of(record) == []
    (logged,) = logs_of(record)
    assert (logged.flags, logged.trace_id.hex()) == (0, TRACE)


@pytest.mark.parametrize(
    "text",
    ["", "00", f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01",
     f"00-{TRACE.upper()}-{PARENT}-01", f"00-{TRACE}-{PARENT}", "00-x-y-01", f"00-{TRACE}\n-{PARENT}-01"],
)  # fmt: skip
def test_an_invalid_trace_context_is_none(text: str) -> None:
    """The request has a trace of its own."""
    assert trace_context(text) == ("", "", 0)
    (record,) = recorded(preempted_request(Identity(trace=text))).records
    assert spans_of(record)[0].parent_span_id == b""


def cut(count: int, *, reason: str = "abort") -> RequestRecord:
    """Return the record of a request that ends after its first ``count`` events."""
    events = preempted_request()[:count]
    end = Finished(7, 4.0, WALL + 4.0, FINISH_REASONS.index(reason), 512)
    (record,) = recorded([*events, end]).records
    return record


@given(
    st.fixed_dictionaries(dict.fromkeys(TIMES, st.none() | st.floats(0, 1e15))),
    st.none() | st.floats(0, 1e15),
    st.floats(0, 1e15),
    st.sampled_from(["stop", "abort", "refused", "engine_died"]),
)
def test_any_times(
    times: dict[str, float | None], wall: float | None, stamp: float, reason: str
) -> None:
    """Clocks that are wrong by any amount make valid spans."""
    record = made_record(times, wall=wall, stamp=stamp, reason=reason)
    for span in spans_of(record):
        assert 0 <= span.start_time_unix_nano <= span.end_time_unix_nano < 1 << 63
    assert logs_of(record)


def logs_of(record: RequestRecord) -> list[LogRecord]:
    """Return the log records of a record, from a whole request."""
    line = msgspec.json.encode(record)
    found = Receiver("")
    request = encode_logs(log_records(record, line + b"\n", RESOURCE))
    found.take("/v1/logs", request.SerializeToString())
    assert len(found.log_records) == 1
    assert json.loads(found.log_records[0].body.string_value) == json.loads(line)
    return found.log_records


@pytest.mark.parametrize(
    ("reason", "number", "text"),
    [("stop", 9, "INFO"), ("abort", 13, "WARN"), ("error", 17, "ERROR")],
)
def test_the_log_record_of_a_request(reason: str, number: int, text: str) -> None:
    """Its body is the line of the file; attributes are for queries."""
    record = msgspec.structs.replace(cut(3, reason=reason), tenant="acme", id="cmpl-3")
    (found,) = logs_of(record)

    assert (found.severity_number, found.severity_text) == (number, text)
    assert found.time_unix_nano == (int(WALL) + 4) * 10**9
    attributes = values(found.attributes)
    assert attributes.pop("error.type", "") == (reason if reason != "stop" else "")
    assert attributes == {
        "sidestep.request.key": "e/1/7",
        "sidestep.request.reason": reason,
        "sidestep.engine": "0",
        "sidestep.tenant": "acme",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "a",
        "gen_ai.response.id": "cmpl-3",
    }
