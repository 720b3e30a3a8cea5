"""Simulated engines: legal runs are never stalled, and a wedge always is, in time and for its reason."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from health_runs import bursts, false_alarms, legal_run, wedged_run
from simulated_engines import WEDGES, Core, Profile, Request, watch

TRACE = Path(__file__).parents[3] / "shared/reference/traces/conversation.jsonl.gz"
DAY = 86400.0
GPU = Profile(0.05, 4e-5, 1e-6, 8192, 256, 6.0, preempted=0.001, load=6.0)
CPU = Profile(0.3, 0.004, 5e-5, 2048, 16, 11.0, drafts=3, load=6.0)

# The seed draws a whole run: shrinking it would say nothing.
seeds = st.integers(0, 2**32)
RUN = settings(phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))


@settings(RUN, max_examples=12)
@given(seeds)
def test_a_legal_run_is_never_stalled(seed: int) -> None:
    """Twenty minutes of any legal engine and load are without a stall."""
    assert not legal_run(seed)


@settings(RUN, max_examples=10)
@given(seeds, st.booleans())
@pytest.mark.parametrize("wedge", WEDGES)
def test_a_wedge_is_a_stall_in_time(wedge: str, seed: int, is_warm: bool) -> None:
    """A wedge is found within 15 s, or 10 s after a minute of small steps, and its end within 3 s."""
    run = wedged_run(seed, wedge, is_warm=is_warm)
    assert run.fault is None, run


@pytest.mark.parametrize(
    "profile",
    [pytest.param(GPU, id="gpu"), pytest.param(CPU, id="cpu", marks=pytest.mark.long)],
)
def test_a_day_has_no_stall(profile: Profile) -> None:
    """A day of bursts, long prompts, idle hours, restarts and sleep has no stall."""
    random = Random(1)
    load = bursts(random, DAY, longest=100_000 if profile is GPU else 20_000)
    core = Core(profile, random, load)
    found = false_alarms(
        watch(
            core,
            DAY,
            front_ends=1,
            restarts=[(hour * 3600.0, 90.0) for hour in (3, 9, 17)],
            sleeps=[(hour * 3600.0 + 600, 1200.0) for hour in (5, 6, 20)],
            pauses=[(hour * 3600.0 + 1800, 4.0) for hour in range(24)],
        )
    )
    assert not found
    assert core.steps > 2000


@pytest.mark.skipif(not TRACE.exists(), reason="the trace is not in the repository")
@pytest.mark.parametrize(("profile", "share"), [(GPU, 0.2), (CPU, 0.002)], ids=["gpu", "cpu"])
def test_a_public_trace_has_no_stall(profile: Profile, share: float) -> None:
    """A share of an hour of a public chat service's requests has no stall."""
    random = Random(2)
    core = Core(profile, random, trace(random, share))
    assert not false_alarms(watch(core, 4200, front_ends=1))
    assert core.steps > 1000


def trace(random: Random, share: float) -> Iterator[Request]:
    """Yield a share of the requests of the public trace."""
    with gzip.open(TRACE, "rt") as lines:
        for line in lines:
            request = json.loads(line)
            if random.random() < share:
                yield Request(
                    request["timestamp"] / 1000, request["input_length"], request["output_length"]
                )
