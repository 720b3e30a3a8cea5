"""Families under names that are the same for all engines."""

from __future__ import annotations

from typing import Any

import pytest

from exporters import MAIN_RUN, Start
from pages import parse
from rendered import render
from replays import replay
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import Item, encode_item
from sidestep.engines.sglang.wire import QueueCount, SglangSchedulerStats, SglangStats
from sidestep.errors import WireError
from sidestep.metrics.registry import Registry
from sidestep.metrics.totals_codec import decode_totals
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples

TOKENIZER = {"model_name": "m", "engine_type": "unified"}
SCHEDULER = {**TOKENIZER, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
PAIRS = {
    "gen_ai_server_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "gen_ai_server_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds"),
    "gen_ai_server_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "sidestep_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "sidestep_request_queue_seconds": "vllm:request_queue_time_seconds",
    "sidestep_preemptions": "vllm:num_preemptions",
    "sidestep_prefix_cache_looked_up_tokens": "vllm:prefix_cache_queries",
    "sidestep_prefix_cache_found_tokens": "vllm:prefix_cache_hits",
    "sidestep_requests_running": "vllm:num_requests_running",
    "sidestep_requests_waiting": "vllm:num_requests_waiting",
    "sidestep_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
}
"""Common names and vLLM's names of histograms that agree except for their bounds."""


def engine(name: str, labels: dict[str, str]) -> EngineInfo:
    """Return one of SGLang's collectors."""
    return EngineInfo(name, "sglang", labels)


def items() -> list[Item]:
    """Return items that SGLang's processes send for a few requests."""

    def family(name: str, kind: str, labels: list[str], *samples: Sample) -> Family:
        return Family(name, kind, labels, list(samples))  # type: ignore[arg-type]

    tokenizer = [
        family(
            "sglang:time_to_first_token_seconds",
            "histogram",
            ["is_streaming"],
            Sample(["true"], observations=[0.003, 0.3]),
            Sample(["false"], observations=[7.0]),
        ),
        family(
            "sglang:inter_token_latency_seconds",
            "histogram",
            [],
            Sample(observations=[0.02, 0.2], weights=[3, 1]),
        ),
        family(
            "sglang:prompt_tokens_histogram", "histogram", [], Sample(observations=[5.0, 900.0])
        ),
        family("sglang:generation_tokens_histogram", "histogram", [], Sample(observations=[17.0])),
    ]
    scheduler = [
        family(
            "sglang:prefill_effective_tokens_total",
            "counter",
            ["mode"],
            Sample(["input"], 60.0),
            Sample(["device_hit"], 30.0),
            Sample(["host_hit"], 10.0),
        ),
        family("sglang:num_retracted_requests_total", "counter", [], Sample([], 2.0)),
    ]
    stats = SglangSchedulerStats(
        num_running_reqs=QueueCount(3), num_queue_reqs=QueueCount(4), token_usage=0.5
    )
    return [
        *(Samples(0, 1.0, [one]) for one in tokenizer),
        *(Samples(1, 1.0, [one]) for one in scheduler),
        SglangStats(1, 2.0, 2.0, stats),
    ]


ENGINES = [engine("tokenizer", TOKENIZER), engine("scheduler", SCHEDULER)]


def applied(*, common: bool = True, legacy: bool = True) -> Registry:
    """Return a registry to which all items were applied."""
    registry = Registry(
        {n: compile_layout(DIALECTS[n], legacy=legacy, common=common) for n in ("vllm", "sglang")}
    )
    applier = Applier(registry)
    for item in items():
        applier.apply(registry.register(ENGINES[item.engine]), item)
    return registry


def names(page: str) -> set[str]:
    """Return the families of a page that have a common name."""
    known = {row.name.removesuffix("_total") for row in DIALECTS["vllm"].common_rows}
    return known & parse(page).keys()


def test_both_engines_have_the_same_families() -> None:
    """Name, kind, bounds and own labels are one for all engines."""
    forms = [
        [(row.name, row.kind, row.buckets, row.closed, row.combine) for row in rows]
        for rows in (DIALECTS["vllm"].common_rows, DIALECTS["sglang"].common_rows)
    ]

    assert forms[0] == forms[1]


async def test_vllms_are_its_own_numbers(start: Start) -> None:
    """Counts and sums of a recorded run are those of vLLM's own families."""
    async with start(metrics_common=True) as exporter:
        await replay(exporter, MAIN_RUN, "common")
        page = parse(render(exporter.registry).decode())

    for ours, theirs in PAIRS.items():
        for suffix in ("", "_total", "_count", "_sum"):
            expected = {
                labels: value
                for (name, labels), value in page[theirs].samples.items()
                if name == theirs + suffix
            }
            found = {
                labels: value
                for (name, labels), value in page[ours].samples.items()
                if name == ours + suffix
            }
            assert found == expected


def test_sglangs_numbers_are_those_of_its_collectors() -> None:
    """Every child and weight counts; of the prefix cache's tokens, only hits count as found."""
    page = parse(render(applied()).decode())

    def value(name: str, **labels: str) -> float:
        base = SCHEDULER if name.startswith("sidestep_") and "latency" not in name else TOKENIZER
        key = tuple(sorted({**base, **labels}.items()))
        samples = {k: v for family in page.values() for k, v in family.samples.items()}
        return samples[name, key]

    assert value("gen_ai_server_time_to_first_token_seconds_count") == 3
    assert value("gen_ai_server_time_to_first_token_seconds_sum") == pytest.approx(7.303)
    assert value("gen_ai_server_time_to_first_token_seconds_bucket", le="0.005") == 1
    assert value("sidestep_inter_token_latency_seconds_count") == 4
    assert value("sidestep_inter_token_latency_seconds_bucket", le="0.025") == 3
    assert value("gen_ai_client_token_usage_sum", gen_ai_token_type="input") == 905
    assert value("gen_ai_client_token_usage_count", gen_ai_token_type="output") == 1
    assert value("sidestep_prefix_cache_looked_up_tokens_total") == 100
    assert value("sidestep_prefix_cache_found_tokens_total") == 40
    assert value("sidestep_preemptions_total") == 2
    assert value("sidestep_requests_running") == 3
    assert value("sidestep_requests_waiting") == 4
    assert value("sidestep_kv_cache_usage_ratio") == 0.5


@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_clients_name_needs_both_flags(openmetrics: bool) -> None:
    """The conventions give it to clients, and no longer in their drafts."""
    name = "gen_ai_client_token_usage"
    shown = names(render(applied(), openmetrics=openmetrics).decode())
    assert shown - names(render(applied(legacy=False), openmetrics=openmetrics).decode()) == {name}
    assert name not in render(applied(common=False)).decode()
    assert f"# HELP {name} DEPRECATED: use the engine's own" in render(applied()).decode()


@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_summary_has_a_sum_and_a_count(openmetrics: bool) -> None:
    """A summary has no quantiles, on the engine's page or on the exporter's."""
    registry = applied()
    reported = Sample(["decode"], observations=[0.5, 1.0])
    family = Family("sglang:eplb_balancedness", "summary", ["forward_mode"], [reported])
    Applier(registry).apply(registry.engines["scheduler"], Samples(0, 3.0, [family]))
    page = parse(render(registry, openmetrics=openmetrics, names={family.name}).decode())

    labels = tuple(sorted({**SCHEDULER, "forward_mode": "decode"}.items()))
    assert page[family.name].kind == "summary"
    assert page[family.name].samples == {
        (f"{family.name}_count", labels): 2.0,
        (f"{family.name}_sum", labels): 1.5,
    }


@pytest.mark.parametrize("common", [False, True])
def test_folded_items_feed_common_names(common: bool) -> None:
    """A sender folds before it knows whether the exporter exposes them."""
    folder = ItemFolder()
    for item in items():
        assert folder.fold(encode_item(item), ENGINES)
    records = [record for frame in folder.seal().frames for record in frame]
    layout = compile_layout(DIALECTS["sglang"], legacy=True, common=common)
    registry = Registry({"sglang": layout})
    applier = Applier(registry)
    for info, record in zip(ENGINES, records, strict=True):
        applier.add_totals(registry.register(info), decode_totals(record))

    assert parse(render(registry).decode()) == parse(render(applied(common=common)).decode())


def fed(dialect: str = "sglang", **labels: str) -> tuple[Registry, Applier, str]:
    """Return a registry with one engine, its applier, and the engine's name."""
    registry = Registry({n: compile_layout(DIALECTS[n], common=True) for n in ("sglang", "stream")})
    registry.register(EngineInfo("e", dialect, labels))
    return registry, Applier(registry), "e"


def page_of(registry: Registry) -> dict[str, Any]:
    """Return all families of the page."""
    return dict(parse(render(registry).decode()))


def requests(count: float, *labels: str) -> Samples:
    """Return requests of a tokenizer, whose release or flags decide the labels."""
    reported = Family("sglang:num_requests_total", "counter", list(labels))
    reported.samples = [Sample(["x"] * len(labels), count)]
    return Samples(0, 1.0, [reported])


def test_a_new_process_may_send_other_labels() -> None:
    """The family restarts at 0 with them; a running process cannot change its labels."""
    registry, applier, who = fed(**TOKENIZER)
    engine = registry.engines[who]
    applier.apply(engine, requests(2))
    with pytest.raises(WireError, match="changed_family"):
        applier.apply(engine, requests(3, "is_streaming"))
    engine.restarts += 1
    applier.apply(engine, requests(3, "is_streaming"))
    applier.apply(engine, requests(4, "is_streaming"))
    with pytest.raises(WireError, match="changed_family"):
        applier.apply(engine, requests(5))

    key = ("sglang:num_requests_total", tuple(sorted({**TOKENIZER, "is_streaming": "x"}.items())))
    assert page_of(registry)["sglang:num_requests"].samples == {key: 7.0}
    assert registry.quota.series == len(engine.open_families["sglang:num_requests_total"].children)


def test_an_engine_with_a_stream_keeps_its_dialect() -> None:
    """Another stream cannot change it; once no stream feeds the engine, a Hello can."""
    registry, _, who = fed("stream", engine="0", model_name="m")
    registry.engines[who].feeds.streams.add(1)
    other = EngineInfo(who, "sglang", {"engine": "0", "model_name": "m"})
    with pytest.raises(WireError, match="changed_dialect"):
        registry.register(other)
    registry.engines[who].feeds.streams.clear()

    assert registry.register(other).layout.dialect == "sglang"
