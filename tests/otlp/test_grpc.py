"""OTLP over gRPC, as OTEL_EXPORTER_OTLP_PROTOCOL says: all signals, an outage, and a bounded shutdown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

import replays
from exporters import Start, until
from otlp_receiver import Receiver
from ports import free_port
from sidestep.app.exporter import Exporter
from sidestep.otlp import metric_sender
from sidestep.requests import record_output

PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


class Servicer:
    """The services of all signals.

    Attributes:
        metadata: Metadata of the last call.
        status: Status of all calls.
        hangs: Whether calls are not answered.
    """

    def __init__(self, kept: Receiver) -> None:
        self._kept = kept
        self.metadata: dict[str, str | bytes] = {}
        self.status = grpc.StatusCode.OK
        self.hangs = False

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Answer a call."""
        self.metadata = dict(context.invocation_metadata())
        while self.hangs and context.is_active():
            time.sleep(0.01)
        if self.status is not grpc.StatusCode.OK:
            context.abort(self.status, "not now")
        kind = type(request).__name__
        path = next(
            f"/v1/{each}" for each in ("metrics", "traces", "logs") if each[:4] in kind.lower()
        )
        self._kept.take(path, request.SerializeToString())
        return {
            "/v1/metrics": metrics_service_pb2.ExportMetricsServiceResponse,
            "/v1/traces": trace_service_pb2.ExportTraceServiceResponse,
            "/v1/logs": logs_service_pb2.ExportLogsServiceResponse,
        }[path]()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Receiver, Servicer]]:
    """Run a receiver over gRPC."""
    port = free_port()
    found = Receiver(f"http://127.0.0.1:{port}")
    servicer: Any = Servicer(found)
    server = grpc.server(ThreadPoolExecutor(4))
    add: Any
    for add in (
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server,
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server,
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server,
    ):
        add(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield found, servicer
    finally:
        servicer.hangs = False
        await asyncio.to_thread(server.stop(0).wait)


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose gRPC, and let the SDK's exporters give up soon."""
    monkeypatch.setenv(PROTOCOL, "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.7")
    monkeypatch.setattr(record_output, "RETRY_SECONDS", 0.05)


async def replay(exporter: Exporter) -> float:
    """Replay a recorded run; return how many requests have ended."""
    await replays.replay(exporter, "core_aborts")
    return exporter.metrics.value("sidestep_request_records_total")


async def test_all_signals_arrive(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """With headers, after an outage, and counted."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    async with serving() as (found, servicer):
        servicer.status = grpc.StatusCode.UNAVAILABLE
        flags = dict.fromkeys(
            ("otlp_endpoint", "otlp_traces_endpoint", "otlp_logs_endpoint"), found.url
        )
        async with start(**flags, otlp_interval="1") as exporter:
            made = await replay(exporter)
            value = exporter.metrics.value
            requests = "sidestep_otlp_requests_total"

            def failed() -> bool:
                signals = ("metrics", "traces", "logs")
                return all(value(requests, signal, "failure") for signal in signals)

            await until(failed)
            assert made > 50
            assert value("sidestep_request_records_lost_total", "full", "traces") == 0
            servicer.status = grpc.StatusCode.OK
            await until(lambda: len(found.log_records) == made)
            await until(lambda: sum(s.name == "llm_request" for s in found.spans) == made)
            await until(lambda: value(requests, "metrics", "success") > 0)
            assert value("sidestep_otlp_log_records_total") == made
        assert "vllm:generation_tokens_total" in {name for name, _ in found.samples}
        assert servicer.metadata["authorization"] == "Bearer x"


async def test_a_shutdown_is_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever time a call may take."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100")
    monkeypatch.setattr(metric_sender, "FINISH_SECONDS", 0.2)
    monkeypatch.setattr(record_output, "CLOSE_SECONDS", 0.2)
    async with serving() as (found, servicer):
        servicer.hangs = True
        flags = dict.fromkeys(("otlp_endpoint", "otlp_logs_endpoint"), found.url)
        async with start(**flags, otlp_interval="1") as exporter:
            await replay(exporter)
            await until(lambda: bool(servicer.metadata))
        assert found.requests == []
