"""Request routers that poll the pod's page every 50 ms.

Each replica has a connection of its own, takes gzip as Go's client does, and polls at its own
moments. CPU time is that of the exporter's process; what polling costs is the difference to the
same without it. The bare server answers as often with bytes that are always the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import aiohttp

from benchmarks.flow import SETTLE, flowing
from benchmarks.process import ExporterProcess
from benchmarks.summary.rows import Figure, Row, Topic

EVERY = 0.05
PAGE = "/metrics/pod"
BARE = ("-m", "benchmarks.bare_server")
REPLICAS = 4
ENGINES = 16
PEER = "a bare aiohttp, the same bytes each time"
TARGET = 1.6 / 10
"""Beside the limit of 10 % of a core, where the peer takes 1.6 %."""
POLLED = f"{REPLICAS} replicas poll the pod's page every 50 ms, {ENGINES} engines"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Percent of a core that polls add while items flow."""
    seconds = 2.0 if quick else 8.0
    with ExporterProcess(BARE) as bare:
        alone, _ = cost(bare, REPLICAS, seconds)
    with ExporterProcess() as exporter, flowing(exporter.endpoint, ENGINES, 50.0, 64):
        time.sleep(SETTLE)
        without, _ = cost(exporter, 0, seconds)
        polled, _ = cost(exporter, REPLICAS, seconds)
    return {POLLED: Figure(polled - without, alone)}


def cost(exporter: ExporterProcess, replicas: int, seconds: float) -> tuple[float, list[float]]:
    """CPU time in percent of a core, and the seconds that each answer took."""
    before, started = exporter.cpu_seconds, time.monotonic()
    if replicas:
        waited = asyncio.run(_poll(exporter.url, replicas, seconds))
    else:
        time.sleep(seconds)
        waited = []
    took = time.monotonic() - started
    return 100 * (exporter.cpu_seconds - before) / took, waited


async def _poll(url: str, replicas: int, seconds: float) -> list[float]:
    found: list[float] = []
    until = time.monotonic() + seconds

    async def replica(number: int) -> None:
        # Not decompressed here: the machine is shared.
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            due = time.monotonic() + EVERY * number / replicas
            while due < until:
                await asyncio.sleep(max(due - time.monotonic(), 0.0))
                started = time.perf_counter()
                headers = {"Accept-Encoding": "gzip"}
                async with session.get(url + PAGE, headers=headers) as answer:
                    await answer.read()
                found.append(time.perf_counter() - started)
                due += EVERY

    await asyncio.gather(*(replica(number) for number in range(replicas)))
    return found


ROUTERS = Topic("Request routers", (Row(POLLED, "% of a core", PEER, TARGET, limit=10),), measure)
