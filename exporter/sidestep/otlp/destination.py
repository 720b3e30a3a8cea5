"""A receiver of OTLP, to which an exporter of the OpenTelemetry SDK sends: answers are counted and logged."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import requests
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from requests.adapters import HTTPAdapter

from sidestep.config.scrape_targets import without_secrets
from sidestep.errors import ConfigError
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics

log = logging.getLogger(__name__)
# Its lines contain the URL, whose query may be a secret. Those of gRPC alone say why a call failed.
logging.getLogger("opentelemetry.exporter.otlp.proto.http").setLevel(logging.CRITICAL + 1)

HTTP = "http/protobuf"
PACKAGES = {HTTP: "http", "grpc": "grpc"}
"""Subpackages of the SDK's exporters by OTEL_EXPORTER_OTLP_PROTOCOL."""
REPEATED = (408, 429, 502, 503, 504)
"""Statuses after which the same data may be accepted later: OTLP's specification, and 408."""
SUCCESS = 2
"""First digit of statuses."""
MAX_REASON_CHARS = 200
Outcome = Literal["accepted", "refused", "failed"]
"""Result of a request: a receiver that refused data would do so again, one that failed may be back."""


class Result(NamedTuple):
    """The result of an export; ``rejected`` is the number of parts that will not be sent again."""

    outcome: Outcome
    status: str
    reason: object = ""
    rejected: int = 0


class Signal(NamedTuple):
    """A kind of data that is sent.

    Attributes:
        name: Name of the signal, for metrics and OpenTelemetry's variables.
        flag: Flag with the URL of the receiver.
        exporter: Module and class of the SDK's exporter.
    """

    name: str
    flag: str
    parts: str
    exporter: tuple[str, str]


METRICS = Signal("metrics", "--otlp.endpoint", "points", ("metric_exporter", "OTLPMetricExporter"))
TRACES = Signal("traces", "--otlp.traces-endpoint", "spans", ("trace_exporter", "OTLPSpanExporter"))
LOGS = Signal("logs", "--otlp.logs-endpoint", "log_records", ("_log_exporter", "OTLPLogExporter"))


class _Transport(HTTPAdapter):
    """The HTTP requests of one exporter, which itself returns only whether it succeeded.

    Attributes:
        outcome: The last answer or error; None: there was no request.
    """

    outcome: requests.Response | requests.RequestException | None = None

    def send(self, *arguments: Any, **options: Any) -> requests.Response:
        try:
            self.outcome = super().send(*arguments, **options)
        except requests.RequestException as error:
            self.outcome = error
            raise
        return self.outcome


