"""The saturation ratio against a simulated engine whose knee is known, and against all that is odd."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramps import Look, Model, Rate, Simulation, knee, ramp
from sidestep.metrics.saturation import (
    BLOCKED_SECONDS,
    MAX_INTERVAL,
    MAX_UNBLOCKED,
    MAX_WINDOW,
    Load,
    OfferedRate,
    Saturation,
)

MODELS = {
    "batch": Model(),
    "memory": Model(slots=256, room=20_000),
    "small": Model(slots=4, prompt=2000.0),
    "large": Model(slots=256, room=1_000_000, step=(0.02, 0.0001, 0.00001)),
    "long": Model(slots=32, answer=800.0, prompt=3000.0),
}
OTHERS = {
    "prefill": Model(slots=64, prompt=4000.0, answer=50.0),
    "chat": Model(slots=16, prompt=300.0, answer=400.0, step=(0.012, 0.0003, 0.00003)),
    "tight": Model(slots=128, room=60_000, prompt=1500.0, answer=300.0),
}
"""Of other shapes. Constants were chosen on ramps of these as well, with other seeds than ``UNSEEN``."""
UNSEEN = range(500, 503)
"""Seeds on which nothing was chosen."""
ALL = {**MODELS, **OTHERS}
OFF = 0.8
"""Somebody who acts at 1 should not take it back before this."""


@cache
def most(name: str) -> float:
    """Requests a second that the model serves."""
    return knee(ALL[name], seconds=2400)


def told(look: Look) -> Load:
    """What an engine says of itself: not who came, but who had a place and who waits."""
    return Load(
        running=look.running,
        waiting=look.waiting,
        begun=look.arrived - look.waiting,
        arrived=look.arrived,
        generated=look.generated,
        preempted=look.preempted,
    )


def ratios(looks: Iterable[Look]) -> Iterator[tuple[float, float | None]]:
    """Time and ratio."""
    saturation = Saturation()
    for look in looks:
        saturation.update(look.time, told(look))
        yield look.time, saturation.ratio


def changes(found: Iterable[tuple[float, float | None]]) -> list[tuple[float, bool]]:
    """When it became saturated, and when it was no more."""
    state, seen = False, []
    for time, ratio in found:
        if ratio is not None and state != (ratio >= (OFF if state else 1.0)):
            state = not state
            seen.append((time, state))
    return seen


def run(name: str, rate: Rate, seed: int, seconds: float) -> list[tuple[float, float | None]]:
    """A simulated engine under ``rate``, in knees."""
    full = most(name)
    return [*ratios(Simulation(ALL[name], lambda now: full * rate(now), seed).looks(seconds))]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MODELS)
def test_a_ramp_is_seen_within_a_tenth_of_the_knee(name: str, seed: int) -> None:
    """From 0.3 to 1.5 knees within an hour: once, and for good. The constants were chosen on these."""
    line = ramp(0.3, 1.5, 3600)
    seen = changes(run(name, line, seed, 3600))

    assert [state for _, state in seen] == [True]
    assert line(seen[0][0]) == pytest.approx(1.0, abs=0.1)


def test_most_ramps_that_nothing_was_chosen_on_are_seen_as_well() -> None:
    """Nine in ten within a tenth, all within a fifth: at a request a second chance alone is a twentieth."""
    line, off = ramp(0.3, 1.5, 3600), []
    for name in ALL:
        for seed in UNSEEN:
            seen = changes(run(name, line, seed, 3600))
            assert [state for _, state in seen] == [True]
            off.append(abs(line(seen[0][0]) - 1.0))

    assert sum(one <= 0.1 for one in off) >= 0.9 * len(off)
    assert max(off) < 0.2


@pytest.mark.parametrize("share", [0.5, 0.8, 1.1, 1.3])
@pytest.mark.parametrize("name", ALL)
def test_a_steady_load_is_one_state(name: str, share: float) -> None:
    """Below the knee never saturated, above it soon, and then for good; the ratio is the share."""
    found = run(name, lambda _: share, 20, 2400)
    late = [ratio for time, ratio in found if time > 1200 and ratio is not None]

    assert [state for _, state in changes(found)] == [True] * (share > 1)
    if share > 1:
        assert sum(late) / len(late) == pytest.approx(share, abs=0.1)
    assert all(ratio < 1 for ratio in late) or share > 1


@pytest.mark.parametrize("name", ALL)
def test_bursts_that_are_served_in_between_are_no_saturation(name: str) -> None:
    """Twice the knee for 20 s every five minutes; the mean is 0.65."""
    found = run(name, lambda now: 2.0 if now % 300 < 20 else 0.55, 30, 3600)

    assert changes(found) == []


@pytest.mark.parametrize("name", ["batch", "memory", "prefill"])
def test_a_step_is_seen_and_its_end(name: str) -> None:
    """From 0.6 to 1.2 knees and back: within five minutes, with no overshoot beyond a fifth."""
    found = run(name, lambda now: 0.6 if now < 1200 else 1.2 if now < 2400 else 0.5, 31, 3600)
    on, off = changes(found)

    assert 1200 < on[0] < 1500
    assert 2400 < off[0] < 2760
    assert max(ratio or 0 for _, ratio in found) < 1.44


def test_an_idle_engine_asks_for_nothing() -> None:
    """Once the window has passed, and for as long as it is idle."""
    found = run("batch", lambda now: 1.2 if now < 900 else 0.0, 1, 12 * 3600)

    assert {ratio for time, ratio in found if time > 900 + MAX_WINDOW + 300} == {0.0}


def test_nothing_is_said_before_the_engine_was_full() -> None:
    """Nobody knows what it can do."""
    assert {ratio for _, ratio in run("large", lambda _: 0.5, 1, 1800)} == {None}


def overloaded() -> tuple[Saturation, Look]:
    """One that has learned, and the last look at its engine."""
    saturation = Saturation()
    for look in Simulation(MODELS["batch"], lambda _: 1.3 * most("batch"), 1).looks(900):
        saturation.update(look.time, told(look))
    assert saturation.ratio is not None
    return saturation, look


def test_who_has_no_queue_is_served() -> None:
    """Whatever the numbers say, 1 needs a queue that has been there for a while."""
    saturation, look = overloaded()
    assert saturation.ratio is not None
    assert saturation.ratio > 1
    last, each = told(look), (1.3 * most("batch"), most("batch") * MODELS["batch"].answer)

    for second in range(1, int(BLOCKED_SECONDS) + 10):
        load = last._replace(
            waiting=0 if second == 1 else last.waiting,
            begun=last.begun + each[0] * second,
            arrived=last.arrived + each[0] * second,
            generated=last.generated + each[1] * second,
        )
        saturation.update(look.time + second, load)

        # It begins with the first second that both begins and ends with a queue.
        assert (saturation.ratio > MAX_UNBLOCKED) == (second >= BLOCKED_SECONDS + 2)
        assert saturation.ratio >= MAX_UNBLOCKED


def test_an_engine_that_counts_anew_is_another() -> None:
    """Its counters fell: what was learned of the one before says nothing."""
    saturation, last = overloaded()
    for look in Simulation(MODELS["large"], lambda _: 5.0, 1).looks(900):
        saturation.update(last.time + look.time, told(look))
        assert saturation.ratio is None


def test_requests_that_vanish_are_not_divided_by() -> None:
    """Who tells of fewer requests than before is not believed."""
    saturation, last = overloaded()
    load = told(last)._replace(begun=0, generated=last.generated + 2000)
    saturation.update(last.time + 1, load)

    assert saturation.ratio is None


def test_requests_that_are_counted_anew_are_no_fall_of_the_load() -> None:
    """Another Hello's bucket bounds let the histogram begin at 0: what goes on is the same load."""
    saturation, last = overloaded()
    fresh = Saturation()
    for look in Simulation(MODELS["batch"], lambda _: 1.3 * most("batch"), 2).looks(900):
        load, now = told(look), last.time + look.time
        later = load._replace(generated=load.generated + last.generated)
        saturation.update(now, later)
        fresh.update(now, later)

        assert saturation.ratio == fresh.ratio
    assert saturation.ratio is not None


