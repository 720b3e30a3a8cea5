"""SGLang's items applied to series: handlers, folding and snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectors import seen
from intakes import Fed
from pages import parse
from rendered import render
from sglang_bench import SCHEDULER, Bench, family, stats
from sidestep.engines.items import Item, encode_item
from sidestep.engines.sglang.wire import QueueCount, SglangSchedulerStats, SglangStats
from sidestep.engines.vllm.wire import VllmStep
from sidestep.errors import WireError
from sidestep.metrics.merge import MAX_CHILDREN
from sidestep.protocol.limits import COUNT_LIMIT, MAX_OPEN_VALUES, OTHER
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Sample, Samples

TOKENIZER = EngineInfo("t", "sglang", {"engine_type": "unified", "model_name": "m"})
VLLM = EngineInfo("v", "vllm", {"engine": "0", "model_name": "m"})
ITL = "sglang:inter_token_latency_seconds"
TTFT = "sglang:time_to_first_token_seconds"


# The scheduler's stats.


def test_a_priority_without_requests_is_zero() -> None:
    """A priority without requests stays, as on SGLang's page; a queue that the report omits has no samples."""
    bench = Bench()
    bench.apply(
        stats(1.0, num_queue_reqs=QueueCount(6, {"0": 2, "7": 4})),
        stats(2.0, num_queue_reqs=QueueCount(1, {"3": 1})),
    )
    assert bench.samples("sglang:num_queue_reqs") == {(): 1, ("0",): 0, ("7",): 0, ("3",): 1}
    bench.apply(stats(3.0, num_queue_reqs=QueueCount(2)))
    assert bench.samples("sglang:num_queue_reqs") == {(): 2, ("0",): 0, ("7",): 0, ("3",): 0}
    bench.apply(stats(4.0))
    assert bench.samples("sglang:num_queue_reqs") == {}


def test_priorities_over_the_limit_share_a_series() -> None:
    """No request is lost, and the total stays right."""
    bench = Bench()
    count = MAX_OPEN_VALUES + 9
    bench.apply(stats(num_queue_reqs=QueueCount(count, {str(n): 1 for n in range(count)})))
    found = bench.samples("sglang:num_queue_reqs")

    assert found[()] == count
    assert len(found) == MAX_OPEN_VALUES + 1
    assert found[OTHER,] == count - (MAX_OPEN_VALUES - 1)
    assert bench.registry.limited["label_values"] == 10


def test_routing_keys_fall_into_buckets() -> None:
    """Each is in one, above ``gt`` and up to ``le``; a report without keys changes none."""
    bench = Bench()
    bench.apply(stats(1.0, routing_key_all_req_counts=[1, 1, 2, 3, 4, 200, 201, 0]))
    expected = {("0", "1"): 3, ("1", "2"): 1, ("2", "3"): 1, ("3", "5"): 1,
                ("100", "200"): 1, ("200", "+Inf"): 1}  # fmt: skip
    found = bench.samples("sglang:routing_key_all_req_count")

    assert {key: number for key, number in found.items() if number} == expected
    assert len(found) == 11
    bench.apply(stats(2.0))
    assert bench.samples("sglang:routing_key_all_req_count") == found
    bench.apply(stats(3.0, routing_key_all_req_counts=[]))
    assert set(bench.samples("sglang:routing_key_all_req_count").values()) == {0}


@pytest.mark.parametrize("features", [[], ["lora", "hicache"]])
def test_gauges_of_an_option_need_the_option(features: list[str]) -> None:
    """SGLang sends their fields in any case."""
    info = EngineInfo("s", "sglang", SCHEDULER.labels, features=features)
    bench = Bench(info)
    bench.apply(stats(lora_pool_slots_used=1, hicache_host_used_tokens=2, token_usage=0.5))
    shown = [
        f"sglang:{name}" in bench.text
        for name in ("lora_pool_slots_used", "hicache_host_used_tokens")
    ]

    assert shown == [bool(features)] * 2
    assert "sglang:token_usage{" in bench.text
    assert len(bench.families("sglang:lora_pool_slots_used")) == (1 if features else 0)


def test_an_older_report_is_ignored() -> None:
    """Two streams may feed one engine, and a frame may arrive twice."""
    bench = Bench()
    bench.apply(
        stats(2.0, token_usage=0.5, num_queue_reqs=QueueCount(2)),
        stats(1.0, token_usage=0.25, num_queue_reqs=QueueCount(1)),
    )

    assert bench.samples("sglang:token_usage") == {(): 0.5}
    assert bench.samples("sglang:num_queue_reqs") == {(): 2}


def test_a_missing_field_has_no_sample() -> None:
    """An earlier value is removed: SGLang's NaN means unknown."""
    bench = Bench()
    bench.apply(stats(1.0, fwd_occupancy=50.0, token_usage=0.5), stats(2.0, token_usage=0.25))

    assert bench.samples("sglang:token_usage") == {(): 0.25}
    assert bench.samples("sglang:fwd_occupancy") == {}


