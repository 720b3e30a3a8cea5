"""vLLM's items applied to series: what the golden runs do not reach."""

from __future__ import annotations

import pytest

from rendered import render
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.vllm.wire import (
    CacheStats,
    CUDAGraphStat,
    SchedulerStats,
    SpecDecodingStats,
    VllmRejection,
)
from sidestep.errors import WireError
from sidestep.metrics.engine_state import SeriesSettings
from sidestep.metrics.registry import Registry
from sidestep.protocol.iteration_stats import (
    FinishedRequestStats,
    IterationStats,
    KVCacheEvictionEvent,
)
from sidestep.protocol.limits import MAX_OPEN_VALUES, OTHER
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples
from vllm_bench import Bench, family, step, tokens


@pytest.fixture
def bench() -> Bench:
    """Return one engine without items."""
    made = Bench()
    made.engine()
    return made


def test_a_step_of_several_api_servers_is_observed_once(bench: Bench) -> None:
    """Slices without the scheduler's stats wait for the one that has them."""
    bench.apply(
        step(None, tokens(5)),
        step(SchedulerStats(), tokens(3, computed=10)),
        step(SchedulerStats(), None),
        step(SchedulerStats(), tokens(1)),
    )
    histogram = bench.value("vllm:iteration_tokens_total")

    assert histogram.cumulative[-1] == 2
    assert histogram.sum == 19
    assert [histogram.counts[histogram.bounds.index(bound)] for bound in (1, 32)] == [1, 1]


def test_older_gauges_are_ignored(bench: Bench) -> None:
    """Counters are added whatever the stamp."""
    late = step(SchedulerStats(num_running_reqs=9), tokens(1), stamp=2.0)
    early = step(SchedulerStats(num_running_reqs=1), tokens(1), stamp=1.5)
    bench.apply(late, early)

    assert bench.value("vllm:num_requests_running") == 9
    assert bench.value("vllm:generation_tokens_total") == 2


def test_the_rest_of_an_oversized_step_is_observations_only(bench: Bench) -> None:
    """The rest of an oversized step changes no gauge and counts no step or tokens."""
    bench.apply(
        step(SchedulerStats(num_running_reqs=3), tokens(1)),
        step(
            SchedulerStats(kv_cache_eviction_events=[KVCacheEvictionEvent(1.0, 0.5, [0.1])]),
            IterationStats(inter_token_latencies_iter=[0.1, 0.2]),
            stamp=2.0,
            more=True,
        ),
    )

    assert bench.value("vllm:num_requests_running") == 3
    assert bench.value("vllm:iteration_tokens_total").cumulative[-1] == 1
    assert bench.value("vllm:inter_token_latency_seconds").cumulative[-1] == 2
    assert bench.value("vllm:kv_block_reuse_gap_seconds").cumulative[-1] == 1


def test_negative_latencies_are_refused_and_counted(bench: Bench) -> None:
    """The wall clock may step back."""
    bench.apply(step(None, IterationStats(time_to_first_tokens_iter=[-1.0, 0.5])))

    assert bench.value("vllm:time_to_first_token_seconds").cumulative[-1] == 1
    assert bench.value("sidestep_refused_observations_total") == 1


def test_an_unknown_finish_reason_is_counted(bench: Bench) -> None:
    """A later release's reason counts as another one."""
    finished = [FinishedRequestStats(0), FinishedRequestStats(0), FinishedRequestStats(77)]
    bench.apply(step(None, IterationStats(finished_requests=finished)))
    values = bench.values("vllm:request_success_total")

    assert values[("stop",)] == 2
    assert values[(OTHER,)] == 1