@pytest.mark.parametrize(
    ("running", "begun", "generated"), [(5, 10**8, 0), (5e-324, 1, 1), (5e-324, 10**8, 0)]
)
def test_no_engine_can_say_what_is_divided_by_zero(
    running: float, begun: int, generated: int
) -> None:
    """The exporter's tick reads this: an engine that tells nonsense must not end it."""
    saturation = Saturation()
    load = Load(running, 5, 100, 105, 100, 0)
    for second in range(1, 200):
        saturation.update(float(second), load)
        added = (100, 100) if second == 1 else (begun, generated)
        load = load._replace(
            begun=load.begun + added[0],
            arrived=load.arrived + added[0],
            generated=load.generated + added[1],
            preempted=load.preempted + 1,
        )

        assert saturation.ratio is None or 0.0 <= saturation.ratio < math.inf


def test_a_trend_is_one_of_a_quarter_of_an_hour() -> None:
    """Over less time it is chance: the rate is the mean of the last ten minutes, then ahead of it."""
    offered, rates = OfferedRate(), {}
    for second in range(1800):
        rates[second] = offered.update(float(second), second**2 / 2000)

    assert rates[899] == pytest.approx((899 - 300) / 1000, abs=0.03)
    assert rates[1799] == pytest.approx(1799 / 1000, abs=0.03)


