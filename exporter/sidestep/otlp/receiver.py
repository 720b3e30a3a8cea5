"""A receiver of OTLP over HTTP: its requests, answers and failures, counted and logged."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import logging
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp

from sidestep import __version__
from sidestep.config.scrape_targets import without_secrets
from sidestep.exposition import renders
from sidestep.otlp.envelope import Request
from sidestep.otlp.messages import (
    DecodeError,
    ExportLogsServiceResponse,
    ExportMetricsServiceResponse,
    ExportTraceServiceResponse,
)
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.http_response import BoundedResponse

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
TIMEOUT = 10.0
"""Seconds for one request."""
MAX_PAUSE = 300.0
"""Most seconds of a ``Retry-After`` that are honoured."""
MAX_ANSWER_BYTES = 64 << 10
MAX_REASON_CHARS = 200
KIND = "application/x-protobuf"
SUCCESS, CLIENT_ERROR = 2, 4
"""First digits of statuses."""
REQUESTS = "sidestep_otlp_requests_total"


def is_repeated(status: int) -> bool:
    """Return whether the same spans could be accepted later: OTLP's specification, and 408."""
    return status in (0, 408, 429, 502, 503, 504)


def is_renewed(status: int) -> bool:
    """Return whether later totals could be accepted."""
    return status // 100 != CLIENT_ERROR or status in (408, 429)


@dataclasses.dataclass(frozen=True)
class Signal:
    """A kind of data that is sent.

    Attributes:
        flag: Flag with the URL of the receiver.
        name: Name of the signal, for metrics.
        parts: Name of its parts in log lines.
        accepted: Metric that counts accepted parts, ``rejected`` of those that are not.
        answer: Message of a successful answer.
        rejections: Its field with the number of rejected parts.
        is_retryable: Returns whether a later request could be accepted, by the status; 0 is none.
    """

    flag: str
    name: str
    parts: str
    accepted: str
    rejected: str
    answer: Any
    rejections: str
    is_retryable: Callable[[int], bool]


METRICS = Signal(
    "--otlp.endpoint",
    "metrics",
    "points",
    "sidestep_otlp_points_total",
    "sidestep_otlp_rejected_points_total",
    ExportMetricsServiceResponse,
    "rejected_data_points",
    is_renewed,
)
LOGS = Signal(
    "--otlp.logs-endpoint",
    "logs",
    "log records",
    "sidestep_otlp_log_records_total",
    "sidestep_otlp_rejected_log_records_total",
    ExportLogsServiceResponse,
    "rejected_log_records",
    is_repeated,
)
TRACES = Signal(
    "--otlp.traces-endpoint",
    "traces",
    "spans",
    "sidestep_otlp_spans_total",
    "sidestep_otlp_rejected_spans_total",
    ExportTraceServiceResponse,
    "rejected_spans",
    is_repeated,
)


class Answer(NamedTuple):
    """The answer to a request.

    Attributes:
        is_success: Whether the receiver accepted the request, or a part of it.
        is_retryable: Whether a later request could be accepted, where this one was not.
        pause: Seconds that the receiver asks for before it.
    """

    is_success: bool
    is_retryable: bool = True
    pause: float = 0.0


