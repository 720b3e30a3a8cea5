"""How request routers and autoscalers read a page: each one's rule, written anew from its source.

Read in July and August 2026: llm-d-router (the endpoint picker of the Gateway API inference
extension), AIBrix's engine fetcher, production-stack's router.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)(?: (-?\d+))?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"(?:,|$)')
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
"""By engine: what the endpoint picker reads as a number."""


class Sample(NamedTuple):
    """One line; ``stamp`` in milliseconds, 0 without one."""

    labels: dict[str, str]
    value: float
    stamp: int


Families = dict[str, list[Sample]]


def go_text(page: str) -> Families:
    """The families of gauges and counters as Go's reader of text 0.0.4 has them, in order.

    Raises:
        AssertionError: A line that it would refuse, and with it the page.
    """
    kinds: dict[str, str] = {}
    found: Families = {}
    seen: set[str] = set()
    current = ""
    for line in page.splitlines():
        if line.startswith("#"):
            word, name, text = line[2:].split(" ", 2)
            assert word in ("HELP", "TYPE"), line
            assert re.fullmatch(_NAME, name), line
            if word == "TYPE":
                assert name not in kinds, f"second TYPE of {name}"
                assert text in ("counter", "gauge", "histogram", "summary", "untyped"), line
                kinds[name] = text
                current = name
            continue
        match = _SAMPLE.fullmatch(line)
        assert match is not None, line
        name, labels, value, stamp = match.groups()
        assert name.startswith(current), f"{name} stands among {current}"
        series = line.rsplit(" ", 1)[0]
        assert series not in seen, f"twice: {series}"
        seen.add(series)
        if kinds.get(name) in ("counter", "gauge"):
            pairs = dict(_LABEL.findall(labels or ""))
            found.setdefault(name, []).append(Sample(pairs, float(value), int(stamp or 0)))
    return found


def latest(families: Families, name: str) -> Sample:
    """What the endpoint picker takes of a family: the latest stamp, the first where none has one.

    Raises:
        KeyError: It has none, which it counts as an error.
    """
    return max(families[name], key=lambda sample: sample.stamp)


class Picked(NamedTuple):
    """What the endpoint picker knows of a pod."""

    waiting: int
    running: int
    usage: float
    block_size: int
    blocks: int
    active: frozenset[str]
    queued: frozenset[str]
    room: int


def endpoint_picker(page: str, engine: str) -> Picked:
    """Every number and label that it extracts."""
    families = go_text(page)
    numbers = {key: latest(families, name).value for key, name in PICKED[engine].items()}
    if engine == "vllm":
        # Labels of an info metric: numbers, or the extraction fails.
        cache = latest(families, "vllm:cache_config_info").labels
        numbers["block_size"] = int(cache["block_size"])
        numbers["blocks"] = int(cache["num_gpu_blocks"])
    adapters: dict[str, str] = {}
    combinations = families.get("vllm:lora_requests_info", [])
    if combinations:
        # The value is the Unix time of a combination: the newest counts.
        adapters = max(combinations, key=lambda sample: sample.value).labels
    return Picked(
        int(numbers["waiting"]),
        int(numbers["running"]),
        numbers["usage"],
        int(numbers["block_size"]),
        int(numbers["blocks"]),
        _names(adapters.get("running_lora_adapters", "")),
        _names(adapters.get("waiting_lora_adapters", "")),
        int(adapters.get("max_lora") or 0),
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def aibrix(page: str, names: list[str]) -> dict[str, float]:
    """By model and family: the first sample, for each model that the family names."""
    families = go_text(page)
    found: dict[str, float] = {}
    for name in names:
        samples = families[name]
        for model in {sample.labels["model_name"] for sample in samples}:
            found[f"{model}/{name}"] = samples[0].value
    return found


def production_stack(page: str) -> Mapping[str, float]:
    """By sample name: the last one counts, and 0 where there is none."""
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