def test_families_of_an_option_appear_together_with_its_first_data(bench: Bench) -> None:
    """They include those at 0; before that there are none."""
    assert bench.values("vllm:spec_decode_num_drafts_total") == {}
    drafts = SpecDecodingStats(2, 1, 2, 0, [0, 0], [1, 1])
    bench.apply(step(SchedulerStats(spec_decoding_stats=drafts)))

    assert bench.value("vllm:spec_decode_num_accepted_tokens_total") == 0
    per_position = bench.values("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert per_position == {("0",): 0, ("1",): 0}
    assert bench.values("vllm:diffusion_num_denoising_steps_total") == {}


def test_cache_hits_are_counted_by_tier(bench: Bench) -> None:
    """An unknown tier counts as another one."""
    external = CacheStats(hits=9, hits_by_source={"host": 3, "p2p": 2, "moon": 4})
    bench.apply(
        step(
            SchedulerStats(
                prefix_cache_stats=CacheStats(hits=5), connector_prefix_cache_stats=external
            )
        )
    )
    values = bench.values("vllm:prompt_tokens_cached_by_source_total")

    assert values[("device",)] == 5
    assert values[("host",)] == 3
    assert values[(OTHER,)] == 4
    assert bench.value("vllm:external_prefix_cache_hits_total") == 9


def test_lora_shows_the_current_adapters_only() -> None:
    """There is one combination, without adapters when idle, and a gauge per adapter and state."""
    bench = Bench()
    bench.engine(features=["lora"], info={"lora": {"max_lora": "4"}})
    name = "vllm:lora_requests_info"
    bench.apply(
        step(SchedulerStats(running_lora_adapters={"a": 2}, waiting_lora_adapters={"a": 0}))
    )
    assert list(bench.values(name)) == [("4", "a", "a")]
    assert bench.value(name) == 1e9
    assert bench.values("sidestep_lora_requests") == {("a", "running"): 2, ("a", "waiting"): 0}

    bench.apply(step(SchedulerStats(running_lora_adapters={"b": 1}), stamp=2.0))
    assert list(bench.values(name)) == [("4", "b", "")]
    assert bench.values("sidestep_lora_requests") == {("b", "running"): 1}

    bench.apply(step(SchedulerStats(waiting_lora_adapters={"b": 3}), stamp=2.5))
    assert bench.values("sidestep_lora_requests") == {("b", "waiting"): 3}

    bench.apply(step(SchedulerStats(), stamp=3.0))
    assert bench.values(name) == {("4", "", ""): 1e9}
    assert bench.values("sidestep_lora_requests") == {}


@pytest.mark.parametrize("features", [[], ["lora"]])
def test_an_idle_engine_has_no_adapters_however_little_is_known(features: list[str]) -> None:
    """Without ``max_lora``, too: a router keeps the last combination that it has read."""
    bench = Bench()
    bench.engine(features=features)
    if not features:
        bench.apply(step(SchedulerStats(running_lora_adapters={"a": 2})))
    bench.apply(step(SchedulerStats(), stamp=2.0))

    assert bench.values("vllm:lora_requests_info") == {("", "", ""): 1e9}


def test_label_values_over_the_limit_share_a_series(bench: Bench) -> None:
    """They are counted as limited."""
    for number in range(MAX_OPEN_VALUES + 5):
        graph = CUDAGraphStat(1, 1, 0, f"mode{number}")
        bench.apply(step(SchedulerStats(cudagraph_stats=graph)))
    values = bench.values("sidestep_cudagraph_tokens_total")

    assert len(values) == MAX_OPEN_VALUES + 1
    assert values[(OTHER,)] == 5
    assert bench.registry.limited["label_values"] == 10


def test_rejections_of_all_engines_of_a_model_are_one_series() -> None:
    """The family has no label engine, so series with equal labels are added."""
    bench = Bench()
    bench.engine("0")
    bench.engine("1")
    bench.apply(VllmRejection(0, 1.0, "max_num_queued_reqs"))
    bench.apply(VllmRejection(0, 1.0, "max_num_queued_reqs"), to="1")
    text = render(bench.registry, names={"vllm:admission_rejections_total"}).decode()

    assert text.count('reason="max_num_queued_reqs"') == 1
    assert 'reason="max_num_queued_reqs"} 2\n' in text


def test_changed_bounds_restart_the_histogram(bench: Bench) -> None:
    """Its counts cannot be moved; other families continue."""
    bench.apply(step(None, IterationStats(time_to_first_tokens_iter=[0.5], n_params_iter=[1])))
    bench.engine("0", bounds={"time_to_first_token": [1.0, 2.0]})

    assert bench.value("vllm:time_to_first_token_seconds").bounds == (1.0, 2.0)
    assert bench.value("vllm:time_to_first_token_seconds").cumulative[-1] == 0
    assert bench.value("vllm:request_params_n").cumulative[-1] == 1


def test_configured_bounds_take_precedence() -> None:
    """The engine's bounds take precedence over the defaults."""
    layouts = DIALECTS.layouts()
    registry = Registry(layouts, SeriesSettings({"request_params_n": (7.0,)}))
    labels = {"engine": "0", "model_name": "m"}
    bounds = {"request_params_n": [3.0], "time_to_first_token": [9.0]}
    engine = registry.register(EngineInfo("e", "vllm", labels, bounds=bounds))

    assert engine.description.bounds["request_params_n"] == (7.0,)
    assert engine.description.bounds["time_to_first_token"] == (9.0,)


@pytest.mark.parametrize(
    "info",
    [
        EngineInfo("e", "abacus", {"engine": "0", "model_name": "m"}),
        EngineInfo("e", "vllm", {"engine": "0"}),
        EngineInfo("e", "vllm", {"engine": "0", "model_name": "m", "le": "1"}),
        EngineInfo("e", "vllm", {"engine": "0", "model_name": "m", "source": "x"}),
    ],
)
def test_an_invalid_engine_is_refused(info: EngineInfo) -> None:
    """Its dialect is unknown, or labels are missing or reserved."""
    with pytest.raises(WireError):
        Bench().registry.register(info)


def test_self_described_families_are_applied(bench: Bench) -> None:
    """Counters add, gauges replace, histograms observe."""
    bench.apply(family(), family(value=2.0))
    bench.apply(family("vllm:new_gauge", "gauge", value=3.0, labels=["tier"], values=["gpu"]))
    bench.apply(family("vllm:new_seconds", "histogram", seen=[0.5, 3.0], bounds=[1.0]))

    assert bench.value("vllm:new_total") == 3.0
    assert bench.values("vllm:new_gauge") == {("gpu",): 3.0}
    assert bench.value("vllm:new_seconds").cumulative == [1, 2]


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (family("vllm:generation_tokens_total"), "owned_family"),
        (family("sidestep_engine_up", "gauge"), "owned_family"),
        (family("vllm:nixl_xfer_time_seconds", "gauge"), "changed_family"),
        (family("process_open_fds", "gauge"), "owned_family"),
        (family("vllm:request_params_n_count", "gauge"), "owned_family"),
        (family("vllm:fine_total", "gauge"), "changed_family"),
        (family("vllm:prompt_tokens", "gauge"), "owned_family"),
        (family("vllm:fine", "gauge"), "owned_family"),
        (family("vllm:fine_created", "gauge"), "owned_family"),
        (family("vllm:new_gauge", "gauge", help="two\nlines"), "bad_family"),
        (family("vllm:other", "counter"), "bad_family"),
        (family("vllm:h", "histogram", seen=[1.0], bounds=[2.0, 1.0]), "bad_bounds"),
        (family(labels=["engine"], values=["7"]), "bad_label"),
        (family(labels=["a", "a"], values=["x", "y"]), "bad_label"),
        (family("vllm:h", "histogram"), "bad_bounds"),
        (family(value=-1.0), "negative_counter"),
        (family(labels=["a"], values=["b\x00"]), "bad_label"),
        (family(labels=["a"], values=[]), "bad_label"),
    ],
)
def test_a_contradictory_item_is_refused_whole(bench: Bench, item: Samples, reason: str) -> None:
    """Families before the bad one are not applied either."""
    item.families.insert(0, Family("vllm:fine_total", "counter", samples=[Sample(value=1.0)]))
    before = render(bench.registry).decode()

    with pytest.raises(WireError) as caught:
        bench.apply(item)

    assert caught.value.reason == reason
    assert render(bench.registry).decode() == before


