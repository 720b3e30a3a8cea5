"""Aggregation of engines' series: nothing lost or counted twice, by the catalogue's rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pages import Family, Labels, parse
from rendered import render
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.exposition.aggregated_series import (
    aggregate_histograms,
    aggregate_info,
    aggregate_numbers,
)
from sidestep.exposition.series_filter import POD_DROPPED_LABELS, SeriesFilter
from sidestep.metrics.engine import Engine
from sidestep.metrics.exposed_engines import ENGINE_EXPIRES_SECONDS
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family as SampledFamily
from sidestep.protocol.self_described import Sample, Samples

RANDOMS = st.integers(0, 1 << 32).map(Random)
"""By their seeds: a fleet takes more numbers than an example may have of its own."""

LAYOUTS = DIALECTS.layouts()
SCHEDULER = {"engine_type": "unified", "model_name": "m", "moe_ep_rank": "0", "pp_rank": "0"}
OTHER_BOUNDS = {"request_latency": [0.5, 1.0, 7.0, 60.0], "time_to_first_token": [0.1, 1.0]}


def new_registry() -> Registry:
    """Return a registry without engines."""
    return Registry(LAYOUTS)


def filled(engine: Engine, random: Random) -> Engine:
    """Fill most series of ``engine`` with halves, so that sums are exact."""
    for slot in range(engine.layout.scalars):
        if random.random() < 0.8:
            engine.values[slot] = random.choice([random.randrange(1000), random.randrange(99) / 2])
    for slot in range(len(engine.histograms)):
        if random.random() < 0.8:
            histogram = engine.histogram(slot)
            histogram.add([random.randrange(9) for _ in histogram.counts], random.randrange(99) / 2)
    return engine


def fleet(random: Random) -> Registry:
    """Return engines of two dialects and models, some with other bounds."""
    registry = new_registry()
    for number in range(random.randrange(1, 6)):
        labels = {"engine": str(number), "model_name": random.choice("ab")}
        bounds = OTHER_BOUNDS if random.random() < 0.3 else {}
        filled(registry.register(EngineInfo(f"v{number}", "vllm", labels, bounds=bounds)), random)
    for number in range(random.randrange(3)):
        labels = {**SCHEDULER, "tp_rank": "0", "dp_rank": str(number)}
        filled(registry.register(EngineInfo(f"s{number}", "sglang", labels)), random)
    return registry


def page(
    registry: Registry, series_filter: SeriesFilter, names: Collection[str] = ()
) -> dict[str, Family]:
    """Return the filtered page, parsed by prometheus_client."""
    return parse(render(registry, series_filter, names=names).decode())


def without(labels: Labels, dropped: Collection[str]) -> Labels:
    """Return the labels that are not dropped."""
    return tuple(pair for pair in labels if pair[0] not in dropped)


RULES = {row.name.removesuffix("_total") if row.kind == "counter" else row.name: row.combine
         for dialect in DIALECTS.values() for row in dialect.rows}  # fmt: skip


def expected(
    family: Family, name: str, dropped: Collection[str]
) -> dict[tuple[str, Labels], float]:
    """Aggregate by brute force; only buckets that all engines have remain."""
    groups: dict[tuple[str, Labels], list[float]] = defaultdict(list)
    sizes: dict[Labels, int] = defaultdict(int)
    for (sample, labels), value in family.samples.items():
        groups[sample, without(labels, dropped)].append(value)
        if sample.endswith("_count"):
            sizes[without(labels, dropped)] += 1
    found: dict[tuple[str, Labels], float] = {}
    for (sample, labels), values in groups.items():
        rule = RULES[name] if family.kind == "gauge" else "sum"
        if sample.endswith("_bucket") and len(values) < sizes[without(labels, ["le"])]:
            continue
        total = {"max": max(values), "min": min(values)}.get(rule, sum(values))
        found[sample, labels] = total / len(values) if rule == "mean" else total
    return found


@settings(max_examples=10)
@given(RANDOMS)
def test_the_pod_view_aggregates_by_each_familys_rule(random: Random) -> None:
    """Every sample of every family of two dialects equals brute force over the engines' page."""
    registry = fleet(random)
    engines = parse(render(registry).decode())
    pod = page(registry, SeriesFilter().for_pod)

    assert pod.keys() == engines.keys()
    for name, family in engines.items():
        assert pod[name].kind == family.kind
        wanted = expected(family, name, POD_DROPPED_LABELS)
        assert pod[name].samples == pytest.approx(wanted), name


