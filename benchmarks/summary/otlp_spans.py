"""Records of requests and their spans: making, queueing, encoding and compressing, against OpenTelemetry's own encoder.

The peer gets the values of the records; it makes the SDK's objects of them, encodes and compresses
those. The spans of both are parsed and compared.
"""

from __future__ import annotations

import gzip
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.summary.pages import milliseconds
from benchmarks.summary.rows import Figure, Row, Topic
from sidestep import __version__
from sidestep.catalog.slo import Objectives
from sidestep.engines.dialects import DIALECTS
from sidestep.exposition import renders
from sidestep.metrics.registry import Registry
from sidestep.otlp.envelope import Envelope
from sidestep.otlp.log_records import log_record
from sidestep.otlp.record_sender import Encode
from sidestep.otlp.spans import error_type, ids, spans
from sidestep.otlp.timeline import timeline
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.request_events import Identity
from sidestep.requests.record import RequestRecord, make_record
from sidestep.requests.record_queue import RecordQueue
from sidestep.requests.request_log import RequestLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.requests.inflight import Request
from sidestep.tracking.requests.outcomes import EndedRequest

try:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode
except ImportError:
    ABSENT = "absent: opentelemetry-sdk and opentelemetry-exporter-otlp-proto-common"
else:
    ABSENT = ""

REQUESTS = 2000
WALL = 1_700_000_000.0
PEER = "OpenTelemetry SDK's encoder"
RECORD = "a record, made and queued"
SPANS = "the four spans of a request"
LOG = "the log record of a request"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return microseconds of CPU a request, medians."""
    registry = Registry(DIALECTS.layouts(), {}, objectives=Objectives())
    engine = registry.register(EngineInfo("pod/m/0", "vllm", {"engine": "0", "model_name": "m"}))
    ended = [_ended(number) for number in range(REQUESTS)]
    records = [make_record(engine, one, WALL) for one in ended]
    lines = [msgspec.json.encode(record) for record in records]
    spent: dict[str, list[float]] = {}

    def add(row: str, took: float) -> None:
        spent.setdefault(row, []).append(took * 1000 / REQUESTS)

    for _ in range(5 if quick else 15):
        metrics = SelfMetrics()
        log = RequestLog([RecordQueue("traces", "", metrics)], metrics)
        add(RECORD, milliseconds(lambda log=log: [log.add(engine, one) for one in ended]))  # type: ignore[misc]
        add(SPANS, milliseconds(partial(_ours, lines, spans)))
        add(LOG, milliseconds(partial(_ours, lines, log_record)))
        if not ABSENT:
            add(PEER, milliseconds(partial(_peer, records)))
    if not ABSENT:
        _compare(_ours(lines, spans), _peer(records))
    middle = {name: statistics.median(times) for name, times in spent.items()}
    return {
        RECORD: Figure(middle[RECORD]),
        SPANS: Figure(middle[SPANS], middle.get(PEER), ABSENT),
        LOG: Figure(middle[LOG]),
    }


def _ended(number: int) -> EndedRequest:
    """Return a request that a client of a traced service has sent."""
    trace = f"00-{number + 1:032x}-{number + 1:016x}-01"
    identity = Identity(f"chatcmpl-acme-{number}", trace=trace)
    stamp = number * 0.01
    request = Request(
        stamp,
        arrival=WALL + stamp - 0.005,
        cached=768,
        prompt_tokens=913,
        tokens=251,
        queued=stamp,
        scheduled=stamp + 0.004,
        first=stamp + 0.065,
        last=stamp + 2.095,
        identity=identity,
        ttft=0.07,
        longest_gap=0.041,
    )
    end = stamp + 2.098
    return EndedRequest(number, 1 << 40, request, "stop", end, WALL + end, 913, 251, 0, 512)


def _ours(lines: Sequence[bytes], encode: Encode) -> bytes:
    """Return the compressed body, from the lines of a queue."""
    decoder = msgspec.json.Decoder(RequestRecord)
    pieces = [encode(decoder.decode(line), line) for line in lines]
    requests = Envelope({}).requests(pieces)
    return b"".join(part for each in requests for part in renders.compress(each.parts))


def _peer(records: Sequence[RequestRecord]) -> bytes:
    """Return the compressed body that the SDK's encoder makes."""
    resource, scope = Resource({}), InstrumentationScope("sidestep", __version__)
    found = []
    for record in records:
        own, times = ids(record), timeline(record)
        trace = int.from_bytes(own.trace, "big")
        flags = TraceFlags(1)
        parent = SpanContext(trace, int.from_bytes(own.parent, "big"), True, flags)
        number = int.from_bytes(own.span, "big")
        context = SpanContext(trace, number, False, flags)
        status = Status(StatusCode.ERROR, error_type(record)) if error_type(record) else Status()
        request = ReadableSpan(
            "llm_request",
            context,
            parent,
            resource,
            _attributes(record),
            kind=SpanKind.SERVER,
            status=status,
            start_time=times.start,
            end_time=times.end,
            instrumentation_scope=scope,
        )
        found.append(request)
        found += [
            ReadableSpan(
                phase.name,
                SpanContext(trace, number ^ place, False, flags),
                context,
                resource,
                kind=SpanKind.INTERNAL,
                start_time=phase.start,
                end_time=phase.end,
                instrumentation_scope=scope,
            )
            for place, phase in enumerate(times.phases, 1)
        ]
    return b"".join(renders.compress([encode_spans(found).SerializeToString()]))


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of a served request."""
    prefill, decode = record.prefill_seconds or 0.0, record.decode_seconds or 0.0
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": record.dialect,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "sidestep.engine": record.engine,
        "gen_ai.response.finish_reasons": (record.reason,),
        "sidestep.request.key": record.key,
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
        "gen_ai.latency.time_in_model_inference": round(prefill + decode, 6),
        "sidestep.inter_token_latency.max": record.max_itl_seconds,
    }


def _compare(ours: bytes, theirs: bytes) -> None:
    """Exit unless both have the same spans: four of each request."""
    mine, other = _spans(ours), _spans(theirs)
    if len(mine) != 4 * REQUESTS or mine != other:
        differing = [pair for pair in zip(mine, other, strict=False) if pair[0] != pair[1]]
        raise SystemExit(f"{len(mine)} and {len(other)} spans, differing as {differing[:1]}")


def _spans(body: bytes) -> list[Any]:
    """Return the spans, with flags as the SDK sends them."""
    request = ExportTraceServiceRequest.FromString(gzip.decompress(body))
    (scope,) = request.resource_spans[0].scope_spans
    for span in scope.spans:
        span.flags &= ~0xFF
        span.ClearField("status")
    return [*scope.spans]


OTLP_SPANS = Topic(
    "Records and spans of requests",
    (
        Row(RECORD, "us", limit=15),
        Row(SPANS, "us", PEER, limit=60),
        Row(LOG, "us"),
    ),
    measure,
)
