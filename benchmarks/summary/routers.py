"""Request routers that poll the pod's page every 50 ms, and routers that subscribe to the load of engines.

Each replica has a connection of its own, accepts gzip as Go's client does, and polls at its own
times. The cost of polling is the CPU time of the exporter's process less that without polling.
The bare server answers the same requests with constant bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import aiohttp
import msgspec
import zmq

from benchmarks.flow import SETTLE, flowing, step_of
from benchmarks.process import SERVE, ExporterProcess, free_port
from benchmarks.steps import Steps, engine_info
from benchmarks.summary.rows import Figure, Row, Topic
from benchmarks.table import percentile
from sidestep.engines.items import encode_item
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import Batch, Hello, encode

EVERY = 0.05
PAGE = "/metrics/pod"
BARE = ("-m", "benchmarks.bare_server")
REPLICAS = 4
ENGINES = 16
PEER = "a bare aiohttp, the same bytes each time"
TARGET = 1.6 / 10
"""Six times the cost of a server that does nothing else: 10 % of a core where that server takes 1.6 %."""
POLLED = f"{REPLICAS} replicas poll the pod's page every 50 ms, {ENGINES} engines"
STEPS = 200.0
PUBLISHED = f"the load of an engine at {STEPS:.0f} steps/s, published with each frame"
LATENCY = "p99 from a frame's departure to the receipt of its load by a router"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return the percentage of a core that polling and publishing add while items flow, and milliseconds."""
    seconds = 2.0 if quick else 8.0
    with ExporterProcess(BARE) as bare:
        alone, _ = cost(bare, REPLICAS, seconds)
    with ExporterProcess() as exporter, flowing(exporter.endpoint, ENGINES, 50.0, 64):
        time.sleep(SETTLE)
        without, _ = cost(exporter, 0, seconds)
        polled, _ = cost(exporter, REPLICAS, seconds)
    return {
        POLLED: Figure(polled - without, alone),
        PUBLISHED: Figure(publishing(seconds)),
        LATENCY: Figure(latency(200 if quick else 2000)),
    }


def publishing(seconds: float) -> float:
    """Return the CPU time, in percent of a core and per engine, that publishing the load adds."""
    used = []
    for flags in ((), ("--publish.load", f"tcp://127.0.0.1:{free_port()}")):
        with (
            ExporterProcess((*SERVE, *flags)) as exporter,
            flowing(exporter.endpoint, 1, STEPS, 64),
        ):
            time.sleep(SETTLE)
            used.append(cost(exporter, 0, 2 * seconds)[0])
    return used[1] - used[0]


def latency(steps: int) -> float:
    """Return the 99th percentile in milliseconds, of single steps that are sent as soon as possible."""
    port = free_port()
    flags = "--publish.load", f"tcp://127.0.0.1:{port}"
    with (
        ExporterProcess((*SERVE, *flags)) as exporter,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as engine,
        context.socket(zmq.SUB) as router,
    ):
        engine.connect(exporter.endpoint)
        engine.send(encode(Hello(VERSION, "bench", 1, 1, 1, [engine_info(0)])))
        router.setsockopt(zmq.SUBSCRIBE, b"load")
        router.connect(f"tcp://127.0.0.1:{port}")
        item = step_of(Steps(), 0, 0, 64)
        assert item.scheduler is not None
        waited = []
        for number in range(1, steps + 1):
            item.scheduler.num_running_reqs = number
            item.stamp, item.wall = time.monotonic(), time.time()
            frame = encode(Batch(1, number, [msgspec.Raw(encode_item(item))]))
            sent = time.perf_counter()
            engine.send(frame)
            # The first subscription takes a moment; an idle engine's load is sent again after a second.
            while msgspec.msgpack.decode(router.recv_multipart()[2])[1] != number:
                pass
            waited.append(time.perf_counter() - sent)
            time.sleep(1 / STEPS)
        return 1e3 * percentile(waited[1:], 0.99)


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
    (
        Row(POLLED, "% of a core", PEER, TARGET),
        Row(PUBLISHED, "% of a core", limit=0.5),
        Row(LATENCY, "ms", limit=2),
    ),
    measure,
)
