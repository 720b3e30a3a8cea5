"""The table of metrics pages: the meaning of families of engines and of other servers.

``PAGES`` has the numbers of ``sidestep top`` and of the statistics line. ``COMMON_NAMES`` has the
families of scraped pages that mean the same as one with a common name. An engine that sidestep knows by
its page alone is in no other table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sidestep.catalog.row import Kind


class Match(NamedTuple):
    """Samples of one name, with these labels among theirs."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


PATH = "/metrics"
"""Path of most servers' metrics pages."""
FURTHER_PATHS = ("/prometheus/metrics",)
"""Further paths, which are tried first: TensorRT-LLM has another page at ``PATH``."""
Alternatives = tuple[tuple[Match, ...], ...]
"""Alternatives of a number, each with the samples to add up."""


def _numbers(**texts: str) -> Mapping[str, Alternatives]:
    """Return numbers by name: ``a{label=value} + b | c`` is the sum of a and b, or else c."""
    return {
        name: tuple(tuple(map(_match, one.split(" + "))) for one in text.split(" | "))
        for name, text in texts.items()
    }


def _match(text: str) -> Match:
    name, _, labels = text.rstrip("}").partition("{")
    label, _, value = labels.partition("=")
    return Match(name, ((label, value),) if label else ())


class EnginePage(NamedTuple):
    """The page of one engine.

    A number is the sum of all matching samples of a replica. It has alternatives, since releases of one
    engine have different names: the first that the page has counts.

    Attributes:
        prefix: Beginning of the names of its families.
        replica: Labels that distinguish replicas on one page.
        gauges: Alternatives of the gauges of ``EngineRow``.
        counters: Alternatives of the counters behind the other numbers of ``EngineRow``.
        histograms: Names of the histograms of seconds, without ``_bucket``.
        lengths: Names of the histograms of a request's tokens: ``prompt_tokens`` and ``output_tokens``.
        is_pooled: Whether several processes repeat a gauge, so that the highest value counts.
        ranks: Labels of ranks. Only samples with "0" count, since other ranks repeat them.
        path: Path of the page on these ports, where the root does not lead to it.
    """

    dialect: str
    title: str
    prefix: str
    model: str
    replica: tuple[str, ...]
    gauges: Mapping[str, Alternatives]
    counters: Mapping[str, Alternatives]
    histograms: Mapping[str, tuple[str, ...]]
    is_pooled: bool = False
    ranks: tuple[str, ...] = ()
    ports: Sequence[int] = ()
    path: str = ""
    lengths: Mapping[str, str] = {}

    def names(self, kind: Kind) -> frozenset[str]:
        """Return the names of the families of one kind."""
        if kind == "histogram":
            return frozenset(name for names in self.histograms.values() for name in names)
        numbers = self.gauges if kind == "gauge" else self.counters
        return frozenset(m.name for each in numbers.values() for one in each for m in one)


class CommonName(NamedTuple):
    """One family of a page that has a common name, too.

    Attributes:
        read_from: Release or document that has the family.
        token_type: Value of the label ``gen_ai_token_type``, of families that have it.
        process: Label of processes that repeat a gauge, so that the highest value counts.
    """

    source: str
    name: str
    read_from: str
    token_type: str = ""
    process: str = ""


