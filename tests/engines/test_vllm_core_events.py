"""Request and block events as they show on the page of an engine whose core is tapped."""

from __future__ import annotations

from typing import Any

import pytest

from rendered import render
from sidestep.engines.items import Item
from sidestep.engines.vllm.wire import SchedulerStats, VllmRejection, VllmStep
from sidestep.errors import WireError
from sidestep.metrics.histogram import Histogram
from sidestep.protocol.block_events import (
    ALLOCATED,
    EVICTED,
    RESET,
    TOUCHED,
    BlockEvents,
    CacheChange,
    CacheEvents,
)
from sidestep.protocol.iteration_stats import KVCacheEvictionEvent
from sidestep.protocol.request_events import (
    LIMITS,
    Event,
    Finished,
    Iteration,
    Output,
    Preempted,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.tracking.kv_blocks.physical import SLICE
from vllm_bench import Bench


@pytest.fixture
def bench() -> Bench:
    """One tapped engine."""
    made = Bench()
    made.engine(
        features=["engine_core", "kv_cache_metrics", "lora"], info={"lora": {"max_lora": "2"}}
    )
    return made


def events(*found: Event, source: int = 1) -> RequestEvents:
    """An item of these."""
    return RequestEvents(0, 1.0, source, list(found))


def step(stamp: float, *numbers: int, **more: Any) -> Iteration:
    """An iteration of 5 ms in which each of these got a token."""
    return Iteration(stamp - 0.005, stamp, 100.0 + stamp, [Output(stamp, list(numbers))], **more)


def sample(bench: Bench, name: str) -> tuple[int, float]:
    """Return count and sum of the only series of a histogram."""
    histogram = bench.value(name)
    assert isinstance(histogram, Histogram)
    return sum(histogram.counts), histogram.sum


def test_a_steps_requests_and_tokens_are_observed(bench: Bench) -> None:
    """By phase, with the tokens that attention reads and those that wait."""
    bench.apply(
        events(
            Queued(1, 1.0, 100.0, 8),
            Queued(2, 1.0, 100.0, 30),
            Scheduled(1, 1.5),
            step(2.0, scheduled=[1], tokens=[8]),
            step(3.0, 1, kv_tokens=8),
            step(3.25, 1, kv_tokens=9),
        )
    )

    count, seconds = sample(bench, "sidestep_iteration_duration_seconds")
    assert count == 3
    assert seconds == pytest.approx(0.015)
    assert sample(bench, "sidestep_iteration_interval_seconds") == (2, 1.25)
    assert sample(bench, "sidestep_iteration_prefill_requests") == (3, 2.0)
    assert sample(bench, "sidestep_iteration_prefill_tokens") == (3, 9.0)
    assert sample(bench, "sidestep_iteration_decode_requests") == (3, 1.0)
    assert sample(bench, "sidestep_iteration_decode_tokens") == (3, 1.0)
    assert sample(bench, "sidestep_iteration_kv_tokens") == (3, 17.0)
    assert sample(bench, "sidestep_iteration_waiting_tokens") == (3, 90.0)


def test_time_and_steps_are_counted_by_limit(bench: Bench) -> None:
    """Also by those that have not held, and the backlog is of the last event."""
    first, second = step(2.0, 1, limit=LIMITS.index("slots")), step(5.0, limit=0)
    bench.apply(
        events(
            Queued(1, 1.0, 100.0, 8), Queued(2, 1.0, 100.0, 30), Scheduled(1, 1.5), first, second
        )
    )

    assert bench.values("sidestep_step_limit_seconds_total") == {
        (limit,): 3.0 if limit == "slots" else 0 for limit in LIMITS
    }
    assert bench.values("sidestep_steps_total") == {
        (limit,): int(limit == "slots") for limit in LIMITS
    }
    page = render(bench.registry).decode()
    assert 'sidestep_step_limit_seconds_total{engine="0",limit="slots",model_name="m"} 3' in page
    assert 'sidestep_waiting_prompt_tokens{engine="0",model_name="m"} 30' in page
    assert 'sidestep_unfinished_prefill_tokens{engine="0",model_name="m"} 30' in page


@pytest.mark.parametrize(
    ("waiting", "deferred", "states"), [(2, 5, (1, 5, 1)), (0, 5, (0, 4, 1)), (0, 0, (0, 0, 0))]
)
def test_requests_are_counted_by_state(
    bench: Bench, waiting: int, deferred: int, states: tuple[int, int, int]
) -> None:
    """The numbers are the scheduler's; preempted requests do not count as waiting or deferred."""
    bench.apply(
        events(Queued(1, 1.0), Scheduled(1, 1.0), Preempted(1, 2.0), Queued(2, 2.0)),
        VllmStep(0, 2.0, 2.0, SchedulerStats(3, waiting, deferred)),
    )

    names = ("waiting",), ("deferred",), ("preempted",)
    expected = dict(zip(names, states, strict=True))
    assert bench.values("sidestep_requests") == {**expected, ("running",): 3, ("swapped",): 0}


def test_adapters_of_queued_requests_are_apart_from_those_that_run(bench: Bench) -> None:
    """VLLM names each active adapter in both lists, and none that only waits."""
    asked: list[Event] = [
        Queued(1, 1.0, adapter="a"),
        Scheduled(1, 1.5),
        Queued(2, 1.0, adapter="b"),
    ]
    active = SchedulerStats(1, 1, running_lora_adapters={"a": 1}, waiting_lora_adapters={"a": 0})
    bench.apply(events(*asked), VllmStep(0, 2.0, 2.0, active))

    assert bench.values("vllm:lora_requests_info") == {("2", "a", "b"): 2.0}
    assert bench.values("sidestep_lora_requests") == {("a", "running"): 1, ("b", "waiting"): 1}

    ends = [Finished(number, 3.0, 3.0, 0, 1, 1) for number in (1, 2)]
    bench.apply(events(*ends), VllmStep(0, 3.0, 3.0, SchedulerStats()))

    assert bench.values("vllm:lora_requests_info") == {("2", "", ""): 3.0}
    assert bench.values("sidestep_lora_requests") == {}


def test_an_engine_without_its_tap_loses_the_taps_gauges(bench: Bench) -> None:
    """They would never change again."""
    bench.apply(
        events(Queued(1, 1.0, adapter="old")),
        BlockEvents(0, 1.0, 1, 1.0, bytes([ALLOCATED]), [1], [1.0]),
        VllmStep(0, 2.0, 2.0, SchedulerStats(0, 1)),
    )
    assert bench.values("sidestep_requests") != {}

    bench.engine(features=["lora"], info={"lora": {"max_lora": "2"}})
    bench.apply(VllmStep(0, 3.0, 3.0, SchedulerStats(1, 4, running_lora_adapters={"new": 1})))

    assert bench.values("sidestep_requests") == {}
    assert bench.values("sidestep_lora_requests") == {("new", "running"): 1}
    assert bench.values("sidestep_kv_tracked_blocks") == {}
    assert bench.values("sidestep_untracked_requests_total")["restart",] == 1
    assert bench.registry.sample_groups.capacity.engines == 0


def test_the_longest_preemption_is_exposed(bench: Bench) -> None:
    """The longest preemption is as of the last step, and 0 without one."""
    bench.apply(events(Queued(1, 1.0), Scheduled(1, 1.0), Preempted(1, 2.0)))
    bench.apply(RequestEvents(0, 6.5, 1), VllmStep(0, 6.5, 6.5, SchedulerStats(0, 1)))
    waited = bench.value("sidestep_longest_preemption_seconds")
    bench.apply(events(Scheduled(1, 7.0)), VllmStep(0, 7.0, 7.0, SchedulerStats(1)))

    assert (4.5, 0.0) == (waited, bench.value("sidestep_longest_preemption_seconds"))


def test_a_reset_is_observed_without_further_items(bench: Bench) -> None:
    """Each tick of the exporter observes a slice of the blocks."""
    count = 3 * SLICE
    for start in range(0, count, SLICE):
        blocks = list(range(start, start + SLICE))
        bench.apply(BlockEvents(0, 1.0, 1, 1.0, bytes([ALLOCATED] * SLICE), blocks, [1.0] * SLICE))
    bench.apply(BlockEvents(0, 2.0, 1, 1.0, bytes([RESET]), [0], [2.0]))
    first, _ = sample(bench, "sidestep_kv_block_reset_age_seconds")
    for _ in range(4):
        bench.applier.flush_block_lifetimes()

    assert first < count
    assert sample(bench, "sidestep_kv_block_reset_age_seconds") == (count, float(count))
    assert bench.value("sidestep_kv_tracked_blocks") == 0


def test_refusals_are_counted_by_reason(bench: Bench) -> None:
    """The family has those of the front end and of the core."""
    bench.apply(
        VllmRejection(0, 1.0, "max_num_queued_reqs"),
        events(Queued(1, 1.0), Finished(1, 1.0, 1.0, 1, refused="prompt_too_long")),
    )

    refused = bench.values("sidestep_refused_requests_total")
    assert (1, 1, 0) == (
        refused["max_num_queued_reqs",],
        refused["prompt_too_long",],
        refused["max_num_queued_tokens",],
    )
    assert sum(bench.values("vllm:admission_rejections_total").values()) == 1


def test_unknown_intervals_are_counted(bench: Bench) -> None:
    """Untracked requests by reason, and intervals that would be negative."""
    bench.apply(
        events(step(2.0, 1), step(1.0, 1)),
        events(Queued(2, 1.0, 5000.0), step(2.0, 2), source=2),
    )

    untracked = bench.values("sidestep_untracked_requests_total")
    assert (1, 1) == (untracked["unknown",], untracked["restart",])
    # The step before the one before it, and an arrival in the future.
    assert bench.value("sidestep_refused_observations_total") == 3


def test_tracked_blocks_feed_the_engines_families(bench: Bench) -> None:
    """Families of this project have what vLLM's collector omits."""
    kinds = [ALLOCATED, *[TOUCHED] * 5, EVICTED, ALLOCATED, RESET]
    stamps = [1.0, 1.25, 2.0, 3.0, 4.0, 5.0, 9.0, 9.0, 11.0]
    bench.apply(BlockEvents(0, 1.0, 1, 0.5, bytes(kinds), [7] * 8 + [0], stamps))

    assert sample(bench, "vllm:kv_block_lifetime_seconds") == (1, 8.0)
    assert sample(bench, "vllm:kv_block_idle_before_evict_seconds") == (1, 4.0)
    assert sample(bench, "vllm:kv_block_reuse_gap_seconds") == (3, 3.0)
    assert sample(bench, "sidestep_kv_block_reuse_gap_seconds") == (4, 3.75)
    assert sample(bench, "sidestep_kv_block_reuses") == (1, 5.0)
    assert sample(bench, "sidestep_kv_block_reset_age_seconds") == (1, 2.0)
    assert sample(bench, "sidestep_kv_block_reset_idle_seconds") == (1, 2.0)
    assert bench.value("sidestep_kv_cache_resets_total") == 1
    assert bench.value("sidestep_kv_tracked_blocks") == 0
    assert bench.value("sidestep_kv_sample_ratio") == 0.5


@pytest.mark.parametrize(("scale", "counted"), [(False, 3), (True, 12)])
def test_blocks_that_the_engine_samples_itself_can_be_scaled(scale: bool, counted: int) -> None:
    """They are scaled by the rate that the engine's configuration names."""
    bench = Bench()
    bench.registry.tracking.sampling.scale = scale
    bench.engine(features=["kv_cache_metrics"], info={"kv_sampling": {"rate": "0.25"}})
    evicted = [KVCacheEvictionEvent(2.0, 1.0, [0.5])] * 3
    bench.apply(VllmStep(0, 1.0, 1.0, SchedulerStats(kv_cache_eviction_events=evicted)))

    assert sample(bench, "vllm:kv_block_lifetime_seconds") == (counted, 2.0 * counted)
    assert sample(bench, "vllm:kv_block_idle_before_evict_seconds") == (counted, 1.0 * counted)
    assert sample(bench, "vllm:kv_block_reuse_gap_seconds") == (counted, 0.5 * counted)
    assert bench.value("sidestep_kv_sample_ratio") == 0.25


def test_a_new_hello_replaces_the_info() -> None:
    """A sampling rate or name that it omits is removed."""
    bench = Bench()
    for rate in ("0.25", "0.5"):
        bench.engine(features=["engine_core"], info={"kv_sampling": {"rate": rate}, rate: {}})
        bench.engine(
            features=["engine_core"],
            info={"core:cache_config": {"size": "2"}, "kv_sampling": {"rate": rate}},
        )
    before = bench.value("sidestep_kv_sample_ratio")
    bench.engine(features=["engine_core"], info={})
    alone = bench.value("sidestep_kv_sample_ratio")
    bench.engine(features=["engine_core"], info={"core:cache_config": {"size": "2"}})

    assert (0.5, 0.5) == (before, alone)
    assert bench.values("sidestep_kv_sample_ratio") == {}
    assert {"cache_config"} == bench.engines["0"].info.keys()


@pytest.mark.parametrize("rate", ["x", "nan", "1e-300", "2"])
def test_an_invalid_rate_scales_nothing(rate: str) -> None:
    """The rate comes from the engine and is not trusted."""
    bench = Bench()
    bench.registry.tracking.sampling.scale = True
    bench.engine(features=["kv_cache_metrics"], info={"kv_sampling": {"rate": rate}})
    evicted = [KVCacheEvictionEvent(2.0, 1.0)]
    bench.apply(VllmStep(0, 1.0, 1.0, SchedulerStats(kv_cache_eviction_events=evicted)))

    assert sample(bench, "vllm:kv_block_lifetime_seconds") == (1, 2.0)
    assert bench.values("sidestep_kv_sample_ratio") == {}


def test_uneven_columns_change_nothing(bench: Bench) -> None:
    """Items are validated before they are applied."""
    bench.apply(BlockEvents(0, 1.0, 1, 1.0))
    before = render(bench.registry)
    items: list[Item] = [
        events(Queued(1, 1.0), Iteration(1.0, 1.0, 1.0, [Output(1.0, [1, 2], [3])])),
        BlockEvents(0, 1.0, 1, 1.0, b"\x00\x00", [1], [1.0]),
        CacheEvents(0, 1.0, 1, [CacheChange("stored", 1.0, [1], "GPU")]),
    ]

    for item in items:
        with pytest.raises(WireError):
            bench.apply(item)

    assert render(bench.registry) == before


@pytest.mark.parametrize("core_last", [False, True])
def test_a_front_ends_info_replaces_the_cores(core_last: bool) -> None:
    """Whichever Hello arrives last; without a front end, the core's stands."""
    bench = Bench()
    said = [{"cache_config": {"size": "1"}}, {"core:cache_config": {"size": "2"}}]
    bench.engine(info=said[1])
    alone = render(bench.registry).decode()
    for info in said if core_last else said[::-1]:
        bench.engine(info=info)

    assert 'vllm:cache_config_info{engine="0",size="2"} 1' in alone
    assert 'vllm:cache_config_info{engine="0",size="1"} 1' in render(bench.registry).decode()
