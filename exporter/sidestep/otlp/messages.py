"""The messages of OTLP, from the package opentelemetry-proto."""

from __future__ import annotations

from sidestep.errors import ConfigError

try:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceResponse,
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
    from opentelemetry.proto.common.v1.common_pb2 import (
        AnyValue,
        ArrayValue,
        InstrumentationScope,
        KeyValue,
    )
    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber
    from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
except ImportError as error:
    raise ConfigError(
        "--otlp.* needs opentelemetry-proto: pip install '.[otlp]' in a clone of sidestep's"
        f" repository ({error})"
    ) from None

__all__ = [
    "AggregationTemporality",
    "AnyValue",
    "ArrayValue",
    "DecodeError",
    "ExportLogsServiceResponse",
    "ExportMetricsServiceResponse",
    "ExportTraceServiceResponse",
    "InstrumentationScope",
    "KeyValue",
    "LogRecord",
    "Metric",
    "Resource",
    "SeverityNumber",
    "Span",
    "Status",
]
