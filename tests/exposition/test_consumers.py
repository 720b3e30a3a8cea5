"""Consumers' reading rules against the pod view of recorded runs of several engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from intakes import Fed, Step, steps
from rendered import render
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo

PICKED = {
    "vllm": {
        "waiting": "vllm:num_requests_waiting",
        "running": "vllm:num_requests_running",
        "usage": "vllm:kv_cache_usage_perc",
    },
    "sglang": {
        "waiting": "sglang:num_queue_reqs",
        "running": "sglang:num_running_reqs",
        "usage": "sglang:token_usage",
        "block_size": "sglang:page_size",
        "blocks": "sglang:num_pages",
    },
}
"""Families that the endpoint picker reads as numbers, by engine."""


class Sample(NamedTuple):
    """One sample; ``stamp`` in seconds, 0 where the page has none."""

    labels: dict[str, str]
    value: float
    stamp: float


Families = dict[str, list[Sample]]


def go_text(page: str) -> Families:
    """Return the gauges and counters of a page as Go's parser of the text format has them.

    Raises:
        AssertionError: Go would refuse the page: a family or a series is there twice.
    """
    metrics = list(text_string_to_metric_families(page))
    names = [metric.name for metric in metrics]
    assert len(names) == len(set(names)), names
    found: Families = {}
    for metric in metrics:
        series = [(sample.name, *sorted(sample.labels.items())) for sample in metric.samples]
        assert len(series) == len(set(series)), metric.name
        if metric.type in ("counter", "gauge"):
            for sample in metric.samples:
                stamp = float(sample.timestamp or 0)
                one = Sample(sample.labels, sample.value, stamp)
                found.setdefault(sample.name, []).append(one)
    return found


def latest(families: Families, name: str) -> Sample:
    """Return the sample that the endpoint picker uses: that of the latest timestamp, else the first.

    Raises:
        KeyError: The page does not have the family, an error for the picker.
    """
    return max(families[name], key=lambda sample: sample.stamp)


class Picked(NamedTuple):
    """Attributes of a pod in the endpoint picker."""

    waiting: int
    running: int
    usage: float
    block_size: int
    blocks: int
    active: frozenset[str]
    queued: frozenset[str]
    room: int


def endpoint_picker(page: str, engine: str, before: Picked | None = None) -> Picked:
    """Return all that the endpoint picker extracts from a page.

    ``before`` is what it extracted from the pod's last page: without a combination of LoRA
    adapters, or without slots in it, the picker keeps what it knew.
    """
    families = go_text(page)
    numbers = {key: latest(families, name).value for key, name in PICKED[engine].items()}
    if engine == "vllm":
        # The picker takes these labels of an info metric as numbers, or fails.
        cache = latest(families, "vllm:cache_config_info").labels
        numbers["block_size"] = int(cache["block_size"])
        numbers["blocks"] = int(cache["num_gpu_blocks"])
    active, queued, room = before[-3:] if before is not None else (frozenset(), frozenset(), 0)
    combinations = families.get("vllm:lora_requests_info", [])
    if combinations:
        # The value is a Unix time: the picker takes the newest combination.
        adapters = max(combinations, key=lambda sample: sample.value).labels
        active = _names(adapters.get("running_lora_adapters", ""))
        queued = _names(adapters.get("waiting_lora_adapters", ""))
        room = int(adapters.get("max_lora") or room)
    return Picked(
        int(numbers["waiting"]),
        int(numbers["running"]),
        numbers["usage"],
        int(numbers["block_size"]),
        int(numbers["blocks"]),
        active,
        queued,
        room,
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def aibrix(page: str, names: list[str]) -> dict[str, float]:
    """Return the first sample of each family, by model and family."""
    families = go_text(page)
    found: dict[str, float] = {}
    for name in names:
        samples = families[name]
        for model in {sample.labels["model_name"] for sample in samples}:
            found[f"{model}/{name}"] = samples[0].value
    return found


def production_stack(page: str) -> Mapping[str, float]:
    """Return the last sample of each name, or 0 where there is none."""
    wanted = dict.fromkeys(
        (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:gpu_prefix_cache_hit_rate",
            "vllm:gpu_prefix_cache_hits_total",
            "vllm:gpu_prefix_cache_queries_total",
            "vllm:gpu_cache_usage_perc",
        ),
        0.0,
    )
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in wanted:
                wanted[sample.name] = sample.value
    return wanted


WVA = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:request_success_total",
    "vllm:cache_config_info",
)
"""Series that the workload variant autoscaler queries, without old names."""


def pod_page(registry: Registry) -> str:
    """Return the engines' part of the pod page."""
    return render(registry, SeriesFilter().for_pod).decode()


def run_of(name: str, share: float) -> Fed:
    """Apply a share of a recorded run, after which requests are in flight."""
    fed = Fed()
    found = list(steps(name))
    fed.feed(found[: int(len(found) * share)])
    return fed


def ranks(run: str, shares: list[float]) -> Fed:
    """Apply shares of a run of one engine as runs of several ranks."""
    fed = Fed()
    for rank, share in enumerate(shares):
        fed.feed(_renamed(run, share, str(rank)))
    return fed


def _renamed(run: str, share: float, rank: str) -> Iterator[Step]:
    found = list(steps(run))
    for stream, infos, item in found[: int(len(found) * share)]:
        yield f"{stream}/{rank}", [_rank(info, rank) for info in infos], item


