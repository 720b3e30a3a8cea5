"""Polling of one target's page at an interval, one request at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

from sidestep.config.scrape_targets import Target
from sidestep.errors import PollError
from sidestep.exposition.passthrough.page import Page
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.scrape.http_client import Client, Response
from sidestep_adapters.scrape.poll_state import PollState
from sidestep_adapters.scrape.poll_task import PollTask

log = logging.getLogger(__name__)

PREFIX = "sidestep_scrape_"
"""Prefix of the metrics about polls."""
ACCEPT = "text/plain;version=0.0.4;q=1,text/plain;q=0.5,*/*;q=0.1"
OPENMETRICS = "application/openmetrics-text"
KINDS = ("text/plain", OPENMETRICS)
"""Media types of pages; some engines serve OpenMetrics whatever they are asked for."""
JSON = "json"
JSON_ADVICE = (
    "it is not polled again, since reading TensorRT-LLM's /metrics takes its iteration statistics away"
    " from others. Use its page, /prometheus/metrics, or --engine trtllm=URL, and restart the exporter"
)


class PagePoller:
    """Polls one target at an interval; implements ``sidestep.ingest.source.Source``.

    The next request waits until the last page is applied.

    Args:
        target: The target.
        name: Name of the target in labels and log lines.
        page: Updated from the target's responses, a slice in each turn.
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
        self._update: Iterator[None] | None = None
        self._is_applied = asyncio.Event()
        self._wake: Callable[[], None] = lambda: None
        self._lines = RateLimitedLog(log)
        self._count("ok", 0)

    def open(self, wake: Callable[[], None]) -> None:
        """Start polling."""
        self._wake = wake
        self._is_applied = asyncio.Event()
        self._task.start(self._run())

    def receive(self, now: float) -> bool:
        """Apply a slice of a page; return whether there may be more."""
        if self._update is None:
            return False
        try:
            next(self._update)
        except StopIteration:
            if not self.state.is_shown:
                self._lines.info("answers", "%s: polls succeed", self.name)
            self.state.answered()
            self._count("ok", 1)
        except PollError as error:
            self._fail(error, now)
        else:
            return True
        self._update = None
        self._is_applied.set()
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
        self._update = None
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""
        await self._task.wait()

    async def _run(self) -> None:
        client = Client(self.target)
        try:
            while True:
                started = time.monotonic()
                self.state.started(started)
                try:
                    response = await client.request(self.target.url, ACCEPT, KINDS)
                    _check_end(response)
                except PollError as error:
                    self._fail(error, time.monotonic())
                    if error.cause == JSON:
                        self._lines.error("refused", "%s: %s", self.name, JSON_ADVICE)
                        return
                else:
                    await self._apply(response.chunks, started)
                    del response
                await asyncio.sleep(max(started + self.target.interval - time.monotonic(), 0.0))
        finally:
            await client.close()

    async def _apply(self, chunks: list[bytes], started: float) -> None:
        took = time.monotonic() - started
        self._metrics.set(f"{PREFIX}poll_duration_seconds", took, self.name)
        self._is_applied.clear()
        self._update = self.page.update(chunks)
        self._wake()
        await self._is_applied.wait()

    def _fail(self, error: PollError, now: float) -> None:
        was_shown = self.state.is_shown
        self.state.failed(error.cause, now)
        self._count(error.cause, 1)
        self._lines.warning("failed", "%s: %s", self.name, error)
        if was_shown and not self.state.is_shown:
            self.page.hide()

    def _count(self, outcome: str, more: int) -> None:
        self._metrics.add(f"{PREFIX}polls_total", more, self.name, outcome)


def _check_end(response: Response) -> None:
    """Check that a page in OpenMetrics has its last line.

    Raises:
        PollError: It was cut.
    """
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind == OPENMETRICS and not b"".join(response.chunks[-2:]).rstrip().endswith(b"# EOF"):
        raise PollError("truncated", "its last line is not # EOF")
