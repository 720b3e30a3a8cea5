"""Reports for the terminal view, and a source that hands them out."""

from __future__ import annotations

import asyncio
from typing import Any

from sidestep.exposition.live.answers import EngineRow, Percentiles
from sidestep_tools.top.report import Report, TargetReport, report

URL = "http://10.0.0.1:9400"
DOWN = "http://10.0.0.2:8000/metrics"


def engine(number: int, **changes: Any) -> EngineRow:
    """Return an engine whose numbers all follow from its own."""
    values: dict[str, Any] = {
        "id": f"ns/pod-{number}",
        "engine": f"pod-{number}",
        "model": "llama",
        "dialect": "vllm",
        "state": "ok",
        "running": 10.0 + number,
        "waiting": float(number),
        "prompt_tokens_per_second": 1000.0 + number,
        "generation_tokens_per_second": 500.0 + number,
        "ttft": Percentiles(0.1, 0.2, 0.3, 40.0),
        "inter_token": Percentiles(0.01, 0.02, 0.03, 400.0),
        "e2e": Percentiles(1.0, 2.0, 3.0, 30.0),
        "kv_cache_usage": 0.4,
        "prefix_hit_rate": 0.0,
        "finished": 30.0,
        "aborted": 0.0,
        "preemptions": 2.0,
        "saturation": 0.5,
        "step_age": 0.02,
        "last_seen": 0.1,
    }
    return EngineRow(**{**values, **changes})


class Reports:
    """A source of reports whose targets a test changes."""

    def __init__(self, *rows: EngineRow) -> None:
        self.targets = [TargetReport(url=URL, engines=list(rows), age=0.0)]
        self.polls = 0
        self.answering = asyncio.Event()
        self.answering.set()

    async def poll(self) -> Report:
        """Return a report of the targets as they are."""
        self.polls += 1
        await self.answering.wait()
        return report(self.targets, 1.7e9)


if __name__ == "__main__":
    from sidestep_tools.top.app import view

    asyncio.run(view(Reports(engine(1), engine(2))))
