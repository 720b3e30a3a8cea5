"""The sources of ``--scrape`` and of ``metrics=`` in ``--triton``: one poller for each page."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from sidestep.config.scrape_targets import INTERVAL, Target
from sidestep.config.settings import Config
from sidestep.errors import ConfigError, PollError
from sidestep.exposition.passthrough.page import Page
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.ingest.intake import Intake
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.polling.http_client import Client, Response
from sidestep_adapters.polling.poller import Poller
from sidestep_adapters.polling.state import STATES, PollState
from sidestep_adapters.triton.rows import FROM_STATISTICS

log = logging.getLogger(__name__)

PREFIX = "sidestep_scrape_"
"""Prefix of the metrics about polls."""
ACCEPT = "text/plain;version=0.0.4;q=1,text/plain;q=0.5,*/*;q=0.1"
OPENMETRICS = "application/openmetrics-text"
JSON = "json"
JSON_PAUSE = (10.0, 3600.0)
"""Seconds until a target that answered with JSON is polled again: the first time, and at most. They double."""
JSON_ADVICE = (
    "it is polled again in %g s only, since reading TensorRT-LLM's /metrics takes its iteration statistics"
    " away from others. Its page is /prometheus/metrics"
)


class PagePoller(Poller):
    """Polls one target at an interval."""

    def __init__(self, target: Target, name: str, page: Page, metrics: SelfMetrics) -> None:
        self._client = Client(target)
        super().__init__(target.interval, self._client.close)
        self.target = target
        self.name = name
        self.page = page
        self.state = PollState(target.interval)
        self._json_pause = JSON_PAUSE[0]
        self._metrics = metrics
        self._lines = RateLimitedLog(log)
        self._count("ok", 0)

    def tick(self, now: float) -> None:
        """Hide the last page of a target that has not answered for too long."""
        was_shown = self.state.is_shown
        self.state.tick(now)
        if was_shown and not self.state.is_shown:
            self._lines.warning("silent", "%s: no response for too long", self.name)
            self.page.hide()

    def cut(self) -> None:
        """Discard the last page, and start again."""
        self.state = PollState(self.target.interval)
        self.page.hide()
        super().cut()

    async def poll(self) -> float:
        """Poll the target once, and expose its page; return the seconds until the next poll."""
        started = time.monotonic()
        self.state.started(started)
        try:
            response = await self._client.request(self.target.url, ACCEPT)
            _check(response)
        except PollError as error:
            self._fail(error, time.monotonic())
            if error.cause != JSON:
                return self._interval
            pause = max(self._interval, self._json_pause)
            self._json_pause = min(2 * self._json_pause, JSON_PAUSE[1])
            self._lines.error("refused", f"%s: {JSON_ADVICE}", self.name, pause)
            return pause
        self._json_pause = JSON_PAUSE[0]
        await self._apply(response.text(), started)
        return self._interval

    async def _apply(self, chunks: list[bytes], started: float) -> None:
        """Read a page and expose it, in a thread, since a long page takes a tenth of a second."""
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
    """
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    start = b"".join(response.chunks[:2]).lstrip()[:1]
    if start and start in b"[{":
        raise PollError(JSON, "the response is JSON")
    if start == b"<":
        raise PollError("bad_answer", "the response is HTML or XML")
    if kind == OPENMETRICS and not b"".join(response.chunks[-2:]).rstrip().endswith(b"# EOF"):
        raise PollError("truncated", "its last line is not # EOF")


def sources(
    config: Config, intake: Intake, passthrough: PassthroughRegistry
) -> Sequence[PagePoller]:
    """Return one poller for each target."""
    metrics = intake.metrics
    pollers: list[PagePoller] = []
    names: Counter[str] = Counter()
    for flag, target, excluded in _targets(config):
        try:
            Client(target).check()
        except ConfigError as error:
            raise ConfigError(f"{flag} {target.name}: {error}") from None
        names[target.name] += 1
        number = names[target.name]
        name = target.name if number == 1 else f"{target.name} #{number}"
        # A Triton of --triton has statistics lines already.
        of_lines = name if flag == "--scrape" else ""
        page = passthrough.page(target.labels, excluded, of_lines)
        pollers.append(PagePoller(target, name, page, metrics))
    metrics.read(
        "sidestep_scrape_state",
        lambda: [
            ((each.name, state), float(each.state.state == state))
            for each in pollers
            for state in STATES
        ],
    )
    metrics.read(
        "sidestep_scrape_samples",
        lambda: [
            ((each.name,), float(each.page.parsed.exposed if each.page.parsed else 0))
            for each in pollers
        ],
    )
    metrics.read(
        "sidestep_scrape_left_out_samples",
        lambda: [
            ((each.name, reason), float(count))
            for each in pollers
            for reason, count in passthrough.left_out(each.page).items()
        ],
    )
    return pollers


def _targets(config: Config) -> Iterator[tuple[str, Target, Collection[str]]]:
    """Yield each flag and target, and the families to leave out of its page."""
    for target in config.scrape:
        yield "--scrape", target, ()
    for server in config.triton:
        if server.metrics:
            # What the page has is not lost between polls, and a page is larger than statistics.
            interval = max(server.target.interval, INTERVAL)
            target = dataclasses.replace(server.target, url=server.metrics, interval=interval)
            yield "--triton", target, FROM_STATISTICS
