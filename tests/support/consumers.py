"""Rules by which request routers and autoscalers read a page, written from their sources.

Read in July and August 2026: llm-d-router (the endpoint picker of the Gateway API inference
extension), AIBrix's engine fetcher, production-stack's router.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

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
