"""A simulated engine that pushes what it does, while the exporter is told what time it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from itertools import count

from conftest import until
from peers import publisher
from ramps import Look, Model, Simulation
from sidestep.app import Exporter
from sidestep.catalog.buckets import DEFAULTS
from sidestep.engines.items import VllmStep
from sidestep.engines.vllm.wire import SchedulerStats
from sidestep.metrics.computed_gauges import scalar
from sidestep.protocol.iteration_stats import FinishedRequestStats, IterationStats

AHEAD = 1e6
"""Seconds by which the simulation's time is later than ours, so that the exporter's own looks
at its clock find nothing due."""
SMALL = Model(slots=4, prompt=100.0, answer=50.0)
"""Serves about four requests a second."""
SLOW = Model(slots=4, prompt=100.0, answer=500.0)
"""Serves about two requests in five seconds."""
FINISHED = FinishedRequestStats(
    e2e_latency=2.0,
    queued_time=0.4,
    prefill_time=0.1,
    inference_time=1.6,
    decode_time=1.5,
    mean_time_per_output_token=0.03,
)
"""What is told of each; without it, means over engines of what finished are no number (0 / 0 of one is all of them)."""
BOUNDS = {"request_tokens": [bound for bound in DEFAULTS["request_tokens"] if bound <= 2000]}
"""Those of the recorded engines: buckets of others add up to nothing that can be drawn."""
_AGAIN = count(1)


def step(look: Look, before: Look | None) -> VllmStep:
    """One, of all that was done since ``before``."""
    begun = look.arrived - look.waiting
    finished = look.finished
    if before is not None:
        begun -= before.arrived - before.waiting
        finished -= before.finished
    return VllmStep(
        0,
        time.monotonic(),
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
            time_to_first_tokens_iter=[0.5] * max(begun, 0),
        ),
    )


async def overload(exporter: Exporter) -> None:
    """Ten minutes of an engine that is asked for half again what it serves, looked at every 5 seconds."""
    await play(exporter, Simulation(SMALL, lambda now: 60.0 if now < 1 else 6.0, 1).looks(650, 5.0))


async def rise(exporter: Exporter, seconds: float) -> None:
    """In so many seconds half an hour of an engine, from half of what it serves to more than that.

    What it serves is known before: it has had a queue, which is gone.
    """

    def rate(now: float) -> float:
        return 60.0 if now < 1 else 0.18 + 0.32 * max(now - 600, 0) / 1800

    looks = Simulation(SLOW, rate, 1).looks(2400, 5.0)
    await play(exporter, looks, since=600, pause=seconds * 5 / 1800)


async def play(
    exporter: Exporter,
    looks: Iterable[Look],
    engine: str = "ramped",
    *,
    since: float = 0.0,
    pause: float = 0.0,
) -> None:
    """Push a step a look over a real socket, and have the exporter look after each.

    Args:
        exporter: Where to.
        looks: What happens.
        engine: Its name.
        since: Seconds of the simulation from which on there is a ``pause``.
        pause: Seconds of ours between two looks.
    """
    start = time.monotonic() + AHEAD * next(_AGAIN)
    pushed = publisher(exporter.endpoints[0], stream=engine, engine=engine, bounds=BOUNDS)
    before: Look | None = None
    made = _generated(exporter, engine)
    try:
        for look in looks:
            pushed.push(step(look, before))
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
