"""An exporter's answers to probes of its engines' health, polled for as long as a test runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import aiohttp

from exporters import until
from real_engines.processes import ExporterProcess

PERIOD = 0.25
"""Seconds between two polls."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """Health of one engine as the exporter gave it at a monotonic time."""

    at: float
    engine: str
    state: str
    reason: str
    seconds: float
    unfinished: int | None


class HealthWatch:
    """A background task that polls ``/-/engines`` of an exporter."""

    def __init__(self, exporter: ExporterProcess) -> None:
        self.exporter = exporter
        self.seen: list[Seen] = []
        self.failed, self.slowest = 0, 0.0
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15))
        self._task = asyncio.create_task(self._poll())

    async def get(self, path: str) -> tuple[int, Any]:
        """Return status and body of an answer of the exporter, which is JSON or text."""
        base = self.exporter.url.rpartition("/")[0]
        async with self._session.get(f"{base}{path}") as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def found(
        self, engine: str, condition: Callable[[Seen], bool], timeout: float, what: str
    ) -> Seen:
        """Return the first new answer about ``engine`` that meets ``condition``."""
        start = len(self.seen)
        answers: list[Seen] = []

        def met() -> bool:
            self._check()
            new = [each for each in self.seen[start:] if each.engine == engine]
            answers[:] = [each for each in new if condition(each)]
            return bool(answers)

        try:
            await until(met, timeout, what)
        except AssertionError as error:
            last = [each for each in self.seen if each.engine == engine][-1:]
            polls = f"{self.failed} polls failed, the slowest took {self.slowest:.1f} s"
            raise AssertionError(f"{error}; {polls}; the last answer: {last}") from None
        return answers[0]

    async def more(self, engine: str, count: int) -> None:
        """Wait for ``count`` more answers about ``engine``."""
        start = len(self.seen)

        def arrived() -> bool:
            self._check()
            return sum(each.engine == engine for each in self.seen[start:]) >= count

        await until(arrived, 10 + count, "answers")

    def states(self, engine: str, since: float = 0.0) -> Counter[str]:
        """Count the answers about ``engine`` since a monotonic time by state and reason."""
        return Counter(
            f"{each.state} {each.reason}".strip()
            for each in self.seen
            if each.engine == engine and each.at >= since
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._session.close()

    def _check(self) -> None:
        if self._task.done():
            self._task.result()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            asked_at = time.monotonic()
            try:
                _, body = await self.get("/-/engines")
            except (aiohttp.ClientConnectionError, TimeoutError):
                # No exporter runs while a test replaces it.
                self.failed += 1
                continue
            now = time.monotonic()
            self.slowest = max(self.slowest, now - asked_at)
            self.seen += [
                Seen(
                    now,
                    each["id"],
                    each["state"],
                    each["reason"] or "",
                    each["seconds"],
                    each["unfinished_requests"],
                )
                for each in body["engines"]
            ]