def test_a_family_has_one_form_on_the_whole_page(bench: Bench) -> None:
    """No engine may describe another engine's family differently."""
    bench.engine("1")
    bench.apply(family("vllm:other_seconds", "histogram", seen=[1.0], bounds=[1.0]))

    for item, reason in (
        (family("vllm:other_seconds", "gauge"), "changed_family"),
        (family("vllm:other_seconds_count", "gauge"), "owned_family"),
    ):
        with pytest.raises(WireError) as caught:
            bench.apply(item, to="1")
        assert caught.value.reason == reason


def test_legacy_names_have_current_data() -> None:
    """They are constants where the engine no longer has the mode."""
    bench = Bench(legacy=True)
    bench.engine()
    stats = CacheStats(requests=1, queries=10, hits=4)
    drafts = SpecDecodingStats(3, 2, 6, 3, [2, 1, 0])
    bench.apply(
        step(
            SchedulerStats(
                kv_cache_usage=0.5, prefix_cache_stats=stats, spec_decoding_stats=drafts
            ),
            IterationStats(inter_token_latencies_iter=[0.1]),
        )
    )

    assert bench.value("vllm:gpu_cache_usage_perc") == 0.5
    assert bench.value("vllm:gpu_prefix_cache_hit_rate") == 0.4
    assert bench.value("vllm:num_requests_swapped") == 0
    assert bench.value("vllm:time_per_output_token_seconds").cumulative[-1] == 1
    assert bench.value("vllm:spec_decode_draft_acceptance_rate") == 0.5
    assert bench.value("vllm:spec_decode_efficiency") == 5 / 8
    assert bench.value("vllm:spec_decode_num_emitted_tokens_total") == 5
    text = render(bench.registry).decode()
    assert 'vllm:time_per_output_token_seconds_count{engine="0",model_name="m"} 1\n' in text
    assert 'vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 1\n' in text


def test_labels_are_escaped_once(bench: Bench) -> None:
    """A parser reads quotes and backslashes back."""
    bench.engine("q", labels={"engine": "q", "model_name": 'a"b\\c'})
    text = render(bench.registry, names={"vllm:generation_tokens_total"}).decode()

    assert 'model_name="a\\"b\\\\c"' in text