def test_items_of_another_dialect_are_refused() -> None:
    """Each dialect refuses the items of the other."""
    bench = Bench(SCHEDULER, VLLM)
    with pytest.raises(WireError, match="another dialect"):
        bench.apply(VllmStep(0, 1.0, 1.0))
    with pytest.raises(WireError, match="another dialect"):
        bench.apply(stats(), to="v")


# Families that describe themselves.


def test_a_family_of_two_dialects_is_one_family() -> None:
    """A family of two dialects has one HELP, one TYPE and the samples of both."""
    bench = Bench(TOKENIZER, VLLM)
    name = "sidestep_refused_observations_total"
    bench.apply(family(ITL, "histogram", [], Sample([], observations=[-1.0, 0.5])), to="t")
    lines = [line for line in bench.text.splitlines() if name in line]

    assert [line.split()[1] for line in lines[:2]] == ["HELP", "TYPE"]
    assert sorted(lines[2:]) == [
        f'{name}{{engine="0",model_name="m"}} 0',
        f'{name}{{engine_type="unified",model_name="m"}} 1',
    ]
    assert len(bench.typed(name)) == 2
    parse(bench.text)


def test_a_tokenizer_may_add_labels_of_requests() -> None:
    """Only its own engine gets them; the engine cannot drop them later."""
    other = EngineInfo("u", "sglang", {"engine_type": "decode", "model_name": "m"})
    bench = Bench(TOKENIZER, other)
    seen_once = Sample(["true", "a", "3"], observations=[0.3])
    bench.apply(
        family(TTFT, "histogram", ["is_streaming", "tenant", "priority"], seen_once), to="t"
    )
    bench.apply(
        family(TTFT, "histogram", ["is_streaming"], Sample(["true"], observations=[0.3])), to="u"
    )
    found = {tuple(sorted(s["labels"].items())) for s in bench.typed(TTFT)}

    assert found == {
        (("engine_type", "unified"), ("is_streaming", "true"), ("model_name", "m"),
         ("priority", "3"), ("tenant", "a")),
        (("engine_type", "decode"), ("is_streaming", "true"), ("model_name", "m")),
    }  # fmt: skip
    with pytest.raises(WireError, match=TTFT):
        bench.apply(family(TTFT, "histogram", ["is_streaming"], Sample(["true"])), to="t")


@pytest.mark.parametrize("labels", [["is_streaming", "model_name"], ["is_streaming", "le"]])
def test_reserved_labels_cannot_be_added(labels: list[str]) -> None:
    """Neither labels of the engine nor those of a page."""
    bench = Bench(TOKENIZER)
    with pytest.raises(WireError) as caught:
        bench.apply(family(TTFT, "histogram", labels, Sample(["true", "x"])), to="t")

    assert caught.value.reason == "bad_label"


def test_known_values_start_at_zero_with_the_first() -> None:
    """The engine starts them all with the first value."""
    bench = Bench()
    name = "sglang:prefill_effective_tokens_total"
    assert bench.samples(name) == {}
    bench.apply(family(name, "counter", ["mode"], Sample(["host_hit"], 5.0)))

    assert bench.samples(name) == {
        ("input",): 0,
        ("device_hit",): 0,
        ("host_hit",): 5,
        ("storage_hit",): 0,
    }


@pytest.mark.parametrize(
    ("old", "name"),
    [("sglang:ttft_seconds", TTFT), ("sglang:time_per_output_token_seconds", ITL)],
)
def test_old_names_have_the_same_children(old: str, name: str) -> None:
    """With --metrics.legacy: as text and as JSON, with labels that a sender added."""
    labels = ["is_streaming", "tenant"] if name == TTFT else ["tenant"]
    sample = Sample(["true", "a"][-len(labels) :], observations=[0.3, 0.01], weights=[2, 3])
    bench = Bench(TOKENIZER, legacy=True)
    bench.apply(family(name, "histogram", labels, sample), to="t")
    page = parse(bench.text)

    def renamed(samples: Mapping[Any, float]) -> dict[Any, float]:
        return {(sample.replace(old, name), found): v for (sample, found), v in samples.items()}

    assert renamed(page[old].samples) == page[name].samples
    assert bench.typed(old) == bench.typed(name)
    assert page[old].samples[f"{old}_count", tuple(sorted({
        **TOKENIZER.labels, **dict(zip(labels, sample.labels, strict=True))
    }.items()))] == 5  # fmt: skip
    assert old not in render(Bench(TOKENIZER).registry).decode()


# Snapshots and folding.