PAGES = (
    EnginePage(
        dialect="vllm",
        title="vLLM",
        prefix="vllm:",
        model="model_name",
        replica=("engine", "origin"),
        gauges=_numbers(
            running="vllm:num_requests_running",
            waiting="vllm:num_requests_waiting",
            kv_cache_usage="vllm:kv_cache_usage_perc | vllm:gpu_cache_usage_perc",
        ),
        counters=_numbers(
            prompt="vllm:prompt_tokens_by_source_total{source=local_compute}"
            " | vllm:prompt_tokens_total",
            generation="vllm:generation_tokens_total",
            preemptions="vllm:num_preemptions_total",
            finished="vllm:request_success_total",
            aborted="vllm:request_success_total{finished_reason=abort}",
            looked_up="vllm:prefix_cache_queries_total | vllm:gpu_prefix_cache_queries_total",
            found="vllm:prefix_cache_hits_total | vllm:gpu_prefix_cache_hits_total",
        ),
        histograms={
            "ttft": ("vllm:time_to_first_token_seconds",),
            "inter_token": (
                "vllm:inter_token_latency_seconds",
                "vllm:time_per_output_token_seconds",
            ),
            "e2e": ("vllm:e2e_request_latency_seconds",),
        },
        lengths={
            "prompt_tokens": "vllm:request_prompt_tokens",
            "output_tokens": "vllm:request_generation_tokens",
        },
        ports=range(8000, 8016),
    ),
    EnginePage(
        dialect="sglang",
        title="SGLang",
        prefix="sglang:",
        model="model_name",
        # A tokenizer and the schedulers of all data-parallel ranks are one server.
        replica=("origin",),
        gauges=_numbers(
            running="sglang:num_running_reqs",
            waiting="sglang:num_queue_reqs",
            kv_cache_usage="sglang:token_usage",
        ),
        counters=_numbers(
            prompt="sglang:realtime_tokens_total{mode=prefill_compute}"
            " | sglang:prompt_tokens_total",
            generation="sglang:realtime_tokens_total{mode=decode} | sglang:generation_tokens_total",
            preemptions="sglang:num_retracted_requests_total",
            finished="sglang:num_requests_total",
            aborted="sglang:num_aborted_requests_total",
            looked_up="sglang:prefill_effective_tokens_total",
            found="sglang:prefill_effective_tokens_total{mode=device_hit}"
            " + sglang:prefill_effective_tokens_total{mode=host_hit}"
            " + sglang:prefill_effective_tokens_total{mode=storage_hit}",
        ),
        histograms={
            "ttft": ("sglang:time_to_first_token_seconds",),
            "inter_token": ("sglang:inter_token_latency_seconds",),
            "e2e": ("sglang:e2e_request_latency_seconds",),
        },
        lengths={
            "prompt_tokens": "sglang:prompt_tokens_histogram",
            "output_tokens": "sglang:generation_tokens_histogram",
        },
        ranks=("tp_rank", "pp_rank", "moe_ep_rank"),
        ports=range(30000, 30004),
    ),
    EnginePage(
        dialect="triton",
        title="Triton",
        prefix="nv_inference_",
        model="model",
        replica=(),
        gauges=_numbers(
            waiting="nv_inference_pending_request_count",
        ),
        counters=_numbers(
            finished="nv_inference_request_success + nv_inference_request_failure",
        ),
        histograms={},
        ports=(8002,),
        path=PATH,
    ),
    EnginePage(
        dialect="trtllm",
        title="TensorRT-LLM",
        prefix="trtllm_",
        model="model_name",
        replica=(),
        gauges=_numbers(
            running="trtllm_num_requests_running",
            waiting="trtllm_num_requests_waiting",
            kv_cache_usage="trtllm_kv_cache_utilization",
        ),
        counters=_numbers(
            prompt="trtllm_prompt_tokens_total",
            generation="trtllm_generation_tokens_total",
            finished="trtllm_request_success_total + trtllm_request_error_total",
            looked_up="trtllm_prompt_tokens_total",
            found="trtllm_prompt_cached_tokens_total",
        ),
        histograms={
            "ttft": ("trtllm_time_to_first_token_seconds",),
            "e2e": ("trtllm_e2e_request_latency_seconds",),
        },
        is_pooled=True,
    ),
    EnginePage(
        dialect="llamacpp",
        title="llama.cpp",
        prefix="llamacpp:",
        model="",
        replica=(),
        gauges=_numbers(
            running="llamacpp:requests_processing",
            waiting="llamacpp:requests_deferred",
        ),
        counters=_numbers(
            prompt="llamacpp:prompt_tokens_total",
            generation="llamacpp:tokens_predicted_total",
            looked_up="llamacpp:prompt_tokens_total + llamacpp:prompt_tokens_cached_total",
            found="llamacpp:prompt_tokens_cached_total",
        ),
        histograms={},
        ports=range(8080, 8084),
    ),
)

