"""Polling of one target's page at an interval, one request at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sidestep.config.scrape_targets import Target
from sidestep.errors import PollError
from sidestep.exposition.passthrough.page import Page
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.polling.http_client import Client, Response
from sidestep_adapters.polling.poll_state import PollState
from sidestep_adapters.polling.poll_task import PollTask

log = logging.getLogger(__name__)

PREFIX = "sidestep_scrape_"
"""Prefix of the metrics about polls."""
ACCEPT = "text/plain;version=0.0.4;q=1,text/plain;q=0.5,*/*;q=0.1"
OPENMETRICS = "application/openmetrics-text"
JSON = "json"
JSON_PAUSE = (10.0, 3600.0)
"""Seconds until a target that answered with JSON is polled again, at first and at most; they double."""
JSON_ADVICE = (
    "it is polled again in %g s only, since reading TensorRT-LLM's /metrics takes its iteration statistics"
    " away from others. Its page is /prometheus/metrics"
)


class PagePoller:
    """Polls one target at an interval; implements ``sidestep.ingest.source.Source``.

    The next request waits until the last page is applied.

    Args:
        target: The target.
        name: Name of the target in labels and log lines.
        page: Updated from the target's responses.
        metrics: The exporter's own metrics.

    Attributes:
        state: Whether the target is up.
    """

    def __init__(self, target: Target, name: str, page: Page, metrics: SelfMetrics) -> None:
        self.target = target
        self.name = name
        self.page = page
        self.state = PollState(target.interval)
        self._metrics = metrics
        self._task = PollTask()
        self._wake: Callable[[], None] = lambda: None
        self._lines = RateLimitedLog(log)
        self._count("ok", 0)

    def open(self, wake: Callable[[], None]) -> None:
        """Start polling."""
        self._wake = wake
        self._task.start(self._run())

    def receive(self, now: float) -> bool:
        """Return False: pages are read in a thread."""
        del now
        return False

    def tick(self, now: float) -> None:
        """Hide the last page of a target that has not answered for too long."""
        was_shown = self.state.is_shown
        self.state.tick(now)
        if was_shown and not self.state.is_shown:
            self._lines.warning("silent", "%s: no response for too long", self.name)
            self.page.hide()

    def cut(self) -> None:
        """Discard the last page, and start again."""
        self.close()
        self.state = PollState(self.target.interval)
        self.page.hide()
        self.open(self._wake)

    def close(self) -> None:
        """Stop polling."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""
        await self._task.wait()

    async def _run(self) -> None:
        client = Client(self.target)
        json_pause = JSON_PAUSE[0]
        try:
            while True:
                started = time.monotonic()
                pause = self.target.interval
                self.state.started(started)
                try:
                    response = await client.request(self.target.url, ACCEPT)
                    _check(response)
                except PollError as error:
                    self._fail(error, time.monotonic())
                    if error.cause == JSON:
                        pause = max(pause, json_pause)
                        json_pause = min(2 * json_pause, JSON_PAUSE[1])
                        self._lines.error("refused", f"%s: {JSON_ADVICE}", self.name, pause)
                else:
                    json_pause = JSON_PAUSE[0]
                    await self._apply(response.text(), started)
                    del response
                await asyncio.sleep(max(started + pause - time.monotonic(), 0.0))
        finally:
            await client.close()

    async def _apply(self, chunks: list[bytes], started: float) -> None:
        """Read a page and expose it, in a thread: a long one takes a tenth of a second."""
        now = time.monotonic()
        self._metrics.set(f"{PREFIX}poll_duration_seconds", now - started, self.name)
        try:
            self.page.parsed = await asyncio.to_thread(self.page.read, chunks)
        except PollError as error:
            self._fail(error, now)
            return
        await asyncio.to_thread(self.page.merge)
        if not self.state.is_shown:
            self._lines.info("answers", "%s: polls succeed", self.name)
        self.state.answered()
        self._count("ok", 1)

    def _fail(self, error: PollError, now: float) -> None:
        was_shown = self.state.is_shown
        self.state.failed(error.cause, now)
        self._count(error.cause, 1)
        self._lines.warning("failed", "%s: %s", self.name, error)
        if was_shown and not self.state.is_shown:
            self.page.hide()

    def _count(self, outcome: str, more: int) -> None:
        self._metrics.add(f"{PREFIX}polls_total", more, self.name, outcome)


def _check(response: Response) -> None:
    """Check that a body is text, and that a page in OpenMetrics has its last line.

    Some servers send pages with another media type, such as that of JSON.

    Raises:
        PollError: It is something else, or was cut.
    """
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    start = b"".join(response.chunks[:2]).lstrip()[:1]
    if start and start in b"[{":
        raise PollError(JSON, "the response is JSON")
    if start == b"<":
        raise PollError("bad_answer", "the response is HTML or XML")
    if kind == OPENMETRICS and not b"".join(response.chunks[-2:]).rstrip().endswith(b"# EOF"):
        raise PollError("truncated", "its last line is not # EOF")