counts = st.integers(0, COUNT_LIMIT)
texts = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)
queues = st.none() | st.builds(
    QueueCount, counts, st.none() | st.dictionaries(texts, counts, max_size=4)
)
reports = st.builds(
    SglangStats,
    engine=st.just(0),
    stamp=st.floats(0, 1e9),
    wall=st.floats(0, 1e15),
    stats=st.builds(
        SglangSchedulerStats,
        num_running_reqs=queues,
        num_queue_reqs=queues,
        num_decode_transfer_queue_reqs=queues,
        gen_throughput=st.none() | st.floats(0, 1e9),
        num_used_tokens=st.none() | st.integers(-COUNT_LIMIT, COUNT_LIMIT),
        fwd_occupancy=st.none() | st.floats(0, 100),
        lora_pool_slots_used=st.none() | counts,
        routing_key_running_req_counts=st.none() | st.lists(counts, max_size=5),
    ),
)
observed = st.lists(st.floats(0, 1e4), max_size=4)
latencies = st.builds(
    lambda values, data: family(
        ITL, "histogram", [], Sample([], observations=values, weights=data[: len(values)])
    ),
    observed,
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
)
tokens = st.builds(
    lambda mode, amount: family(
        "sglang:realtime_tokens_total", "counter", ["mode"], Sample([mode], amount)
    ),
    st.sampled_from(["decode", "prefill_cache"]),
    st.integers(0, 10**9).map(float),
)
own = st.builds(
    lambda value: family("sglang:own_ratio", "gauge", ["k"], Sample(["a"], value), help="Own."),
    st.floats(0, 1e9),
)
uses = st.builds(
    lambda values: family(
        "sglang:eplb_balancedness", "summary", ["forward_mode"], Sample(["x"], observations=values)
    ),
    observed,
)
reported = st.lists(reports | tokens | own | uses | latencies, max_size=12)


@pytest.mark.parametrize(
    "sample",
    [
        Sample([], observations=[0.5], weights=[1, 2]),
        Sample([], observations=[0.5, 0.5], weights=[1]),
        Sample([], weights=[1]),
        Sample([], observations=[0.5], weights=[-1]),
        Sample([], observations=[0.5], weights=[COUNT_LIMIT + 1]),
        Sample([], total=-1.0),
        Sample([], counts=[1, 2], total=1.0),
    ],
)
def test_contradictory_samples_are_refused(sample: Sample) -> None:
    """Nothing of them is counted."""
    bench = Bench(TOKENIZER)
    before = bench.text
    with pytest.raises(WireError):
        bench.apply(family(ITL, "histogram", [], sample), to="t")

    assert bench.text == before


def of_two(items: list[Item], since: float = 1.0) -> list[bytes]:
    """The items, of a scheduler and a tokenizer in one stream; stamps as they pass.

    Each report has the same fields, as one engine's do.
    """
    for number, item in enumerate(items):
        latency = isinstance(item, Samples) and item.families[0].name == ITL
        item.engine = 1 if latency else 0
        item.stamp = since + number
        if isinstance(item, SglangStats):
            item.stats.gen_throughput = item.stats.gen_throughput or 0.0
            item.stats.num_used_tokens = item.stats.num_used_tokens or 0
            item.stats.fwd_occupancy = item.stats.lora_pool_slots_used = None
            item.stats.routing_key_running_req_counts = (
                item.stats.routing_key_running_req_counts or []
            )
    return [encode_item(item) for item in items]


@given(reported, reported)
def test_folding_counts_as_if_all_had_arrived(first: list[Item], second: list[Item]) -> None:
    """The page is the same whether the later part was sent or folded.

    But that a priority which nobody had while it was folded is not shown at 0.
    """
    whole, folded = Fed(), Fed()
    for fed in (whole, folded):
        fed.send_hello("s", [SCHEDULER, TOKENIZER])
        fed.items("s", of_two(first))
    whole.items("s", of_two(second, 100.0))
    if second:
        folded.fold("s", of_two(second, 100.0))

    assert approximately(whole) == approximately(folded)
    assert whole.rejected == folded.rejected == {}


@given(reported)
def test_a_snapshot_restores_the_page(items: list[Item]) -> None:
    """Once the streams have sent their Hello, the page is the same."""
    fed = Fed()
    fed.send_hello("s", [SCHEDULER, TOKENIZER])
    fed.items("s", of_two(items))
    pieces = fed.snapshot()
    other = fed.restarted(pieces)

    assert approximately(fed) == approximately(other)
    assert fed.rejected == other.rejected == {}


def approximately(fed: Fed) -> dict[str, Any]:
    """Return SGLang's families; sums were added in another order."""
    return {
        name: (
            family.kind,
            {
                (sample, labels): pytest.approx(value)
                for (sample, labels), value in family.samples.items()
                if value or "priority" not in dict(labels)
            },
        )
        for name, family in seen(fed.page).items()
    }


def test_the_largest_family_can_be_folded() -> None:
    """A queue has all its priorities, the others' series and the total."""
    fed = Fed()
    many = {str(n): 1 for n in range(128)}
    item = stats(num_queue_reqs=QueueCount(128, many), num_running_reqs=QueueCount(128, many))
    children = [Sample([str(n), "x"], 1.0) for n in range(3 * MAX_OPEN_VALUES)]
    name = "sglang:dp_cooperation_realtime_tokens_total"
    wide = family(name, "counter", ["mode", "num_prefill_ranks"], *children)
    fed.send_hello("s", [SCHEDULER])
    fed.fold("s", [encode_item(one) for one in (item, wide)])
    (engine,) = fed.intake.registry.engines.values()
    sizes = [len(children) for children in engine.keyed]
    sizes += [len(family.children) for family in engine.open_families.values()]

    assert fed.rejected == {}
    assert MAX_OPEN_VALUES < max(sizes) <= MAX_CHILDREN
