"""The messages of OTLP, from the package opentelemetry-proto."""

from __future__ import annotations

from sidestep.errors import ConfigError

try:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceResponse,
    )
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
    from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource
except ImportError as error:
    raise ConfigError(
        f"--otlp.endpoint needs opentelemetry-proto: pip install 'sidestep[otlp]' ({error})"
    ) from None

__all__ = [
    "AggregationTemporality",
    "AnyValue",
    "DecodeError",
    "ExportMetricsServiceResponse",
    "InstrumentationScope",
    "KeyValue",
    "Metric",
    "Resource",
]
