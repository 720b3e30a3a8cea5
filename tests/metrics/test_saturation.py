"""The saturation ratio, compared with simulated engines whose capacity is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramps import Look, Mix, Model, Rate, Simulation, knee
from sidestep.metrics.saturation import (
    BLOCKED_SECONDS,
    MAX_INTERVAL,
    MIN_SECONDS,
    SHORTEST_PERIOD,
    WINDOW_STEPS,
    Load,
    Saturation,
    ShortestStep,
)

MODELS = {
    "16 slots": Model(slots=16),
    "48 slots": Model(slots=48, step=(0.01, 0.0005, 0.00005)),
    "small KV cache": Model(slots=256, room=60_000),
}
"""Engines; steps of the second one get six times as long from an empty batch to a full one."""
CHAT = Mix(prompt=300.0, answer=300.0)
RAG = Mix(prompt=4000.0, answer=150.0)
PREFILL = Mix(prompt=6000.0, answer=20.0)
DOCUMENTS = Mix(prompt=30_000.0, answer=2.0, spread=0.3)
SETTLED = 600.0
"""Seconds after a change by which the ratio is right."""
MEAN = 300.0
"""Seconds over which a ratio is averaged for a comparison: as many requests arrive by chance."""
Ratios = dict[float, float | None]
"""Ratios by time."""


@cache
def capacity(model: Model, mix: Mix) -> float:
    """Return the requests per second that the model can serve."""
    return knee(model, mix)


def load_of(model: Model, look: Look) -> Load:
    """Return the load that an engine reports."""
    return Load(
        running=look.running,
        waiting=look.waiting,
        occupancy=max(look.running / model.slots, look.usage),
        begun=look.begun,
        arrived=look.begun + look.waiting,
        steps=look.steps,
        stamp=look.stamp,
        seen=1e9 + look.time,
        tokens=look.prompted + look.generated,
        budget=model.budget,
    )


def ratios(model: Model, looks: Iterable[Look]) -> Ratios:
    """Return the ratios of an engine that reports ``looks``."""
    saturation, found = Saturation(), {}
    for look in looks:
        saturation.update(look.time, load_of(model, look))
        found[look.time] = saturation.ratio
    return found


def run(
    model: Model,
    mix: Mix | Callable[[float], Mix],
    share: Rate,
    seconds: float,
    seed: int = 7,
) -> Ratios:
    """Return the ratios of a simulated engine whose load is ``share``, in multiples of its capacity."""

    def rate(now: float) -> float:
        return share(now) * capacity(model, mix(now) if callable(mix) else mix)

    return ratios(model, Simulation(model, mix, rate, seed).looks(seconds))


def means(found: Ratios, since: float) -> Iterator[tuple[float, float]]:
    """Yield ends of pieces of MEAN seconds after ``since``, and the mean ratios of these pieces."""
    end = since + MEAN
    while end <= max(found):
        piece = [found[time] for time in found if end - MEAN < time <= end]
        yield end, fmean(ratio for ratio in piece if ratio is not None)
        end += MEAN


def saturated(found: Ratios) -> int:
    """Return the seconds in which the ratio was at least 1."""
    return sum(ratio is not None and ratio >= 1 for ratio in found.values())


@pytest.mark.parametrize("share", [0.5, 1.2])
@pytest.mark.parametrize(("model", "mix"), [*zip(MODELS, (CHAT, RAG, PREFILL), strict=True)])
def test_a_constant_load_is_known_within_15_percent_of_the_knee(
    model: str, mix: Mix, share: float
) -> None:
    """Below four fifths of the knee the ratio is below 1; above the knee it stays above."""
    found = run(MODELS[model], mix, lambda _: share, 1800)

    for _, ratio in means(found, SETTLED):
        assert ratio == pytest.approx(share, abs=0.15)
    if share < 1:
        assert saturated(found) <= 30
    else:
        assert saturated({t: r for t, r in found.items() if t > SETTLED}) == 1200


@pytest.mark.parametrize("share", [0.5, 1.2])
@pytest.mark.parametrize("answer", [1.0, 20.0])
def test_chunks_of_very_long_prompts_are_load(answer: float, share: float) -> None:
    """Where no step is short, since each computes all the tokens that it may."""
    model = Model(slots=64, budget=512, room=400_000)
    found = run(model, dataclasses.replace(DOCUMENTS, answer=answer), lambda _: share, 3600)

    # A queue of an engine that begins one request in two seconds is long or short by chance.
    mean = fmean(ratio for time, ratio in found.items() if time > SETTLED and ratio is not None)
    assert mean == pytest.approx(share, abs=0.15)


CHANGES = {
    "chat to RAG": (CHAT, 0.7, RAG, 0.95),
    "chat to too much RAG": (CHAT, 0.7, RAG, 1.2),
    "RAG to chat": (RAG, 0.95, CHAT, 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_mix_is_known_after_10_minutes(change: str) -> None:
    """Nothing that was learned about the requests before it stands in the way."""
    before, low, after, high = CHANGES[change]
    found = run(
        MODELS["48 slots"],
        lambda now: before if now < 1200 else after,
        lambda now: low if now < 1200 else high,
        3600,
    )

    for _, ratio in means(found, 1200 + SETTLED):
        assert ratio == pytest.approx(high, abs=0.15)
    first = next((t for t, r in found.items() if t > 1200 and r is not None and r >= 1), math.inf)
    assert first < 1200 + 240 or high < 1
    assert saturated({t: r for t, r in found.items() if t > 1200 + SETTLED}) == 0 or high > 0.8


@pytest.mark.parametrize("model", ["16 slots", "small KV cache"])
def test_bursts_of_20_seconds_hardly_saturate(model: str) -> None:
    """At two and a half times a mean load of 0.7, the ratio is 1 or more for at most 3 % of an hour."""
    found = run(MODELS[model], RAG, lambda now: 1.75 if now % 120 < 20 else 0.49, 3600)

    for _, ratio in means(found, SETTLED):
        assert ratio == pytest.approx(0.7, abs=0.2)
    assert saturated(found) <= 0.03 * 3600


def test_a_prefix_cache_that_fills_relieves_the_engine() -> None:
    """The same requests are less and less of what the engine can serve."""
    model = MODELS["16 slots"]
    rate = 0.8 * capacity(model, RAG)

    def mix(now: float) -> Mix:
        return Mix(RAG.prompt, RAG.answer, cached=round(min(now / 1200, 1.0) * 0.8, 1))

    looks = Simulation(model, mix, lambda _: rate, 7).looks(3000)
    found = ratios(model, looks)

    assert saturated(found) <= 60
    for _, ratio in means(found, 1200 + SETTLED):
        assert ratio == pytest.approx(rate / capacity(model, mix(3000)), abs=0.15)


def test_there_is_no_ratio_in_the_first_minute() -> None:
    """A new engine has none, and an idle one has 0."""
    found = run(MODELS["16 slots"], CHAT, lambda _: 0.0, 200)

    assert {ratio for time, ratio in found.items() if time <= 60} == {None}
    assert {ratio for time, ratio in found.items() if time > 61} == {0.0}


def load(second: float, **fields: Any) -> Load:
    """Return the load of an engine with 10 steps and 2 requests per second."""
    requests = 2 * second
    known = Load(4, 0, 0.5, requests, requests, 10 * second, second, 1e9 + second)
    return known._replace(**fields)


def after(seconds: int, **fields: Any) -> Saturation:
    """Return the estimate after a constant load."""
    saturation = Saturation()
    for second in range(seconds):
        saturation.update(second, load(second, **fields))
    return saturation


def test_an_engine_whose_steps_are_never_shorter_is_as_saturated_as_its_batch_is_full() -> None:
    """An engine that counts no steps, too."""
    assert after(600).ratio == pytest.approx(0.5, abs=0.001)
    assert after(600, steps=None).ratio == 0.5
    assert after(600, steps=None).shortest.seconds is None


def test_longer_steps_are_load() -> None:
    """Half of each step is load, with a batch that is half full: three quarters of what the engine can serve."""
    saturation = Saturation()
    for second in range(1200):
        steps = 20 * second if second < 10 else 200 + 10 * (second - 10)
        saturation.update(second, load(second, steps=steps))

    assert saturation.shortest.seconds == pytest.approx(0.05)
    assert saturation.shortest.measured == pytest.approx(1e9 + 1)
    assert saturation.ratio == pytest.approx(0.75, abs=0.005)


def test_requests_that_wait_take_all_places() -> None:
    """The estimate does not depend on what limits the batch."""
    assert after(200, waiting=1).ratio == 1.0


def test_a_stopped_engine_with_a_queue_is_saturated() -> None:
    """Nothing runs and everything waits."""
    saturation = after(300)
    for second in range(300, 1200):
        frozen = load(300, running=0, waiting=9, arrived=609)
        saturation.update(second, frozen)
    assert saturation.ratio is not None
    assert saturation.ratio >= 1.0


def test_a_queue_of_five_minutes_is_saturation() -> None:
    """Clients that give up make the queue shrink, and fewer arrive than begin."""
    saturation = Saturation()
    for second in range(400):
        given_up = load(second, waiting=3, arrived=1.8 * second)
        saturation.update(second, given_up)
        if second == BLOCKED_SECONDS - 1:
            assert saturation.ratio == pytest.approx(0.9, abs=0.01)

    assert saturation.ratio == 1.0


def test_a_short_queue_of_a_slow_engine_is_no_overload() -> None:
    """Two requests that wait are as many as the engine begins in two minutes."""
    saturation = Saturation()
    for second in range(600):
        begun, waiting = second // 60, 2 if second >= 590 else 0
        one = load(second, begun=begun, waiting=waiting, arrived=begun + waiting)
        saturation.update(second, one)

    assert saturation.ratio == pytest.approx(0.63, abs=0.05)


def test_a_restarted_engine_starts_anew() -> None:
    """The shortest step of the previous process is forgotten, and the ratio of the first minute is unknown."""
    saturation = after(600)
    saturation.update(600, load(0))
    assert saturation.ratio is None
    assert saturation.shortest.seconds is None
    for second in range(1, 600):
        saturation.update(600 + second, load(second))
        assert (saturation.ratio is None) == (second < MIN_SECONDS)


def test_a_gap_is_not_counted() -> None:
    """A gap leaves what was learned, and adds nothing."""
    fresh = after(int(MIN_SECONDS) - 10)
    fresh.update(600, load(600))
    fresh.update(601, load(601))
    assert fresh.ratio is None
    saturation = after(600, waiting=1)
    saturation.update(600 + 2 * MAX_INTERVAL, load(2000))
    assert saturation.ratio == 1.0
    saturation.update(601 + 2 * MAX_INTERVAL, load(2001))

    assert saturation.ratio == pytest.approx(1.0, abs=0.01)


def counted(steps: float, stamp: float, seen: float) -> Load:
    """Return a load with these steps."""
    return load(0)._replace(steps=steps, stamp=stamp, seen=seen)


def test_the_shortest_step_is_forgotten_after_a_day() -> None:
    """Half a day is the least for which it is remembered."""
    shortest, steps = ShortestStep(), 0
    for half in range(4):
        for second in range(0, int(SHORTEST_PERIOD), 3600):
            now = half * SHORTEST_PERIOD + second
            steps += WINDOW_STEPS * (100 if now < 7200 else 1)
            shortest.update(now, counted(steps, now, 1e9 + now))
            remembered = 3600 <= now < 2 * SHORTEST_PERIOD
            assert (shortest.measured == 1e9 + 3600) == remembered

    assert shortest.seconds == pytest.approx(360)


def test_pauses_make_no_step_shorter() -> None:
    """Neither does a stamp that goes back, as after a restart of the host."""
    shortest = ShortestStep()
    for steps, stamp in ((0, 0), (9, 0.3), (10, 1.0), (10, 60.0), (20, 61.0), (30, 5.0), (35, 5.1)):
        shortest.update(stamp, counted(steps, stamp, stamp))

    assert shortest.seconds == pytest.approx(0.1)


number = st.integers(0, 10**6)
share = st.floats(0, 2)
loads = st.builds(
    Load, number, number, share, number, number, st.none() | number, st.floats(0, 1e6), number
)


@given(st.lists(st.tuples(st.floats(0, 700), loads), max_size=60))
def test_any_load_gives_a_number_or_none(reports: list[tuple[float, Load]]) -> None:
    """Loads may be impossible, and time may stand still."""
    saturation, now = Saturation(), 0.0
    for seconds, one in reports:
        now += seconds
        saturation.update(now, one)

        assert saturation.ratio is None or 0.0 <= saturation.ratio < math.inf