def _rank(info: EngineInfo, rank: str) -> EngineInfo:
    labels = {**info.labels, "engine": rank}
    return msgspec.structs.replace(info, id=f"{info.id}/{rank}", labels=labels)


def values(families: Families, name: str, **labels: str) -> list[float]:
    """Return the values of samples with these labels."""
    return [sample.value for sample in families[name] if labels.items() <= sample.labels.items()]


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_the_endpoint_picker_reads_all_ranks_of_vllm(share: float) -> None:
    """Queues and blocks are sums, usage is the maximum; each has one series."""
    fed = run_of("core_dp", share)
    ranks = go_text(fed.page)
    page = pod_page(fed.intake.registry)

    picked = endpoint_picker(page, "vllm")

    assert {sample.labels["engine"] for sample in ranks["vllm:num_requests_running"]} == {"0", "1"}
    assert picked.running == sum(values(ranks, "vllm:num_requests_running"))
    assert picked.waiting == sum(values(ranks, "vllm:num_requests_waiting"))
    assert picked.usage == max(values(ranks, "vllm:kv_cache_usage_perc"))
    caches = [sample.labels for sample in ranks["vllm:cache_config_info"]]
    assert picked.blocks == sum(int(cache["num_gpu_blocks"]) for cache in caches) > 0
    assert {picked.block_size} == {int(cache["block_size"]) for cache in caches}
    for name in WVA:
        if name != "vllm:request_success_total":
            assert len(go_text(page)[name]) == 1


@pytest.mark.parametrize("share", [0.5])
def test_the_endpoint_picker_reads_all_ranks_of_sglang(share: float) -> None:
    """Pages of the cache are added up, their size is not."""
    fed = run_of("sglang_dp", share)
    ranks = go_text(fed.page)

    picked = endpoint_picker(pod_page(fed.intake.registry), "sglang")

    assert picked.running == sum(values(ranks, "sglang:num_running_reqs"))
    assert picked.waiting == sum(values(ranks, "sglang:num_queue_reqs"))
    assert picked.usage == max(values(ranks, "sglang:token_usage"))
    assert (picked.block_size, picked.blocks) == (1, 2 * 4096)


def test_the_total_of_a_queue_comes_before_its_priorities() -> None:
    """A client that reads the first sample gets all requests, not those of one priority."""
    fed = run_of("sglang_labels", 0.7)
    families = go_text(pod_page(fed.intake.registry))

    first, *others = families["sglang:num_running_reqs"]

    assert "priority" not in first.labels
    assert others
    assert first.value == sum(sample.value for sample in others)


def test_the_endpoint_picker_reads_the_adapters_of_all_ranks() -> None:
    """One series lists the running and waiting adapters of all ranks and their slots."""
    shares = [0.35, 0.55, 0.75]
    fed = ranks("core_lora", shares)
    reported = [endpoint_picker(one_rank(share), "vllm") for share in shares]

    picked = endpoint_picker(pod_page(fed.intake.registry), "vllm")

    assert len(go_text(pod_page(fed.intake.registry))["vllm:lora_requests_info"]) == 1
    assert picked.active == frozenset().union(*(one.active for one in reported)) != frozenset()
    assert picked.queued == frozenset().union(*(one.queued for one in reported))
    assert picked.room == len(shares) * max(one.room for one in reported)


def test_the_endpoint_picker_clears_the_adapters_of_an_idle_pod() -> None:
    """The pod's last adapters are gone and its slots known, also to a picker that has just started."""
    busy = endpoint_picker(one_rank(0.55), "vllm")
    page = one_rank(1.0)

    picked = endpoint_picker(page, "vllm", before=busy)

    assert busy.active
    assert (frozenset(), frozenset(), busy.room) == picked[-3:]
    assert picked == endpoint_picker(page, "vllm")


def one_rank(share: float) -> str:
    """Return the pod page of one engine."""
    return pod_page(ranks("core_lora", [share]).intake.registry)


def test_aibrix_reads_a_number_for_the_model() -> None:
    """Its fetcher takes the first series of a family for every model that the family names."""
    fed = run_of("core_dp", 0.4)
    names = ["vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total"]
    ranks = go_text(fed.page)

    found = aibrix(pod_page(fed.intake.registry), names)

    assert found == {
        "tiny/vllm:num_requests_running": sum(values(ranks, "vllm:num_requests_running")),
        "tiny/vllm:kv_cache_usage_perc": max(values(ranks, "vllm:kv_cache_usage_perc")),
        "tiny/vllm:prompt_tokens_total": sum(values(ranks, "vllm:prompt_tokens_total")),
    }


def test_production_stack_reads_names_that_vllm_has_removed() -> None:
    """The client reads the last sample of each; with legacy names none is 0."""
    fed = Fed(legacy=True)
    found = list(steps("core_dp"))
    fed.feed(found[: len(found) * 2 // 5])
    registry = fed.intake.registry
    ranks = go_text(fed.page)

    read = production_stack(pod_page(registry))

    assert read["vllm:num_requests_running"] == sum(values(ranks, "vllm:num_requests_running"))
    assert read["vllm:gpu_cache_usage_perc"] == max(values(ranks, "vllm:kv_cache_usage_perc")) > 0
    hits, queries = (f"vllm:gpu_prefix_cache_{what}_total" for what in ("hits", "queries"))
    assert read[hits] == sum(values(ranks, "vllm:prefix_cache_hits_total"))
    assert read[queries] == sum(values(ranks, "vllm:prefix_cache_queries_total")) > 0