def test_a_gap_is_no_load() -> None:
    """What came in it came sometime: the rate is counted from its end on, the capacity stays."""
    looks = [*Simulation(MODELS["batch"], lambda _: 1.2 * most("batch"), 1).looks(2400)]
    kept = [look for look in looks if not 1200 < look.time <= 1500]
    found = dict(ratios(kept))

    assert 1500 - 1200 > MAX_INTERVAL
    assert found[1200] is not None
    assert found[1501] is None
    after = [ratio for time, ratio in found.items() if time > 1800 and ratio is not None]
    assert after
    assert sum(after) / len(after) == pytest.approx(1.2, abs=0.1)


number = st.integers(0, 10**6)
loads = st.builds(Load, number, number, number, number, number, number)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.floats(0, 700), loads), max_size=60))
def test_whatever_is_told_gives_a_number_or_none(told: list[tuple[float, Load]]) -> None:
    """Also what no engine would tell; time may stand still."""
    saturation, now = Saturation(), 0.0
    for seconds, load in told:
        now += seconds
        saturation.update(now, load)

        assert saturation.ratio is None or 0.0 <= saturation.ratio < math.inf


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.floats(0.5, 9.5), st.integers(0, 300), st.integers(0, 50), st.integers(0, 9000)
        ),
        min_size=50,
        max_size=300,
    ),
    st.integers(0, 3),
)
def test_whatever_is_counted_gives_a_number_or_none(
    told: list[tuple[float, int, int, int]], preempted: int
) -> None:
    """Counters that only grow, with a queue most of the time, so that a ratio is there."""
    saturation, now, begun, generated = Saturation(), 0.0, 0, 0
    for index, (seconds, waiting, more, tokens) in enumerate(told):
        now, begun, generated = now + seconds, begun + more, generated + tokens
        load = Load(32, waiting, begun, begun + waiting, generated, preempted * index)
        saturation.update(now, load)

        assert saturation.ratio is None or 0.0 <= saturation.ratio < math.inf


def test_looks_may_come_at_any_pace() -> None:
    """A busy exporter looks more rarely: every other second gives nearly the same."""
    looks = [*Simulation(MODELS["batch"], lambda _: 1.2 * most("batch"), 2).looks(1800)]
    often, rarely = dict(ratios(looks)), dict(ratios(looks[1::2]))

    pairs = [(often[time], ratio) for time, ratio in rarely.items() if ratio is not None]
    assert len(pairs) > 500
    assert all(one == pytest.approx(two, abs=0.1) for one, two in pairs)
    assert all(before < after for before, after in pairwise(rarely))
