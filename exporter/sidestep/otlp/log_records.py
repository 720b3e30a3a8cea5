"""Log records of requests that have ended: the lines that ``--requests.log`` writes, with attributes."""

from __future__ import annotations

from collections.abc import Mapping

from sidestep.exposition.proto_format import sized
from sidestep.otlp.attributes import LOG_RECORD, encoded
from sidestep.otlp.envelope import Piece
from sidestep.otlp.messages import AnyValue, LogRecord, SeverityNumber
from sidestep.otlp.spans import SAMPLED, error_type, ids
from sidestep.otlp.timeline import MAX_NANOS, nanos
from sidestep.requests.record import RequestRecord

SERVED = "INFO"
SEVERITIES: Mapping[str, str] = {
    "abort": "WARN",
    "refused": "WARN",
    "error": "ERROR",
    "engine_died": "ERROR",
    "expired": "ERROR",
}
"""Severity by reason, where a request was not served."""
NUMBERS: Mapping[str, SeverityNumber.ValueType] = {
    "INFO": SeverityNumber.SEVERITY_NUMBER_INFO,
    "WARN": SeverityNumber.SEVERITY_NUMBER_WARN,
    "ERROR": SeverityNumber.SEVERITY_NUMBER_ERROR,
}


def log_record(record: RequestRecord, line: bytes) -> Piece:
    """Encode the log record of a request.

    Args:
        record: The request.
        line: Its line of JSON, which is the body.
    """
    own = ids(record)
    severity = SEVERITIES.get(record.reason, SERVED)
    end = min(nanos(record.time), MAX_NANOS)
    found = LogRecord(
        time_unix_nano=end,
        observed_time_unix_nano=end,
        severity_number=NUMBERS[severity],
        severity_text=severity,
        body=AnyValue(string_value=line.decode().rstrip("\n")),
        flags=record.trace_flags if own.parent else SAMPLED,
        trace_id=own.trace,
        span_id=own.span,
    )
    attributes = encoded(
        LOG_RECORD,
        (
            ("sidestep.request.key", record.key),
            ("sidestep.request.reason", record.reason),
            ("sidestep.engine", record.engine),
            ("sidestep.tenant", record.tenant),
            ("gen_ai.provider.name", record.dialect),
            ("gen_ai.request.model", record.adapter or record.model),
            ("gen_ai.response.id", record.id),
            ("error.type", error_type(record)),
        ),
    )
    return Piece(1, sized(b"\x12", found.SerializeToString() + attributes))
