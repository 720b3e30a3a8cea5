"""Engines that send steps to an exporter while something else is measured."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

from benchmarks.steps import Steps, engine_info
from sidestep.engines.vllm.wire import VllmStep
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.publisher.translate import to_wire

SETTLE = 1.5
"""Seconds before the first measurement."""
READY = 100
"""Steps of each engine that are prepared."""


@contextlib.contextmanager
def flowing(endpoint: str, engines: int, rate: float, batch: int) -> Iterator[None]:
    """Send the steps of ``engines`` until the block ends."""
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
    """Return one step of ``engine``; every other one ends a request."""
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
