"""Log records of requests that have ended: the lines that ``--requests.log`` writes, with attributes."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.trace import NonRecordingSpan, set_span_in_context

from sidestep.otlp.resource import SCOPE, Resource
from sidestep.otlp.spans import contexts, error_type, present
from sidestep.requests.record import RequestRecord
from sidestep.requests.timeline import MAX_NANOS, nanos

SEVERITIES: Mapping[str, SeverityNumber] = {
    "abort": SeverityNumber.WARN,
    "refused": SeverityNumber.WARN,
    "error": SeverityNumber.ERROR,
    "engine_died": SeverityNumber.ERROR,
    "expired": SeverityNumber.ERROR,
}
"""Severity by reason, where a request was not served."""


def log_records(record: RequestRecord, line: bytes, resource: Resource) -> list[ReadableLogRecord]:
    """Return the log record of a request.

    Args:
        record: The request.
        line: Its line of JSON, which is the body.
        resource: Resource of the log record.
    """
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
