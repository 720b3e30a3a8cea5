"""The simulated engine does what queueing says, so that a signal can be held against its knee."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramps import Model, Simulation, knee, ramp

BATCH = Model()
MEMORY = Model(slots=256, room=20_000)
SMALL = Model(slots=4, prompt=2000.0)
MODELS = {"batch": BATCH, "memory": MEMORY, "small": SMALL}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=10)
@given(share=st.floats(0.1, 2.0), seed=st.integers(0, 1000))
def test_every_request_is_somewhere(name: str, share: float, seed: int) -> None:
    """Waiting, running or finished; in the limits of the engine; totals never fall."""
    model = MODELS[name]
    before = None
    for look in Simulation(model, lambda _: 8 * share, seed).looks(60):
        assert look.arrived == look.waiting + look.running + look.finished
        assert look.running <= model.slots
        assert 0 <= look.usage <= 1
        assert before is None or all(a <= b for a, b in zip(before[4:], look[4:], strict=True))
        before = look


@pytest.mark.parametrize("name", MODELS)
def test_every_token_is_made_once(name: str) -> None:
    """Also those of requests that lost their place on the way, once nobody comes any more."""
    run = Simulation(MODELS[name], lambda now: 10.0 if now < 60 else 0.0, seed=1)
    last = list(run.looks(3000))[-1]

    assert last.finished == last.arrived
    assert last.generated == run.asked
    assert last.usage == 0


def test_the_knee_of_a_full_batch_is_known() -> None:
    """Slots over the time that a request holds one: steps of a full batch, as many as its answer."""
    base, each, token = BATCH.step
    per_request = BATCH.answer + 0.5
    step = base + each * BATCH.slots + token * BATCH.prompt * BATCH.slots / per_request

    assert knee(BATCH) == pytest.approx(BATCH.slots / (per_request * step), rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_queues_grow_beyond_the_knee_only(name: str) -> None:
    """A tenth below it all that arrives is finished, a tenth above it a tenth is left waiting."""
    model = MODELS[name]
    most = knee(model)
    below, above = (
        list(Simulation(model, lambda _, r=share * most: r, seed=3).looks(1200))[-1]  # type: ignore[misc]
        for share in (0.85, 1.25)
    )

    assert below.waiting < 0.05 * below.arrived
    assert above.waiting == pytest.approx(0.2 * above.arrived, rel=0.35)


def test_memory_binds_before_slots_and_preempts() -> None:
    """Where the KV cache is small the batch never fills, and requests lose their place."""
    last = list(Simulation(MEMORY, lambda _: 50.0, seed=1).looks(300))[-1]

    assert last.running < MEMORY.slots / 2
    assert last.usage > 0.8
    assert last.preempted > 0
    assert list(Simulation(BATCH, lambda _: 50.0, seed=1).looks(300))[-1].preempted == 0


def test_a_ramp_is_a_line_that_ends() -> None:
    """Its end is held."""
    rate = ramp(1.0, 3.0, 100.0)

    assert [rate(0.0), rate(50.0), rate(100.0), rate(500.0)] == [1.0, 2.0, 3.0, 3.0]
