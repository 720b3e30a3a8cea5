"""Request routers that poll the pod's page every 50 ms.

Each replica has a connection of its own, accepts gzip as Go's client does, and polls at its own
times. The cost of polling is the CPU time of the exporter's process minus that without polling.
The bare server answers the same requests with constant bytes.
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
"""Six times the cost of a server that does nothing else: 10 % of a core where that server takes 1.6 %."""
POLLED = f"{REPLICAS} replicas poll the pod's page every 50 ms, {ENGINES} engines"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return the percentage of a core that polling adds while items flow."""
    seconds = 2.0 if quick else 8.0
    with ExporterProcess(BARE) as bare:
        alone, _ = cost(bare, REPLICAS, seconds)
    with ExporterProcess() as exporter, flowing(exporter.endpoint, ENGINES, 50.0, 64):
        time.sleep(SETTLE)
        without, _ = cost(exporter, 0, seconds)
        polled, _ = cost(exporter, REPLICAS, seconds)
    return {POLLED: Figure(polled - without, alone)}


def cost(exporter: ExporterProcess, replicas: int, seconds: float) -> tuple[float, list[float]]:
    """Return CPU time in percent of a core, and the seconds of each answer."""
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
        # Decompression would take CPU time from the exporter.
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


ROUTERS = Topic(
    "Request routers",
    (Row(POLLED, "% of a core", PEER, TARGET),),
    measure,
)