class Receiver:
    """The receiver of one signal.

    Args:
        signal: The signal.
        url: URL for it.
        headers: Headers of every request.
        metrics: Self-metrics.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        signal: Signal,
        url: str,
        headers: Mapping[str, str],
        metrics: SelfMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signal = signal
        self._url = url
        self._shown = f"{signal.flag}: {without_secrets(url)}"
        self._headers = headers
        self._metrics = metrics
        self._log = RateLimitedLog(log, clock=clock)
        self._session: aiohttp.ClientSession | None = None
        self._is_accepting = False

    async def post(self, request: Request) -> Answer:
        """Send one request; failures are counted and logged."""
        body = b"".join(await asyncio.to_thread(renders.compress, request.parts))
        if self._session is None:
            self._session = self._new_session()
        try:
            async with self._session.post(
                self._url,
                data=io.BytesIO(body),
                allow_redirects=False,
            ) as response:
                return self._answered(request, response, await _read(response.content))
        except aiohttp.ServerTimeoutError:
            self.failed("timeout", f"no connection within {CONNECT_SECONDS:g} s")
        except asyncio.TimeoutError:
            self.failed("timeout", f"no answer within {TIMEOUT:g} s")
        except aiohttp.ClientResponseError as error:
            # The error's own text includes the URL, whose query may be a secret.
            self.failed("connection", error.message)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # aiohttp's own text also mentions an SSL option that is not set.
            self.failed("connection", getattr(error, "os_error", error))
        return Answer(is_success=False)

    def accepted(self, *, wholly: bool) -> None:
        """Log that requests are accepted, if those before were not."""
        if wholly and not self._is_accepting:
            self._log.info("accepted", "%s accepts %s", self._shown, self._signal.name)
        self._is_accepting = wholly

    def failed(self, status: str, why: object) -> None:
        """Count and log a request without an answer."""
        self._metrics.add(REQUESTS, 1, self._signal.name, status)
        self._log.warning(status, "%s cannot be reached: %s", self._shown, _line(why))

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()

    def _new_session(self) -> aiohttp.ClientSession:
        headers = {
            "User-Agent": f"sidestep/{__version__}",
            **self._headers,
            "Content-Type": KIND,
            "Content-Encoding": "gzip",
            "Accept-Encoding": "identity",
        }
        return aiohttp.ClientSession(
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(limit=1),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT, connect=CONNECT_SECONDS),
            auto_decompress=False,
            response_class=BoundedResponse,
        )

    def _answered(
        self, request: Request, response: aiohttp.ClientResponse, content: bytes
    ) -> Answer:
        status, signal = response.status, self._signal
        self._metrics.add(REQUESTS, 1, signal.name, str(status))
        if status // 100 == SUCCESS:
            rejected = min(self._rejected(response, content), request.points)
            self._metrics.add(signal.accepted, request.points - rejected)
            self._metrics.add(signal.rejected, rejected)
            return Answer(is_success=True)
        reason = content.decode(errors="replace") or response.reason or "no reason given"
        self._log.warning(str(status), "%s answers %d: %s", self._shown, status, _line(reason))
        if signal.is_retryable(status):
            wanted = pause(response.headers.get("Retry-After", ""))
            return Answer(is_success=False, pause=wanted)
        self._metrics.add(signal.rejected, request.points)
        return Answer(is_success=False, is_retryable=False)

    def _rejected(self, response: aiohttp.ClientResponse, content: bytes) -> int:
        """Return how many parts a successful answer rejects."""
        signal = self._signal
        if response.content_type != KIND:
            return 0
        try:
            partial = signal.answer.FromString(content).partial_success
        except DecodeError:
            self._log.warning(
                "answer", "%s accepts %s with an unreadable answer", self._shown, signal.name
            )
            return 0
        rejected: int = getattr(partial, signal.rejections)
        if rejected > 0 or partial.error_message:
            self._log.warning(
                "partial",
                "%s rejects %d %s: %s",
                self._shown,
                rejected,
                signal.parts,
                _line(partial.error_message),
            )
        return max(rejected, 0)


async def _read(content: aiohttp.StreamReader) -> bytes:
    """Return the first bytes of an answer; the rest is not read."""
    found = bytearray()
    async for chunk in content.iter_any():
        found += chunk
        if len(found) >= MAX_ANSWER_BYTES:
            break
    return bytes(found[:MAX_ANSWER_BYTES])


def pause(text: str) -> float:
    """Return the seconds of a ``Retry-After``, which is a number or a date; 0 if it is neither."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return 0.0
    # NaN is no number of seconds either.
    return min(seconds, MAX_PAUSE) if seconds > 0 else 0.0


def _line(text: object) -> str:
    """Return ``text`` as one short line."""
    printable = "".join(each if each.isprintable() else " " for each in str(text) or repr(text))
    return " ".join(printable.split())[:MAX_REASON_CHARS]