NAMES = frozenset(
    name
    for page in PAGES
    for name in (
        *page.names("gauge"),
        *page.names("counter"),
        *(f"{name}_bucket" for name in page.names("histogram")),
    )
)
"""Names of all samples that are read."""
STATE, STALLED, STEP_AGE = (
    "sidestep_engine_state",
    "sidestep_engine_stalled_seconds",
    "sidestep_engine_step_age_seconds",
)
"""Health of engines, on the page of a sidestep exporter."""

_TRTLLM, _DYNAMO, _LMCACHE, _TGI = (
    "TensorRT-LLM's source of 2026-09 (pre-releases of 1.4)",
    "Dynamo's dashboards of 2026-04-21",
    "LMCache's source of 2026, release not known",
    "TGI's documents of 2026, release not known",
)
_TTFT, _DURATION, _PER_TOKEN = (
    f"gen_ai_server_{name}_seconds"
    for name in ("time_to_first_token", "request_duration", "time_per_output_token")
)
_TOKENS = "gen_ai_client_token_usage"
_LOOKED_UP, _FOUND = (
    f"sidestep_prefix_cache_{name}_tokens_total" for name in ("looked_up", "found")
)
_QUEUE, _RUNNING, _WAITING = (
    "sidestep_request_queue_seconds",
    "sidestep_requests_running",
    "sidestep_requests_waiting",
)

COMMON_NAMES: tuple[CommonName, ...] = (
    CommonName("trtllm_time_to_first_token_seconds", _TTFT, _TRTLLM),
    CommonName("trtllm_time_per_output_token_seconds", _PER_TOKEN, _TRTLLM),
    CommonName("trtllm_e2e_request_latency_seconds", _DURATION, _TRTLLM),
    CommonName("trtllm_request_queue_time_seconds", _QUEUE, _TRTLLM),
    CommonName("trtllm_num_requests_running", _RUNNING, _TRTLLM, process="pid"),
    CommonName("trtllm_num_requests_waiting", _WAITING, _TRTLLM, process="pid"),
    CommonName(
        "trtllm_kv_cache_utilization", "sidestep_kv_cache_usage_ratio", _TRTLLM, process="pid"
    ),
    CommonName("trtllm_prompt_tokens_total", _LOOKED_UP, _TRTLLM),
    CommonName("trtllm_prompt_cached_tokens_total", _FOUND, _TRTLLM),
    CommonName("dynamo_frontend_time_to_first_token_seconds", _TTFT, _DYNAMO),
    CommonName(
        "dynamo_frontend_inter_token_latency_seconds",
        "sidestep_inter_token_latency_seconds",
        _DYNAMO,
    ),
    CommonName("dynamo_frontend_request_duration_seconds", _DURATION, _DYNAMO),
    CommonName("dynamo_frontend_input_sequence_tokens", _TOKENS, _DYNAMO, "input"),
    CommonName("dynamo_frontend_output_sequence_tokens", _TOKENS, _DYNAMO, "output"),
    CommonName("lmcache:num_lookup_tokens_total", _LOOKED_UP, _LMCACHE),
    CommonName("lmcache:num_lookup_hits_total", _FOUND, _LMCACHE),
    CommonName("tgi_batch_current_size", _RUNNING, _TGI),
    CommonName("tgi_queue_size", _WAITING, _TGI),
    CommonName("tgi_request_duration", _DURATION, _TGI),
    CommonName("tgi_request_queue_duration", _QUEUE, _TGI),
    CommonName("tgi_request_input_length", _TOKENS, _TGI, "input"),
    CommonName("tgi_request_generated_tokens", _TOKENS, _TGI, "output"),
)
"""Scraped families that mean the same as one with a common name.

No page of these servers was recorded. Families with another meaning are left out, such as Dynamo's
queued requests, which wait for their first token, and TGI's time per token, which counts the first one.
"""
