"""Pushes of an exporter to a real receiver, compared with the exporter's page."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

from exporters import until
from otlp_receiver import Samples, page_samples
from pages import get
from replays import replay
from sidestep.app.exporter import Exporter

RUNS = ("core_dp", "core_aborts", "sglang_dp", "triton")
MOVING = (
    "process_",
    "python_gc",
    "sidestep_http",
    "sidestep_loop",
    "sidestep_otlp",
    "sidestep_scrape",
)
"""The exporter's own values, which may have changed and changed back."""


async def replay_all(exporter: Exporter, runs: Iterable[str]) -> None:
    """Replay recorded runs, each in a namespace of its own."""
    for run in runs:
        await replay(exporter, run, run)


async def pushed(exporter: Exporter, stored: Callable[[], Samples]) -> int:
    """Compare the page with what is stored; return how many samples are equal.

    Values that change from push to push, such as the exporter's own, are left out.
    """
    before = page_samples(await get(exporter.url))

    def requests() -> float:
        value = exporter.metrics.value
        return sum(
            value("sidestep_otlp_requests_total", "metrics", status)
            for status in ("200", "success")
        )

    pushes = requests() + 2
    await until(lambda: requests() >= pushes)
    after = page_samples(await get(exporter.url))
    assert exporter.metrics.value("sidestep_otlp_rejected_points_total") == 0
    steady = {
        key: value
        for key, value in after.items()
        if before.get(key) == value and not key[0].startswith(MOVING)
    }
    found: Samples = {}

    async def has_all() -> bool:
        nonlocal found
        found = await asyncio.to_thread(stored)
        return steady.keys() <= found.keys()

    try:
        await until(has_all, 60.0)
    except AssertionError:
        assert steady.keys() - found.keys() == set()
    differing = [
        key for key, value in steady.items() if not math.isclose(found[key], value, rel_tol=1e-12)
    ]
    assert differing == []
    return len(steady)
