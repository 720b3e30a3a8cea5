"""A simulated engine that pushes its steps to an exporter, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from itertools import count

from exporters import until
from peers import publisher
from ramps import Look, Mix, Model, Simulation
from sidestep.app.exporter import Exporter
from sidestep.catalog.buckets import DEFAULTS
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.metrics.computed_gauges import scalar
from sidestep.protocol.iteration_stats import FinishedRequestStats, IterationStats
from sidestep.protocol.messages import LIMITS

AHEAD = 1e6
"""Seconds by which the simulation is ahead of the exporter's clock, so that only tests update loads."""
SMALL = Model(slots=4)
SHORT = Mix(prompt=100.0, answer=50.0)
"""Four of these a second are about what the engine serves."""
LONG = Mix(prompt=100.0, answer=500.0)
"""Two of these in five seconds are about what the engine serves."""
INFO = {LIMITS: {"max_running_requests": str(SMALL.slots)}}
FINISHED = FinishedRequestStats(
    e2e_latency=2.0,
    queued_time=0.4,
    prefill_time=0.1,
    inference_time=1.6,
    decode_time=1.5,
    mean_time_per_output_token=0.03,
)
"""Statistics of every finished request, so that no mean over engines is 0 / 0."""
BOUNDS = {"request_tokens": [bound for bound in DEFAULTS["request_tokens"] if bound <= 2000]}
"""Bounds of the recorded engines, with which these buckets are summed."""
_AGAIN = count(1)


def step(look: Look, before: Look | None, start: float) -> VllmStep:
    """Return a step with everything that happened since ``before``; the simulation began at ``start``."""
    begun, finished = look.begun, look.finished
    if before is not None:
        begun -= before.begun
        finished -= before.finished
    return VllmStep(
        0,
        start + look.time,
        time.time(),
        SchedulerStats(
            num_running_reqs=look.running,
            num_waiting_reqs=look.waiting,
            kv_cache_usage=look.usage,
        ),
        IterationStats(
            num_generation_tokens=look.generated - (before.generated if before else 0),
            num_preempted_reqs=look.preempted - (before.preempted if before else 0),
            finished_requests=[FINISHED] * finished,
            time_to_first_tokens_iter=[0.5] * begun,
        ),
    )


async def overload(exporter: Exporter) -> None:
    """Simulate ten minutes of an engine at one and a half times the rate that it can serve."""
    await play(exporter, Simulation(SMALL, SHORT, lambda _: 6.0, 1).looks(650, 5.0))


async def rise(exporter: Exporter, seconds: float) -> None:
    """Simulate half an hour in ``seconds``, from half the rate that the engine can serve to more than it."""

    def rate(now: float) -> float:
        return 0.18 + 0.32 * max(now - 600, 0) / 1800

    looks = Simulation(SMALL, LONG, rate, 1).looks(2400, 5.0)
    await play(exporter, looks, since=600, pause=seconds * 5 / 1800)


async def play(
    exporter: Exporter,
    looks: Iterable[Look],
    engine: str = "ramped",
    *,
    since: float = 0.0,
    pause: float = 0.0,
) -> None:
    """Push a step per observation over a real socket, and update the exporter's load after each.

    Args:
        exporter: Receiver of the steps.
        looks: Observations of the simulation.
        engine: Name of the engine.
        since: Simulated seconds after which there is a ``pause``.
        pause: Real seconds between two observations.
    """
    start = time.monotonic() + AHEAD * next(_AGAIN)
    pushed = publisher(
        exporter.endpoints[0],
        stream=engine,
        engine=engine,
        bounds=BOUNDS,
        info=INFO,
        # Each step is awaited.
        flush_interval=0.001,
    )
    before: Look | None = None
    made = _generated(exporter, engine)
    try:
        for look in looks:
            pushed.push(step(look, before, start))
            made += look.generated - (before.generated if before else 0)
            await until(lambda made=made: _generated(exporter, engine) >= made)  # type: ignore[misc]
            exporter.intake.loads.update(start + look.time)
            before = look
            if pause and look.time >= since:
                await asyncio.sleep(pause)
    finally:
        pushed.close()


def _generated(exporter: Exporter, engine: str) -> float:
    found = exporter.registry.engines.get(engine)
    return 0 if found is None else scalar(found, "vllm:generation_tokens_total")
