"""Viewers of the live page: each requests all engines every second, and charts every five seconds.

The cost of viewers is the CPU time of the exporter's process minus that without them. The peer is
what a terminal tool for engines does: it reads the whole metrics page every second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import aiohttp

from benchmarks.flow import SETTLE, flowing
from benchmarks.process import ExporterProcess
from benchmarks.summary.rows import Figure, Row, Topic

VIEWERS = 3
ENGINES = 256
LIVE = {"/api/v1/live": 1.0, "/api/v1/live/history": 5.0}
WHOLE = {"/metrics": 1.0}
"""Seconds between two requests, by path."""
PEER = "viewers that read the metrics page every second"
VIEWED = f"{VIEWERS} viewers of the live page, {ENGINES} engines"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return the percentage of a core that viewers add while items flow."""
    seconds = 5.0 if quick else 20.0
    with ExporterProcess() as exporter, flowing(exporter.endpoint, ENGINES, 2.0, 64):
        # Until percentiles cover a minute they cost less.
        time.sleep(SETTLE if quick else 60.0)
        without = cost(exporter, {}, seconds)
        viewed = cost(exporter, LIVE, seconds)
        read = cost(exporter, WHOLE, seconds)
    return {VIEWED: Figure(viewed - without, read - without)}


def cost(exporter: ExporterProcess, paths: Mapping[str, float], seconds: float) -> float:
    """Return CPU time in percent of a core while each viewer requests ``paths``."""
    before, started = exporter.cpu_seconds, time.monotonic()
    asyncio.run(_view(exporter.url, paths, seconds))
    return 100 * (exporter.cpu_seconds - before) / (time.monotonic() - started)


async def _view(url: str, paths: Mapping[str, float], seconds: float) -> None:
    until = time.monotonic() + seconds

    async def viewer(number: int, path: str, interval: float) -> None:
        # Decompression would take CPU time from the exporter.
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            due = time.monotonic() + interval * number / VIEWERS
            while due < until:
                await asyncio.sleep(max(due - time.monotonic(), 0.0))
                async with session.get(url + path, headers={"Accept-Encoding": "gzip"}) as answer:
                    await answer.read()
                due += interval

    requests = [viewer(n, path, each) for n in range(VIEWERS) for path, each in paths.items()]
    await asyncio.gather(asyncio.sleep(seconds), *requests)


VIEWS = Topic("The live page", (Row(VIEWED, "% of a core", PEER, limit=5),), measure)
