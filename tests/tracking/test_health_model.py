"""Simulated engines: legal runs are never stalled, and a wedge always is, in time and for its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from simulated_engines import NO_OUTPUT, SCHEDULE, WEDGES, Core, Profile, Request, Verdict, watch

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
    assert wedged_run(seed, wedge, is_warm=is_warm) is None


def poisson(
    random: Random,
    rate: float,
    seconds: float,
    prompt: int,
    output: int = 200,
    *,
    blocked: float = 0,
    front_ends: int = 1,
) -> Iterator[Request]:
    """Yield requests at ``rate``, of up to ``prompt`` tokens, of which some are ``blocked``."""
    now = 0.0
    while (now := now + random.expovariate(rate)) < seconds:
        until = now + random.uniform(0, blocked) if random.random() < 0.02 else 0.0
        tokens = int(prompt ** random.random()) + 1
        yield Request(now, tokens, random.randrange(1, output), until, random.randrange(front_ends))


def false_alarms(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts that say stalled."""
    return [verdict for verdict in verdicts if verdict.state == "stalled"]


def legal_run(seed: int) -> list[Verdict]:
    """Run any legal engine with any legal load for 20 minutes; return the false alarms."""
    random = Random(seed)
    has_core = random.random() < 0.85
    front_ends = random.randrange(3) if has_core else random.randrange(1, 3)
    prompt = random.choice((100, 1000, 10_000, 100_000))
    profile = _legal_profile(random, prompt, has_core=has_core)
    load = poisson(
        random,
        10 ** random.uniform(-2, 0),
        1200,
        prompt,
        blocked=60 if has_core else 3,
        front_ends=max(front_ends, 1),
    )
    core = Core(profile, random, load)
    moments = [random.uniform(0, 1200) for _ in range(4)]
    return false_alarms(
        watch(
            core,
            1200,
            front_ends=front_ends,
            has_core=has_core,
            pauses=[(moments[0], random.uniform(0, 4))],
            restarts=[(moments[1], random.uniform(0, 60))] if has_core else [],
            sleeps=[(moments[2], 60.0), (moments[3], 200.0)] if has_core else [],
        )
    )


def _legal_profile(random: Random, prompt: int, *, has_core: bool) -> Profile:
    """Return an engine whose full steps take at most 80 s, and 5 s and 20 ms per token."""
    while True:
        base = 10 ** random.uniform(-2, -0.3)
        per_token = base * 10 ** random.uniform(-3.5, -0.8)
        profile = Profile(
            base,
            per_token,
            per_token * 10 ** random.uniform(-2.5, -1),
            2 ** random.randrange(8, 15 if has_core else 12),
            random.choice((1, 16, 256)),
            random.choice((0, 3, 6, 10)),
            1 + random.random(),
            random.choice((0, 0.01)),
            random.choice((0, 3)),
            6.0 if has_core else 0.0,
        )
        tokens = profile.most_tokens
        slowest = base + tokens * (per_token + profile.per_context * prompt / 1000)
        if slowest * profile.spread <= min(80, 5 + 0.02 * tokens):
            return profile


def wedged_run(seed: int, wedge: str, *, is_warm: bool) -> str | None:
    """Run an engine with small steps into a wedge, early or after a minute, and out of it; return the fault."""
    random = Random(seed)
    at = random.uniform(65, 90) if is_warm else random.uniform(2, 6)
    base = 10 ** random.uniform(-2, -0.7)
    profile = Profile(base, base / 100, 0.0, 2048, 64, 3.0)
    end = at + 40
    load = poisson(random, 1.0, end + 40, 50, 30)
    if wedge == NO_OUTPUT:
        # Steps without output are seen once they outnumber the tokens of all requests.
        end = at + 90
        load = chain(poisson(random, 1.0, at, 50, 30), [Request(at, 50, 30)])
    core = Core(profile, random, load, wedge, at, end)
    expected = "step" if wedge == SCHEDULE else wedge
    visible = math.inf
    found = recovered = math.inf
    reasons: set[str] = set()
    for verdict in watch(core, end + 40, front_ends=1):
        now = verdict.at
        if visible == math.inf and (since := core.visible_since(now)) is not None:
            visible = since
        if verdict.state != "stalled":
            continue
        found = min(found, now)
        recovered = now
        reasons.add(verdict.reason)
    limit = 10.0 if is_warm else 15.0
    if found < at:
        return "false alarm"
    if found - visible > limit or found == math.inf:
        return "late"
    if reasons != {expected}:
        return f"reasons {reasons}"
    return "no recovery" if recovered - end > 3.0 else None
