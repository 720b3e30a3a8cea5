"""Looks at statistics that find the ring full come to the same page as if each had arrived."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from intakes import Fed, lines
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import encode_item
from sidestep.engines.triton.wire import (
    Batch,
    InferenceStats,
    Memory,
    ModelStats,
    Responses,
    Timed,
    TritonStats,
)
from sidestep.protocol.messages import EngineInfo

MODELS = [
    EngineInfo(
        f"triton/s/{name}/1",
        "triton",
        {"model": name, "version": "1"},
        features=["executes", "failures", "response_cache"],
    )
    for name in ("a", "b")
]

PASSING = (
    "sidestep_triton_interval_mean_seconds",
    "sidestep_triton_busy_ratio",
    "sidestep_triton_idle_seconds",
)
"""Gauges that may have no sample any more, which what was folded does not tell: the next look does."""

small = st.integers(0, 6)
timed = st.builds(Timed, small, small)
batches = st.dictionaries(st.integers(1, 5), st.tuples(small, small, small, small), max_size=3).map(
    lambda found: tuple(Batch(size, *numbers) for size, numbers in sorted(found.items()))
)
looks = st.builds(
    ModelStats,
    small.map(lambda n: 1000 * n),
    small,
    small,
    st.builds(InferenceStats, timed, timed, timed, timed, timed, timed, timed, timed),
    batches,
    st.none() | st.builds(Responses, timed, timed, timed, timed, timed),
    st.sampled_from([(), (Memory("GPU", 1, 7),), (Memory("CPU"), Memory("GPU", 0, 9))]),
)
"""Two of them rarely go on from one another: most numbers are lower now and then."""


def more(stats: ModelStats, n: int) -> ModelStats:
    """One that goes on from ``stats``."""
    known = stats.inference_stats
    return ModelStats(
        stats.last_inference + 1000 * n,
        stats.inference_count + n,
        stats.execution_count + n,
        InferenceStats(Timed(known.success.count + n, known.success.ns + 3 * n), *_after(known)),
        tuple(Batch(b.batch_size, b.count + n, b.compute_input_ns + n) for b in stats.batch_stats),
        stats.response_stats,
        stats.memory_usage,
    )


def _after(known: InferenceStats) -> tuple[Any, ...]:
    return tuple(getattr(known, name) for name in InferenceStats.__struct_fields__[1:])


@st.composite
def histories(draw: st.DrawFn) -> list[bytes]:
    """Looks at two models that grow, begin anew, leave and come back."""
    found: list[bytes] = []
    now: list[ModelStats | None] = [None, None]
    for second in range(draw(st.integers(1, 25))):
        engine = draw(st.integers(0, 1))
        known = now[engine]
        step = draw(st.sampled_from(["more", "more", "same", "other", "gone"]))
        if step == "gone":
            known = None
        elif step == "other" or known is None:
            known = draw(looks)
        elif step == "more":
            known = more(known, draw(st.integers(1, 4)))
        now[engine] = known
        stamp = 10.0 + second
        found.append(encode_item(TritonStats(engine, stamp, 1e9 + stamp, known, 2)))
    return found


@given(histories(), st.data())
@settings(max_examples=200)
def test_wherever_it_begins_and_ends_nothing_is_lost(
    items: list[bytes], data: st.DataObject
) -> None:
    """Any cut of any history into sent and folded parts, over restarts of the poller's process."""
    whole, parted = Fed(), Fed()
    for fed in (whole, parted):
        fed.greet("p", MODELS)
    whole.items("p", items)
    at = 0
    while at < len(items):
        part = items[at : at + data.draw(st.integers(1, len(items)))]
        at += len(part)
        if data.draw(st.booleans()):
            parted.items("p", part)
            continue
        folder = ItemFolder()
        for item in part:
            assert folder.fold(item, MODELS)
        folded = folder.seal()
        parted.aggregate("p", folded.items, folded.frames)

    assert parted.rejected == {}
    assert set(lines(whole.page, *PASSING)) == set(lines(parted.page, *PASSING))
