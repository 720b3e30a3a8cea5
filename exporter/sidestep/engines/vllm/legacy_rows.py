"""Rows of former names of vLLM's families, exposed with ``--metrics.legacy`` for old dashboards.

Each is derived from the data of current releases, or is a constant where the engine no longer has
the mode that it described. ``vllm:tokens_total`` has no row, since no release ever filled it.
"""

from __future__ import annotations

import functools
from typing import Any

from sidestep.catalog.row import (
    ENGINE_LABELS,
    Alias,
    Computed,
    Constant,
    Kind,
    Row,
    Sampled,
    Source,
)


def _old(kind: Kind, name: str, source: Source, successor: str, text: str, **more: Any) -> Row:
    """Return a row of a family that vLLM V1 no longer has, without a label for the engine."""
    given = {"labels": ("model_name",), "until": "0.8", **more}
    return Row(
        name=f"vllm:{name}",
        kind=kind,
        source=source,
        help=text,
        status="hidden",
        successor=successor,
        **given,
    )


def _renamed(kind: Kind, name: str, successor: str, text: str, **more: Any) -> Row:
    """Return a row of a family that vLLM 0.12 has under the name ``successor`` only."""
    given = {"labels": ENGINE_LABELS, "until": "0.11", **more}
    return _old(kind, name, Alias(successor), successor, text, **given)


_counter, _gauge, _histogram = (
    functools.partial(_old, kind) for kind in ("counter", "gauge", "histogram")
)

# The table is laid out by hand: name above text.
# fmt: off
ROWS: tuple[Row, ...] = (
    _renamed("gauge", "gpu_cache_usage_perc", "vllm:kv_cache_usage_perc",
             "Share of the KV cache in use, from 0 to 1.", combine="max"),
    _renamed("counter", "gpu_prefix_cache_queries_total", "vllm:prefix_cache_queries_total",
             "Prompt tokens looked up in the prefix cache."),
    _renamed("counter", "gpu_prefix_cache_hits_total", "vllm:prefix_cache_hits_total",
             "Prompt tokens found in the prefix cache."),
    _renamed("histogram", "time_per_output_token_seconds", "vllm:inter_token_latency_seconds",
             "Time between two consecutive outputs of a request.", buckets="inter_token_latency"),
    _gauge("num_requests_swapped", Constant(0.0), "vllm:num_preemptions_total",
           "Requests swapped to the CPU: always 0, the engine recomputes instead of swapping."),
    _gauge("cpu_cache_usage_perc", Constant(0.0), "vllm:kv_offload_cpu_cache_usage_perc",
           "Share of the CPU swap space in use: always 0, the engine has none.", combine="max"),
    _gauge("cpu_prefix_cache_hit_rate", Constant(0.0), "vllm:external_prefix_cache_hits_total",
           "Hit rate of the CPU block cache: always 0, the engine has none.", combine="mean"),
    _gauge("gpu_prefix_cache_hit_rate", Computed("prefix_cache_hit_rate"),
           "vllm:prefix_cache_hits_total over vllm:prefix_cache_queries_total",
           "Share of prompt tokens found in the prefix cache, over the last 1,000 requests.",
           combine="mean"),
    _gauge("avg_prompt_throughput_toks_per_s", Computed("prompt_throughput"),
           "rate(vllm:prompt_tokens_total[1m])",
           "Computed prompt tokens per second over the last statistics interval."),
    _gauge("avg_generation_throughput_toks_per_s", Computed("generation_throughput"),
           "rate(vllm:generation_tokens_total[1m])",
           "Generated tokens per second over the last statistics interval."),
    _renamed("histogram", "time_in_queue_requests", "vllm:request_queue_time_seconds",
             "Time from a request's entry into the core's queue until it was first scheduled, in"
             " seconds; the engine's own began when the front end received the request,"
             " milliseconds earlier.",
             labels=("model_name",), until="0.8", buckets="request_latency"),
    _histogram("model_forward_time_milliseconds", Sampled(), "sidestep_iteration_duration_seconds",
               "Time in the model's forward pass; only where an engine sends it.",
               buckets="milliseconds"),
    _histogram("model_execute_time_milliseconds", Sampled(), "sidestep_iteration_duration_seconds",
               "Time in the model's execution; only where an engine sends it.",
               buckets="milliseconds"),
    _gauge("spec_decode_draft_acceptance_rate", Computed("draft_acceptance_rate"),
           "vllm:spec_decode_num_accepted_tokens_total over"
           " vllm:spec_decode_num_draft_tokens_total",
           "Share of draft tokens that were accepted.", combine="mean"),
    _gauge("spec_decode_efficiency", Computed("draft_efficiency"),
           "vllm:spec_decode_num_accepted_tokens_total over vllm:spec_decode_num_drafts_total",
           "Emitted tokens divided by those if every draft token had been accepted.",
           combine="mean"),
    # All rows of the struct must belong to the option; otherwise the others would be gated.
    _counter("spec_decode_num_emitted_tokens_total",
             "scheduler.spec_decoding_stats.num_emitted_tokens",
             "vllm:spec_decode_num_accepted_tokens_total plus vllm:spec_decode_num_drafts_total",
             "Tokens emitted by speculative decoding: the accepted ones and one more per round.",
             feature="spec_decode"),
)
# fmt: on
