"""What the metrics pages of engines call the numbers of a row, by engine.

A number is the sum of all samples of a replica that match; of several alternatives, the first that
the page has. Older releases and other engines have other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Match(NamedTuple):
    """Samples of one name, with these labels among theirs."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


Alternatives = tuple[tuple[Match, ...], ...]
"""Alternatives of a number, each with the samples to add up."""


def _one(*names: str, **labels: str) -> Alternatives:
    return tuple((Match(name, tuple(labels.items())),) for name in names)


class EnginePage(NamedTuple):
    """The page of one engine.

    Attributes:
        dialect: The engine.
        prefix: How the names of its families begin.
        model: Label with the model's name; empty: the page has none.
        replica: Labels that distinguish replicas on one page.
        gauges: Alternatives of the gauges of ``EngineRow``.
        counters: Likewise of what is counted.
        histograms: Names of the histograms of seconds, without ``_bucket``.
        is_pooled: Whether gauges are repeated by several processes: the highest counts.
        ranks: Labels of which only samples with "0" count: the others repeat them.
    """

    dialect: str
    prefix: str
    model: str
    replica: tuple[str, ...]
    gauges: Mapping[str, Alternatives]
    counters: Mapping[str, Alternatives]
    histograms: Mapping[str, tuple[str, ...]]
    is_pooled: bool = False
    ranks: tuple[str, ...] = ()


PAGES = (
    EnginePage(
        dialect="vllm",
        prefix="vllm:",
        model="model_name",
        replica=("engine", "origin"),
        gauges={
            "running": _one("vllm:num_requests_running"),
            "waiting": _one("vllm:num_requests_waiting"),
            "kv_cache_usage": _one("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        },
        counters={
            "prompt": (
                *_one("vllm:prompt_tokens_by_source_total", source="local_compute"),
                *_one("vllm:prompt_tokens_total"),
            ),
            "generation": _one("vllm:generation_tokens_total"),
            "preemptions": _one("vllm:num_preemptions_total"),
            "finished": _one("vllm:request_success_total"),
            "aborted": _one("vllm:request_success_total", finished_reason="abort"),
            "looked_up": _one(
                "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"
            ),
            "found": _one("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        },
        histograms={
            "ttft": ("vllm:time_to_first_token_seconds",),
            "inter_token": (
                "vllm:inter_token_latency_seconds",
                "vllm:time_per_output_token_seconds",
            ),
            "e2e": ("vllm:e2e_request_latency_seconds",),
        },
    ),
    EnginePage(
        dialect="sglang",
        prefix="sglang:",
        model="model_name",
        # A tokenizer and the schedulers of all data-parallel ranks are one server.
        replica=("origin",),
        gauges={
            "running": _one("sglang:num_running_reqs"),
            "waiting": _one("sglang:num_queue_reqs"),
            "kv_cache_usage": _one("sglang:token_usage"),
        },
        counters={
            "prompt": (
                *_one("sglang:realtime_tokens_total", mode="prefill_compute"),
                *_one("sglang:prompt_tokens_total"),
            ),
            "generation": (
                *_one("sglang:realtime_tokens_total", mode="decode"),
                *_one("sglang:generation_tokens_total"),
            ),
            "preemptions": _one("sglang:num_retracted_requests_total"),
            "finished": _one("sglang:num_requests_total"),
            "aborted": _one("sglang:num_aborted_requests_total"),
            "looked_up": _one("sglang:prefill_effective_tokens_total"),
            "found": (
                tuple(
                    Match("sglang:prefill_effective_tokens_total", (("mode", mode),))
                    for mode in ("device_hit", "host_hit", "storage_hit")
                ),
            ),
        },
        histograms={
            "ttft": ("sglang:time_to_first_token_seconds",),
            "inter_token": ("sglang:inter_token_latency_seconds",),
            "e2e": ("sglang:e2e_request_latency_seconds",),
        },
        ranks=("tp_rank", "pp_rank", "moe_ep_rank"),
    ),
    EnginePage(
        dialect="triton",
        prefix="nv_inference_",
        model="model",
        replica=(),
        gauges={"waiting": _one("nv_inference_pending_request_count")},
        counters={
            "finished": (
                (Match("nv_inference_request_success"), Match("nv_inference_request_failure")),
            ),
        },
        histograms={},
    ),
    EnginePage(
        dialect="trtllm",
        prefix="trtllm_",
        model="model_name",
        replica=(),
        gauges={
            "running": _one("trtllm_num_requests_running"),
            "waiting": _one("trtllm_num_requests_waiting"),
            "kv_cache_usage": _one("trtllm_kv_cache_utilization"),
        },
        counters={
            "prompt": _one("trtllm_prompt_tokens_total"),
            "generation": _one("trtllm_generation_tokens_total"),
            "finished": (
                (Match("trtllm_request_success_total"), Match("trtllm_request_error_total")),
            ),
        },
        histograms={
            "ttft": ("trtllm_time_to_first_token_seconds",),
            "e2e": ("trtllm_e2e_request_latency_seconds",),
        },
        is_pooled=True,
    ),
    EnginePage(
        dialect="llamacpp",
        prefix="llamacpp:",
        model="",
        replica=(),
        gauges={
            "running": _one("llamacpp:requests_processing"),
            "waiting": _one("llamacpp:requests_deferred"),
        },
        counters={
            "prompt": _one("llamacpp:prompt_tokens_total"),
            "generation": _one("llamacpp:tokens_predicted_total"),
            "looked_up": (
                (
                    Match("llamacpp:prompt_tokens_total"),
                    Match("llamacpp:prompt_tokens_cached_total"),
                ),
            ),
            "found": _one("llamacpp:prompt_tokens_cached_total"),
        },
        histograms={},
    ),
)

NAMES = frozenset(
    name
    for page in PAGES
    for name in (
        *(m.name for each in page.gauges.values() for one in each for m in one),
        *(m.name for each in page.counters.values() for one in each for m in one),
        *(f"{name}_bucket" for names in page.histograms.values() for name in names),
    )
)
"""Names of all samples that are read."""
STATE, STALLED, STEP_AGE = (
    "sidestep_engine_state",
    "sidestep_engine_stalled_seconds",
    "sidestep_engine_step_age_seconds",
)
"""Health of vLLM's engines, on the page of a sidestep exporter."""
