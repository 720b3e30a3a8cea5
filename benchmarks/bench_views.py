"""What request routers cost: replicas that poll the pod's page every 50 ms while engines send.

Each replica has a connection of its own, takes gzip as Go's client does, and polls at its own
moments. CPU time is that of the exporter's process, in percent of one core; what polling costs
is the difference to the same without it. The bare server answers as often with bytes that are
always the same: what aiohttp takes by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import aiohttp

from benchmarks.process import SERVE, ExporterProcess
from benchmarks.steps import Steps, engine_info
from benchmarks.table import percentile, show
from sidestep.engines.items import VllmStep
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.publisher.translate import to_wire

EVERY = 0.05
SETTLE = 1.5
"""Seconds before the first measurement."""
READY = 100
"""Steps made beforehand, of each engine."""
PAGE = "/metrics/pod"
BARE = ("-m", "benchmarks.bare_server")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rate", type=float, default=50.0, help="steps a second, of each engine")
    parser.add_argument("--batch", type=int, default=64, help="latencies a step")
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    rows: list[list[str]] = []
    with ExporterProcess(BARE) as bare:
        alone, spent = cost(bare, args.replicas, args.seconds)
        rows.append(["bare aiohttp, 12 KiB in gzip", "", f"{alone:.1f}", *_waited(spent)])
    size = 0
    with tempfile.TemporaryDirectory() as state:
        for kept, flags in (("", ()), (", --state.dir", ("--state.dir", state))):
            with ExporterProcess((*SERVE, *flags)) as exporter:
                with flowing(exporter.endpoint, args.engines, args.rate, args.batch):
                    time.sleep(SETTLE)
                    row = measured(exporter, args.replicas, args.seconds)
                    rows.append([f"pod view, items flow{kept}", *row])
                    size = len(exporter.get(PAGE))
                time.sleep(SETTLE)
                row = measured(exporter, args.replicas, args.seconds)
                rows.append([f"pod view, nothing changes{kept}", *row])
    show(
        f"{args.replicas} replicas, each every {EVERY * 1e3:.0f} ms; {args.engines} engines at"
        f" {args.rate:.0f} steps/s x {args.batch} values; a page of {size >> 10} KiB",
        ("what", "CPU % without polls", "CPU % of polls", "p50 ms", "p99 ms"),
        rows,
    )


@contextlib.contextmanager
def flowing(endpoint: str, engines: int, rate: float, batch: int) -> Iterator[None]:
    """Engines that send steps until the block ends."""
    steps = Steps()
    ready = [step_of(steps, number % engines, number, batch) for number in range(READY * engines)]
    publisher = Publisher(endpoint, "bench", [engine_info(number) for number in range(engines)])
    halted = threading.Event()

    def send() -> None:
        due = time.monotonic()
        number = 0
        while not halted.wait(max(due - time.monotonic(), 0.0)):
            for _ in range(engines):
                item = ready[number % len(ready)]
                item.stamp, item.wall = time.monotonic(), time.time()
                publisher.push(item)
                number += 1
            due += 1 / rate

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        halted.set()
        thread.join()
        publisher.close()


def step_of(steps: Steps, engine: int, number: int, batch: int) -> VllmStep:
    """One step of ``engine``; every other one ends a request."""
    scheduler = steps.schedulers[number % len(steps.schedulers)]
    iteration = steps.iteration(batch, number // 16 % 2)
    source = SimpleNamespace(
        engine=engine,
        stamp=0.0,
        wall=0.0,
        scheduler=scheduler,
        iteration=iteration,
        mm_cache=None,
    )
    found, _ = to_wire(source, VllmStep)
    return found


def measured(exporter: ExporterProcess, replicas: int, seconds: float) -> list[str]:
    """A row: without polls, what they add, and how long answers took."""
    without, _ = cost(exporter, 0, seconds)
    polled, spent = cost(exporter, replicas, seconds)
    return [f"{without:.1f}", f"{polled - without:.1f}", *_waited(spent)]


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


def _waited(found: list[float]) -> list[str]:
    return [f"{percentile(found, share) * 1e3:.1f}" for share in (0.5, 0.99)]


if __name__ == "__main__":
    main()
