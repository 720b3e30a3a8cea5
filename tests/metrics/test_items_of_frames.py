"""Items of one frame, applied one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from intakes import Fed
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import (
    CacheStats,
    CUDAGraphStat,
    SchedulerIterationDetails,
    SchedulerStats,
    SpecDecodingStats,
    VllmSleep,
    VllmStep,
)
from sidestep.metrics.engine import Engine
from sidestep.metrics.native_histogram import NativeHistogram, NativeSettings
from sidestep.metrics.recent_steps import RecentSteps
from sidestep.protocol.iteration_stats import (
    FinishedRequestStats,
    IterationStats,
    KVCacheEvictionEvent,
    Run,
)
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples

ENGINES = [
    EngineInfo(f"e{number}", "vllm", {"engine": str(number), "model_name": "m"})
    for number in range(2)
]
counts = st.integers(0, 5000)
seconds = st.floats(-1.0, 1e4) | st.sampled_from([0.0, 0.01, 2e15, math.nan, math.inf])
latencies = st.lists(seconds, max_size=6) | st.lists(seconds, min_size=40, max_size=60)
"""The wire format accepts these numbers: histograms check each value."""
numbers = st.floats(-1.0, 1e4)
adapters = st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), max_size=2)
caches = st.none() | st.builds(
    CacheStats, st.booleans(), st.integers(0, 2), counts, counts, hits_by_source=st.just({})
)
schedulers = st.builds(
    SchedulerStats,
    counts,
    counts,
    kv_cache_usage=st.floats(0, 1),
    num_kv_fetch_reqs_by_stage=st.just({}) | st.just({"in_progress": 3}),
    iteration_details=st.none()
    | st.builds(SchedulerIterationDetails, counts, counts, elapsed_ms=st.floats(0, 100)),
    prefix_cache_stats=caches,
    kv_cache_eviction_events=st.lists(
        st.builds(KVCacheEvictionEvent, numbers, numbers, st.lists(numbers, max_size=3)), max_size=3
    ),
    spec_decoding_stats=st.none()
    | st.builds(SpecDecodingStats, counts, counts, counts, counts, st.lists(counts, max_size=3)),
    running_lora_adapters=adapters,
    waiting_lora_adapters=adapters,
    cudagraph_stats=st.none() | st.builds(CUDAGraphStat, counts, runtime_mode=st.just("FULL")),
)
finished = st.builds(
    FinishedRequestStats,
    st.integers(0, 6),
    st.none() | numbers,
    st.none() | counts,
    num_generation_tokens=st.none() | counts,
    max_tokens_param=st.none() | counts,
)
iterations = st.builds(
    IterationStats,
    counts,
    num_prompt_tokens=counts,
    finished_requests=st.lists(finished, max_size=14),
    n_params_iter=st.lists(st.integers(0, 30), max_size=3),
    time_to_first_tokens_iter=latencies,
    inter_token_latencies_iter=latencies,
    inter_token_latencies_iter_runs=st.lists(st.builds(Run, numbers, counts), max_size=2),
)
engines = st.integers(0, 1)
stamps = st.floats(0, 10)
steps = st.builds(
    VllmStep,
    engines,
    stamps,
    stamps,
    st.none() | schedulers,
    st.none() | iterations,
    caches,
    st.booleans(),
)
others = st.builds(VllmSleep, engines, stamps, st.integers(0, 1), st.integers(0, 2)) | st.builds(
    Samples, engines, stamps, st.just([Family("x:y_total", "counter", samples=[Sample(value=2.0)])])
)
poison = st.sampled_from([b"\xc0", b"\x92\xa2vs\x00", encode_item(VllmStep(9, 1.0, 1.0))])
encoded = st.one_of(steps, steps, steps, others).map(encode_item)
contents = st.lists(st.one_of(encoded, encoded, encoded, poison), min_size=8, max_size=30)


def fed(frames: Sequence[Sequence[bytes]], *, native: bool = False) -> Fed:
    """Return an intake to which one stream has sent ``frames``."""
    made = Fed(native=NativeSettings({}, lambda: 1.0) if native else None)
    made.send_hello("s", ENGINES)
    for items in frames:
        made.items("s", items)
    return made


def state(engine: Engine) -> list[Any]:
    """Return everything of ``engine`` that items change."""
    return [
        engine.values,
        engine.keyed,
        [None if h is None else (h.counts, h.sum) for h in engine.histograms],
        [_native(h) for h in engine.histograms if isinstance(h, NativeHistogram)],
        engine.gauge_stamp,
        engine.part(RecentSteps).held_tokens,
        engine.exposed_paths,
        engine.last_seen,
        [(h.queries, h.hits) for h in engine.part(RecentSteps).hit_windows],
        {name: family.children for name, family in engine.open_families.items()},
    ]


def _native(histogram: NativeHistogram) -> tuple[int, int, dict[int, int]]:
    return histogram.schema, histogram.zeros, histogram.buckets


@given(contents, st.booleans())
def test_items_of_one_frame_equal_single_items(items: list[bytes], native: bool) -> None:
    """This holds for all engines and with invalid items in between."""
    together, alone = fed([items], native=native), fed([[item] for item in items], native=native)

    for engine in alone.intake.registry.engines.values():
        other = together.intake.registry.engines[engine.id]
        assert state(other) == state(engine)
    assert together.rejected == alone.rejected
    assert together.intake.items == alone.intake.items


def test_failing_histogram_costs_only_its_engine() -> None:
    """The failure is counted for each item."""
    made = fed([])
    broken, whole = made.intake.registry.engines.values()
    broken.histogram(broken.layout.find("vllm:iteration_tokens_total").slots[0]).counts = []
    steps = [
        VllmStep(engine, 1.0, 1.0, SchedulerStats(), IterationStats(2))
        for engine in (0, 1)
        for _ in range(8)
    ]
    message = msgspec.msgpack.encode(["B", 1, 1, [msgspec.Raw(encode_item(s)) for s in steps]])
    made.intake.accept(b"s", [message], 0.0)
    while made.intake.busy:
        made.intake.work()

    slot = whole.layout.find("vllm:iteration_tokens_total").slots[0]
    assert sum(whole.histogram(slot).counts) == 8
    assert made.rejected == {("bug",): 8}
