"""Push of the page's families to a receiver of OTLP, at an interval.

Totals are cumulative, so nothing is queued: what a failed push did not deliver is in the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from email.utils import parsedate_to_datetime
from typing import Protocol

import aiohttp

from sidestep import __version__
from sidestep.config.scrape_targets import without_secrets
from sidestep.exposition import compression
from sidestep.exposition.page_cache import Hold
from sidestep.otlp.encoder import Encoder, Request
from sidestep.otlp.messages import DecodeError, ExportMetricsServiceResponse
from sidestep.otlp.page_families import PageFamilies
from sidestep.telemetry.cooperative import collect_in_slices
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
TIMEOUT = 10.0
"""Seconds for one request."""
FINISH_SECONDS = 3.0
"""Seconds for the last push during shutdown."""
MAX_PAUSE = 300.0
"""Most seconds of a ``Retry-After`` that are honoured."""
MAX_ANSWER_BYTES = 64 << 10
MAX_REASON_CHARS = 200
KIND = "application/x-protobuf"
SUCCESS, CLIENT_ERROR = 2, 4
"""First digits of statuses."""
RETRYABLE = frozenset({408, 429})
"""Client errors after which the same data could be accepted."""


class Durable(Protocol):
    """Snapshots of what is sent."""

    async def settled(self) -> None:
        """Return once a snapshot holds all items applied before this call."""


class OtlpSender:
    """Pushes the families of the page to a receiver.

    Args:
        families: The families.
        encoder: Encoder of requests.
        metrics: Self-metrics.
        url: URL of the receiver for metrics.
        headers: Headers of every request.
        hold: Pauses all changes for a block, if given, so that a push is of one moment.
        snapshots: If given, a push is sent only once a snapshot holds what it contains, so that no
            counter that a receiver has seen decreases after a crash.
        clock: Monotonic seconds.
        wall: Nanoseconds since 1970.
    """

    def __init__(
        self,
        families: PageFamilies,
        encoder: Encoder,
        metrics: SelfMetrics,
        url: str,
        headers: Mapping[str, str],
        *,
        hold: Hold = contextlib.nullcontext,
        snapshots: Durable | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._families = families
        self._encoder = encoder
        self._metrics = metrics
        self._url = url
        self._shown = without_secrets(url)
        self._headers = headers
        self._hold = hold
        self._snapshots = snapshots
        self._clock = clock
        self._wall = wall
        self._log = RateLimitedLog(log, clock=clock)
        self._session: aiohttp.ClientSession | None = None
        self._stamp = 0
        self._resume_at = clock()
        self._is_accepted: bool | None = None
        """True if the last push was accepted; None before the first."""
        metrics.set("sidestep_otlp_last_success_timestamp_seconds", 0.0)

    async def run(self, interval: float) -> None:
        """Push every ``interval`` seconds until cancelled; one push runs at a time."""
        while True:
            started = self._clock()
            if started >= self._resume_at:
                await self.push()
            await asyncio.sleep(max(started + interval - self._clock(), 0.0))

    async def push(self) -> None:
        """Send the present state of all families; failures are counted and logged."""
        # Receivers refuse a whole request if the time of a series decreases.
        self._stamp = max(self._wall(), self._stamp + 1)
        async with self._hold():
            pieces = await collect_in_slices(self._encoder.pieces(self._families, self._stamp))
        requests = self._encoder.requests(piece for piece in pieces if piece is not None)
        if self._snapshots is not None:
            await self._snapshots.settled()
        await self._send(requests)

    async def finish(self) -> None:
        """Push a last time, unless the push before failed, and close the connection."""
        # Everything has been saved, and the snapshots' schedule has ended.
        self._snapshots = None
        try:
            if self._is_accepted is not False:
                await asyncio.wait_for(self.push(), FINISH_SECONDS)
        except asyncio.TimeoutError:
            self._failed("timeout", f"no answer within {FINISH_SECONDS:g} s of the shutdown")
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()

    async def _send(self, requests: Iterable[Request]) -> None:
        """Send ``requests`` until one fails in a way that the next one would, too."""
        accepted = refused = False
        for request in requests:
            status = await self._post(request)
            if status // 100 == SUCCESS:
                accepted = True
            else:
                refused = True
                if not _is_final(status):
                    break
        if accepted and not refused:
            self._metrics.set("sidestep_otlp_last_success_timestamp_seconds", self._wall() / 1e9)
            if not self._is_accepted:
                self._log.info("accepted", "--otlp.endpoint: %s accepts metrics", self._shown)
        self._is_accepted = accepted and not refused

    async def _post(self, request: Request) -> int:
        """Send one request; return the status of its answer, 0 without one."""
        body = b"".join(await compression.pack(request.parts))
        if self._session is None:
            self._session = self._new_session()
        try:
            async with self._session.post(
                self._url,
                data=io.BytesIO(body),
                allow_redirects=False,
            ) as response:
                answer = await _read(response.content)
                self._answered(request, response, answer)
                return response.status
        except aiohttp.ServerTimeoutError:
            self._failed("timeout", f"no connection within {CONNECT_SECONDS:g} s")
        except asyncio.TimeoutError:
            self._failed("timeout", f"no answer within {TIMEOUT:g} s")
        except aiohttp.ClientResponseError as error:
            # The error's own text includes the URL, whose query may be a secret.
            self._failed("connection", error.message)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # aiohttp's own text also mentions an SSL option that is not set.
            self._failed("connection", getattr(error, "os_error", error))
        return 0

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
        )

    def _answered(self, request: Request, response: aiohttp.ClientResponse, answer: bytes) -> None:
        status = response.status
        self._metrics.add("sidestep_otlp_requests_total", 1, str(status))
        if status // 100 == SUCCESS:
            rejected = min(self._rejected(response, answer), request.points)
            self._metrics.add("sidestep_otlp_points_total", request.points - rejected)
            self._metrics.add("sidestep_otlp_rejected_points_total", rejected)
            return
        if status in (429, 503):
            self._resume_at = self._clock() + _pause(response.headers.get("Retry-After", ""))
        elif _is_final(status):
            self._metrics.add("sidestep_otlp_rejected_points_total", request.points)
        reason = answer.decode(errors="replace") or response.reason or "no reason given"
        self._log.warning(
            str(status),
            "--otlp.endpoint: %s answers %d: %s",
            self._shown,
            status,
            _line(reason),
        )

    def _rejected(self, response: aiohttp.ClientResponse, answer: bytes) -> int:
        """Return how many points a successful answer rejects."""
        if response.content_type != KIND:
            return 0
        try:
            partial = ExportMetricsServiceResponse.FromString(answer).partial_success
        except DecodeError:
            self._log.warning(
                "answer",
                "--otlp.endpoint: %s accepts metrics with an unreadable answer",
                self._shown,
            )
            return 0
        if partial.rejected_data_points > 0 or partial.error_message:
            self._log.warning(
                "partial",
                "--otlp.endpoint: %s rejects %d points: %s",
                self._shown,
                partial.rejected_data_points,
                _line(partial.error_message),
            )
        rejected: int = partial.rejected_data_points
        return max(rejected, 0)

    def _failed(self, status: str, why: object) -> None:
        self._metrics.add("sidestep_otlp_requests_total", 1, status)
        self._log.warning(
            status, "--otlp.endpoint: %s cannot be reached: %s", self._shown, _line(why)
        )


async def _read(content: aiohttp.StreamReader) -> bytes:
    """Return the first bytes of an answer; the rest is not read."""
    found = bytearray()
    async for chunk in content.iter_any():
        found += chunk
        if len(found) >= MAX_ANSWER_BYTES:
            break
    return bytes(found[:MAX_ANSWER_BYTES])


def _is_final(status: int) -> bool:
    """Return whether the same data would be refused again."""
    return status // 100 == CLIENT_ERROR and status not in RETRYABLE


def _pause(text: str) -> float:
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
