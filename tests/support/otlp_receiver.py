"""A receiver of OTLP over HTTP, whose answers a test can replace."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import Any

from aiohttp import web
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from prometheus_client.utils import floatToGoString

from pages import parse

Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
KIND = "application/x-protobuf"


class Receiver:
    """What arrived, decoded by the official messages.

    Attributes:
        answer: Answers the next requests; None: accept them.
        requests: Accepted requests with metrics.
        spans: Accepted spans, in the order of their arrival.
        log_records: Accepted log records.
        headers: Headers of all requests.
        in_flight: Requests that are not answered yet.
        most_in_flight: Most of them at a time.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.answer: Answer | None = None
        self.requests: list[ExportMetricsServiceRequest] = []
        self.spans: list[Span] = []
        self.log_records: list[LogRecord] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.most_in_flight = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        try:
            body = await request.read()
            if self.answer is not None:
                return await self.answer(request)
            self.take(request.path, body)
            return accepted()
        finally:
            self.in_flight -= 1

    def take(self, path: str, body: bytes) -> None:
        """Keep what a request has."""
        if path.endswith("/traces"):
            for spans in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.spans += [span for scope in spans.scope_spans for span in scope.spans]
        elif path.endswith("/logs"):
            for logs in ExportLogsServiceRequest.FromString(body).resource_logs:
                self.log_records += [one for scope in logs.scope_logs for one in scope.log_records]
        else:
            self.requests.append(ExportMetricsServiceRequest.FromString(body))

    @property
    def resource(self) -> dict[str, str]:
        """Resource attributes of the last request."""
        return attributes(self.requests[-1].resource_metrics[0].resource.attributes)

    @property
    def samples(self) -> Samples:
        """All points that arrived as samples of a page; the last of each series."""
        return {
            key: value
            for request in self.requests
            for metric in metrics_of(request)
            for key, value in samples_of(metric)
        }


def encoded_spans(found: Sequence[ReadableSpan]) -> list[Span]:
    """Return spans as a receiver has them."""
    kept = Receiver("")
    kept.take("/v1/traces", encode_spans(found).SerializeToString())
    return kept.spans


def accepted(rejected: int = 0, reason: str = "") -> web.Response:
    """Return a successful answer, with a partial success if parts are rejected.

    The answers of all signals have the same form.
    """
    answer = ExportMetricsServiceResponse()
    if rejected or reason:
        answer.partial_success.rejected_data_points = rejected
        answer.partial_success.error_message = reason
    for other in (ExportTraceServiceResponse, ExportLogsServiceResponse):
        assert other.FromString(answer.SerializeToString()).partial_success.error_message == reason
    return web.Response(body=answer.SerializeToString(), content_type=KIND)


@asynccontextmanager
async def receiver(path: str = "/v1/{signal}") -> AsyncIterator[Receiver]:
    """Run a receiver at ``path``."""
    app = web.Application(client_max_size=1 << 26)
    # A handler ends with its connection, so that hanging ones are those in flight.
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    found = Receiver("")
    app.add_routes([web.post(path, found.handle)])
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield found
    finally:
        await runner.cleanup()


async def hang(_: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


def metrics_of(request: ExportMetricsServiceRequest) -> Iterator[Metric]:
    """Yield all metrics of a request."""
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            yield from scope.metrics


def points_of(metric: Metric) -> Iterable[Any]:
    """Return the points of a metric of any kind."""
    points: Iterable[Any] = getattr(metric, metric.WhichOneof("data") or "").data_points
    return points


def attributes(found: Iterable[KeyValue]) -> dict[str, str]:
    """Return attributes as a dictionary."""
    return {one.key: one.value.string_value for one in found}


def values(found: Iterable[KeyValue]) -> dict[str, Any]:
    """Return attributes as a dictionary, with values of any kind."""
    return {one.key: _value(one.value) for one in found}


def _value(found: AnyValue) -> Any:
    kind = found.WhichOneof("value") or ""
    if kind == "array_value":
        return [_value(one) for one in found.array_value.values]
    return getattr(found, kind)


def samples_of(metric: Metric) -> Iterator[tuple[tuple[str, Labels], float]]:
    """Yield the points of a metric as the samples that a page has for them."""
    form = metric.WhichOneof("data")
    for point in points_of(metric):
        labels = attributes(point.attributes)
        if form in ("sum", "gauge"):
            yield _key(metric.name, labels), point.as_double
            continue
        yield _key(f"{metric.name}_count", labels), point.count
        yield _key(f"{metric.name}_sum", labels), point.sum
        if form == "histogram" and point.explicit_bounds:
            bounds = [*point.explicit_bounds, float("inf")]
            counts = accumulate(point.bucket_counts)
            for bound, count in zip(bounds, counts, strict=True):
                le = {**labels, "le": as_text(bound)}
                yield _key(f"{metric.name}_bucket", le), count


def page_samples(page: str) -> Samples:
    """Return all samples of a page, without labels that are empty."""
    # The parser would add _total to the names of counters.
    page = re.sub(r"(?m)^(# TYPE .*) counter$", r"\1 untyped", page)
    return {
        (name, tuple(pair for pair in labels if pair[1])): value
        for family in parse(page).values()
        for (name, labels), value in family.samples.items()
    }


def _key(name: str, labels: dict[str, str]) -> tuple[str, Labels]:
    return name, tuple(sorted(labels.items()))


def as_text(value: float) -> str:
    """Return a bound or a quantile as a page has it."""
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