class Destination:
    """The receiver of one signal. Its methods block, and one thread at a time calls them."""

    def __init__(
        self,
        signal: Signal,
        url: str,
        metrics: SelfMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signal = signal
        self._shown = f"{signal.flag}: {without_secrets(url)}"
        self._metrics = metrics
        self._log = RateLimitedLog(log, clock=clock)
        self._is_accepting = False
        self._transport: _Transport | None = None
        options: dict[str, Any] = {}
        protocol = _protocol(signal)
        if protocol == HTTP:
            self._transport = _Transport()
            options["session"] = session = requests.Session()
            # A redirected POST becomes a GET, whose success would be taken for that of the POST.
            session.max_redirects = 0
            session.mount("http://", self._transport)
            session.mount("https://", self._transport)
        module, exporter = signal.exporter
        package = f"opentelemetry.exporter.otlp.proto.{PACKAGES[protocol]}"
        found = getattr(importlib.import_module(f"{package}.{module}"), exporter)
        try:
            self._exporter = found(endpoint=url, **options)
        except Exception as error:  # noqa: BLE001 - of whichever variable it is
            raise ConfigError(f"{self._shown}: {_line(error)}") from None

    def export(self, data: Any, parts: int) -> Outcome:
        """Send data, which the SDK tries again; count and log the result."""
        is_success = False
        if self._transport is not None:
            self._transport.outcome = None
        with contextlib.suppress(Exception):  # whatever it raises, the transport has the reason
            is_success = self._exporter.export(data).name == "SUCCESS"
        if self._transport is not None:
            result = _of_http(self._transport.outcome, parts)
        elif is_success:
            result = Result("accepted", "success")
        else:
            result = Result("failed", "failure", "gRPC; the line of its exporter has the reason")
        self._report(result, parts)
        return result.outcome

    def timed_out(self, seconds: float) -> None:
        """Count and log that data was not sent within ``seconds`` of the shutdown."""
        why = f"no answer within {seconds:g} s of the shutdown"
        self._report(Result("failed", "timeout", why), 0)

    def close(self) -> None:
        """Close the connection; end a repetition in progress."""
        self._exporter.shutdown()

    def _report(self, result: Result, parts: int) -> None:
        signal, add = self._signal, self._metrics.add
        add("sidestep_otlp_requests_total", 1, signal.name, result.status)
        add(f"sidestep_otlp_rejected_{signal.parts}_total", result.rejected)
        shown = signal.parts.replace("_", " ")
        is_accepting = result.outcome == "accepted" and not result.reason
        if result.outcome == "accepted":
            add(f"sidestep_otlp_{signal.parts}_total", parts - result.rejected)
        if is_accepting and not self._is_accepting:
            self._log.info("accepted", "%s accepts %s", self._shown, shown)
        elif not is_accepting:
            count = f"{result.rejected} {shown}" if result.outcome == "accepted" else shown
            self._log.warning(
                result.status,
                "%s does not accept %s: %s: %s",
                self._shown,
                count,
                result.status,
                _line(result.reason),
            )
        self._is_accepting = is_accepting


def _of_http(answer: requests.Response | requests.RequestException | None, parts: int) -> Result:
    """Return the result of a request with as many ``parts``."""
    if isinstance(answer, requests.Response):
        status = answer.status_code
        text = _content(answer).decode(errors="replace") or answer.reason
        if status // 100 == SUCCESS:
            return _accepted(answer, parts)
        if status in REPEATED:
            return Result("failed", str(status), text)
        return Result("refused", str(status), text, parts)
    if answer is None:
        return Result("refused", "unsent", "the request cannot be made", parts)
    if isinstance(answer, requests.Timeout):
        return Result("failed", "timeout", "no answer in time")
    # The text of the error itself has the URL.
    cause = answer.args[0] if answer.args else answer
    return Result("failed", "connection", getattr(cause, "reason", cause))


def _content(answer: requests.Response) -> bytes:
    """Return the body of an answer; none if it broke off."""
    try:
        return answer.content
    except (requests.RequestException, RuntimeError):
        return b""


def _accepted(answer: requests.Response, parts: int) -> Result:
    """Return the result of a success, which may be partial; the answers of all signals have one form."""
    status = str(answer.status_code)
    try:
        partial = ExportTraceServiceResponse.FromString(_content(answer)).partial_success
    except DecodeError:
        return Result("accepted", status)
    rejected = min(max(partial.rejected_spans, 0), parts)
    return Result(
        "accepted", status, partial.error_message or ("rejected" if rejected else ""), rejected
    )


def _protocol(signal: Signal) -> str:
    """Return the protocol that OpenTelemetry's variables say."""
    for name in (
        f"OTEL_EXPORTER_OTLP_{signal.name.upper()}_PROTOCOL",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
    ):
        found = os.environ.get(name)
        if found and found not in PACKAGES:
            raise ConfigError(f"{name} {found!r}: must be one of {', '.join(PACKAGES)}")
        if found:
            return found
    return HTTP


def _line(text: object) -> str:
    printable = "".join(each if each.isprintable() else " " for each in str(text) or repr(text))
    return " ".join(printable.split())[:MAX_REASON_CHARS]