def totals(families: dict[str, Family]) -> dict[str, float]:
    """Return the totals of counters, and of counts and sums of histograms, by name."""
    found: dict[str, float] = defaultdict(float)
    for name, family in families.items():
        for (sample, _), value in family.samples.items():
            ends = sample.removeprefix(name)
            if family.kind == "counter" or ends in ("_count", "_sum"):
                found[sample] += value
    return found


@settings(max_examples=10)
@given(
    RANDOMS,
    st.sets(st.sampled_from(["engine", "model_name", "finished_reason", "source", "dp_rank"])),
)
def test_dropping_labels_never_changes_totals(random: Random, dropped: set[str]) -> None:
    """No sample has a dropped label."""
    registry = fleet(random)

    found = page(registry, SeriesFilter(dropped_labels=frozenset(dropped)))

    assert totals(found) == pytest.approx(totals(parse(render(registry).decode())))
    names = {label for family in found.values() for _, ls in family.samples for label, _ in ls}
    assert names.isdisjoint(dropped)


@settings(max_examples=10)
@given(RANDOMS, st.integers(2, 40))
def test_thinning_leaves_out_buckets_only(random: Random, thinning: int) -> None:
    """Counts, sums and the remaining buckets are unchanged; the highest bound remains."""
    registry = fleet(random)
    whole = parse(render(registry).decode())

    thin = page(registry, SeriesFilter(bucket_thinning=thinning))

    assert thin.keys() == whole.keys()
    for name, family in whole.items():
        kept = thin[name].samples
        assert kept.items() <= family.samples.items()
        gone = family.samples.keys() - kept.keys()
        assert all(sample.endswith("_bucket") for sample, _ in gone)
        assert "+Inf" not in {dict(labels)["le"] for _, labels in gone}
        if family.kind == "histogram":
            bounds = sorted({float(dict(ls)["le"]) for s, ls in family.samples if "le" in dict(ls)})
            left = {float(dict(ls)["le"]) for s, ls in kept if "le" in dict(ls)}
            assert {bounds[-1], bounds[-2]} <= left or len(left) < len(bounds)
            assert bounds[-2] in left


def test_ranks_of_one_replica_count_once() -> None:
    """Tensor-parallel ranks report the same requests; values of their own are added up."""
    registry = new_registry()
    applier = Applier(registry)
    for dp in range(2):
        for tp in range(4):
            labels = {**SCHEDULER, "tp_rank": str(tp), "dp_rank": str(dp)}
            engine = registry.register(EngineInfo(f"{dp}/{tp}", "sglang", labels))
            slot = engine.layout.find("sglang:num_used_tokens").slots[0]
            engine.values[slot] = 10 * (dp + 1)
            families = [
                SampledFamily(name, "counter", [], [Sample([], 3.0)])
                for name in ("sglang:num_retracted_requests_total", CPU)
            ]
            applier.apply(engine, Samples(0, 1.0, families))

    found = page(registry, SeriesFilter().for_pod)

    left = (("model_name", "m"),)
    assert found["sglang:num_used_tokens"].samples == {("sglang:num_used_tokens", left): 30}
    retracted = "sglang:num_retracted_requests"
    assert found[retracted].samples == {(retracted + "_total", left): 2 * 3}
    assert found[CPU.removesuffix("_total")].samples == {(CPU, left): 8 * 3}


CPU = "sglang:scheduler_process_cpu_seconds_total"


