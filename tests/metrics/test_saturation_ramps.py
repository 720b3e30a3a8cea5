"""The simulated engine that tests of saturation use, compared with queueing theory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramps import Mix, Model, Simulation, knee

BATCH = Model()
MEMORY = Model(slots=256, room=20_000)
MIX = Mix()
MODELS = {
    "batch": (BATCH, MIX),
    "memory": (MEMORY, MIX),
    "small": (Model(slots=4), Mix(prompt=2000.0)),
    "chunks": (Model(budget=256), Mix(prompt=2000.0, answer=20.0)),
}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=10)
@given(share=st.floats(0.1, 2.0), seed=st.integers(0, 1000))
def test_every_request_waits_runs_or_has_finished(name: str, share: float, seed: int) -> None:
    """Limits of the engine hold, and totals never decrease."""
    model, mix = MODELS[name]
    before = None
    for look in Simulation(model, mix, lambda _: 8 * share, seed).looks(60):
        assert look.arrived == look.waiting + look.running + look.finished
        assert look.running <= model.slots
        assert 0 <= look.usage <= 1
        assert look.finished <= look.begun <= look.arrived
        assert before is None or all(a <= b for a, b in zip(before[4:], look[4:], strict=True))
        before = look


@pytest.mark.parametrize("name", MODELS)
def test_every_token_is_generated_once(name: str) -> None:
    """This includes tokens of preempted requests."""
    run = Simulation(*MODELS[name], lambda now: 10.0 if now < 60 else 0.0, seed=1)
    last = list(run.looks(3000))[-1]

    assert last.finished == last.begun == last.arrived
    assert last.generated == run.asked
    assert last.usage == 0


def test_capacity_of_a_full_batch_is_slots_over_service_time() -> None:
    """The service time is that of a full batch."""
    base, each, token = BATCH.step
    step = base + each * BATCH.slots + token * MIX.prompt * BATCH.slots / MIX.answer

    assert knee(BATCH, MIX) == pytest.approx(BATCH.slots / (MIX.answer * step), rel=0.05)


def test_capacity_of_a_prefill_bound_engine_is_that_of_full_steps() -> None:
    """Each of its steps computes as many prompt tokens as its budget leaves."""
    model, mix = MODELS["chunks"]
    looks = list(Simulation(model, mix, lambda _: 0.0, 1, backlog=True).looks(600))
    seconds, computed = looks[-1].stamp - looks[60].stamp, looks[-1].prompted - looks[60].prompted

    assert looks[-1].running < model.slots
    assert computed / seconds == pytest.approx(
        (model.budget - looks[-1].running) / (0.02 + 0.0002 * looks[-1].running + 0.00002 * 256),
        rel=0.1,
    )


def test_cached_prompts_cost_nothing() -> None:
    """An engine that need not compute nine tenths of its prompts serves more requests."""
    prefill = Mix(prompt=4000.0, answer=20.0)
    hits = Mix(prompt=4000.0, answer=20.0, cached=0.9)

    assert knee(BATCH, hits) > 2 * knee(BATCH, prefill)


@pytest.mark.parametrize("name", MODELS)
def test_queue_grows_only_above_the_capacity(name: str) -> None:
    """Below it, all requests finish; above it, the excess waits."""
    model, mix = MODELS[name]
    most = knee(model, mix)
    below, above = (
        list(Simulation(model, mix, lambda _, r=share * most: r, seed=3).looks(1200))[-1]  # type: ignore[misc]
        for share in (0.85, 1.25)
    )

    assert below.waiting < 0.05 * below.arrived
    assert above.waiting == pytest.approx(0.2 * above.arrived, rel=0.35)


def test_small_kv_cache_preempts_before_the_batch_is_full() -> None:
    """A large one never preempts."""
    last = list(Simulation(MEMORY, MIX, lambda _: 50.0, seed=1).looks(300))[-1]

    assert last.running < MEMORY.slots / 2
    assert last.usage > 0.8
    assert last.preempted > 0
    assert list(Simulation(BATCH, MIX, lambda _: 50.0, seed=1).looks(300))[-1].preempted == 0
