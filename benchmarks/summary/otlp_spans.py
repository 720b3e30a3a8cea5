"""Records of requests and their spans: the cost of making and queueing them, and of the SDK's encoding and compression."""

from __future__ import annotations

import gzip
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from benchmarks.summary.pages import milliseconds
from benchmarks.summary.rows import Figure, Row, Topic
from sidestep.engines.dialects import DIALECTS
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.request_events import Identity
from sidestep.requests.record import RequestRecord, make_record
from sidestep.requests.record_output import RecordOutput
from sidestep.requests.request_log import RequestLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.requests.inflight import Request
from sidestep.tracking.requests.outcomes import EndedRequest

try:
    from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    from sidestep.otlp.resource import Resource
    from sidestep.otlp.senders import Convert
    from sidestep.otlp.spans import log_records, spans
except ImportError:
    ABSENT = "absent: the extra otlp"
else:
    ABSENT = ""

REQUESTS = 2000
WALL = 1_700_000_000.0
RECORD = "a record, made and queued"
SPANS = "the four spans of a request"
LOG = "the log record of a request"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return microseconds of CPU a request, medians."""
    registry = Registry(DIALECTS.layouts())
    engine = registry.register(EngineInfo("pod/m/0", "vllm", {"engine": "0", "model_name": "m"}))
    ended = [_ended(number) for number in range(REQUESTS)]
    records = [make_record(engine, one, WALL) for one in ended]
    lines = [msgspec.json.encode(record) for record in records]
    spent: dict[str, list[float]] = {}

    def add(row: str, took: float) -> None:
        spent.setdefault(row, []).append(took * 1000 / REQUESTS)

    for _ in range(5 if quick else 15):
        metrics = SelfMetrics()
        log = RequestLog([RecordOutput("traces", "", metrics)], metrics)
        add(RECORD, milliseconds(lambda log=log: [log.add(engine, one) for one in ended]))  # type: ignore[misc]
        if not ABSENT:
            add(SPANS, milliseconds(partial(_spans, lines)))
            add(LOG, milliseconds(partial(_log_records, lines)))
    middle = {name: Figure(statistics.median(times)) for name, times in spent.items()}
    absent = Figure(None, None, ABSENT)
    return {row: middle.get(row, absent) for row in (RECORD, SPANS, LOG)}


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


def _batch(lines: Sequence[bytes], convert: Convert) -> list[Any]:
    """Return what the SDK's encoder takes, from the lines of a queue."""
    decode = msgspec.json.Decoder(RequestRecord).decode
    resource = Resource({})
    return [part for line in lines for part in convert(decode(line), line, resource)]


def _spans(lines: Sequence[bytes]) -> bytes:
    """Return the compressed body with the spans of all records."""
    found = _batch(lines, spans)
    if len(found) != 4 * REQUESTS:
        raise SystemExit(f"{len(found)} spans")
    return gzip.compress(encode_spans(found).SerializeToString())


def _log_records(lines: Sequence[bytes]) -> bytes:
    """Return the compressed body with the log records of all records."""
    return gzip.compress(encode_logs(_batch(lines, log_records)).SerializeToString())


OTLP_SPANS = Topic(
    "Records and spans of requests",
    (
        Row(RECORD, "us", limit=15),
        Row(SPANS, "us"),
        Row(LOG, "us"),
    ),
    measure,
)