def test_the_counters_of_a_retired_engine_stay_in_the_sum() -> None:
    """While another engine is exposed, the sum never decreases, also when the engine returns."""
    registry = new_registry()
    for number in range(2):
        info = EngineInfo(str(number), "vllm", {"engine": str(number), "model_name": "m"})
        filled(registry.register(info), Random(number))
    engine = registry.engines["0"]
    registry.engines["1"].feeds.streams.add(1)
    before = page(registry, SeriesFilter().for_pod)
    pages = [before]
    registry.expire(ENGINE_EXPIRES_SECONDS + 1)
    assert list(registry.retired) == ["0"]
    pages.append(page(registry, SeriesFilter().for_pod))
    registry.register(EngineInfo("0", "vllm", engine.labels))
    pages.append(page(registry, SeriesFilter().for_pod))

    for name, family in before.items():
        if family.kind != "gauge":
            assert all(one[name].samples == family.samples for one in pages), name
    only = page_of(registry.engines["1"])["vllm:num_requests_running"]
    assert list(pages[1]["vllm:num_requests_running"].samples.values()) == list(
        only.samples.values()
    )


def page_of(engine: Engine) -> dict[str, Family]:
    """Return the page of one engine."""
    registry = new_registry()
    registry.expose(engine)
    return parse(render(registry).decode())


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=9), RANDOMS)
def test_a_sum_is_the_same_in_any_order(values: list[float], random: Random) -> None:
    """Otherwise the last digit of a counter could decrease."""
    other = random.sample(values, len(values))

    assert aggregate_numbers(values, "sum") == aggregate_numbers(other, "sum")


@given(st.data())
def test_histograms_are_added_up_over_their_common_bounds(data: st.DataObject) -> None:
    """Each bucket is exact."""
    some = st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0, 5.0]), unique=True).map(sorted).map(tuple)
    observed = st.lists(st.floats(0, 6), max_size=20)
    found: list[Histogram] = []
    everything: list[float] = []
    for bounds in data.draw(st.lists(some, min_size=2, max_size=4)):
        histogram = Histogram(bounds)
        values = data.draw(observed)
        everything += values
        histogram.observe_many(list(values))
        found.append(histogram)

    total = aggregate_histograms(found)

    assert set(total.bounds) == set.intersection(*(set(one.bounds) for one in found))
    counts = [sum(value <= bound for value in everything) for bound in total.bounds]
    assert total.cumulative == [*counts, len(everything)]
    assert total.sum == pytest.approx(sum(everything))


CACHE = {"block_size": "16", "num_gpu_blocks": "100", "cache_dtype": "auto"}


@pytest.mark.parametrize(
    ("others", "wanted"),
    [
        ([], CACHE),
        ([{**CACHE, "num_gpu_blocks": "50"}], {**CACHE, "num_gpu_blocks": "150"}),
        ([{**CACHE, "cache_dtype": "fp8"}], {"block_size": "16", "num_gpu_blocks": "200"}),
        (
            [{**CACHE, "block_size": "32", "num_gpu_blocks": "10"}],
            {"block_size": "16", "num_gpu_blocks": "120", "cache_dtype": "auto"},
        ),
        ([{**CACHE, "num_gpu_blocks": "None"}], {"block_size": "16", "cache_dtype": "auto"}),
    ],
)
def test_the_cache_configurations_of_several_engines_are_aggregated(
    others: list[dict[str, str]], wanted: dict[str, str]
) -> None:
    """Blocks are added up in units of the smallest; other labels that differ are left out."""
    assert aggregate_info([CACHE, *others]) == wanted


def test_an_engine_that_came_and_went_between_two_pages_counts() -> None:
    """Its counters are in the sum of the engines that are exposed on both."""
    registry = new_registry()
    name = "vllm:num_preemptions_total"
    engines = [EngineInfo(f"e{n}", "vllm", {"engine": str(n), "model_name": "m"}) for n in range(3)]
    for info in engines[:2]:
        registry.register(info)

    def total() -> float:
        (family,) = page(registry, SeriesFilter().for_pod, {name}).values()
        (value,) = family.samples.values()
        return value

    assert total() == 0
    passing = registry.register(engines[2])
    passing.values[passing.layout.find(name).slots[0]] = 1
    registry.touch(passing)
    registry.retire(passing)
    assert total() == 1
