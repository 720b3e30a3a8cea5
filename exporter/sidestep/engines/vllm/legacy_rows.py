"""Rows of former names of vLLM's families, exposed with ``--metrics.legacy`` for old dashboards.

Each is derived from the data of current releases, or is a constant where the engine no longer has
the mode that it described. ``vllm:tokens_total`` has no row, since no release ever filled it.
"""

from __future__ import annotations

from sidestep.catalog.row import (
    ENGINE_LABELS,
    Alias,
    Combine,
    Computed,
    Constant,
    Kind,
    Row,
    Sampled,
    Source,
)

_V0 = ("model_name",)


def _old(
    name: str,
    kind: Kind,
    source: Source,
    successor: str,
    text: str,
    *,
    until: str,
    labels: tuple[str, ...] = _V0,
    combine: Combine = "sum",
    buckets: str = "",
    feature: str = "",
) -> Row:
    return Row(
        name=f"vllm:{name}",
        kind=kind,
        source=source,
        help=text,
        labels=labels,
        buckets=buckets,
        combine=combine,
        feature=feature,
        until=until,
        status="hidden",
        successor=successor,
    )


ROWS: tuple[Row, ...] = (
    _old(
        "gpu_cache_usage_perc",
        "gauge",
        Alias("vllm:kv_cache_usage_perc"),
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache in use, from 0 to 1.",
        until="0.11",
        labels=ENGINE_LABELS,
        combine="max",
    ),
    _old(
        "gpu_prefix_cache_queries_total",
        "counter",
        Alias("vllm:prefix_cache_queries_total"),
        "vllm:prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache.",
        until="0.11",
        labels=ENGINE_LABELS,
    ),
    _old(
        "gpu_prefix_cache_hits_total",
        "counter",
        Alias("vllm:prefix_cache_hits_total"),
        "vllm:prefix_cache_hits_total",
        "Prompt tokens found in the prefix cache.",
        until="0.11",
        labels=ENGINE_LABELS,
    ),
    _old(
        "time_per_output_token_seconds",
        "histogram",
        Alias("vllm:inter_token_latency_seconds"),
        "vllm:inter_token_latency_seconds",
        "Time between two consecutive outputs of a request.",
        until="0.11",
        labels=ENGINE_LABELS,
        buckets="inter_token_latency",
    ),
    _old(
        "num_requests_swapped",
        "gauge",
        Constant(0.0),
        "vllm:num_preemptions_total",
        "Requests swapped to the CPU: always 0, the engine recomputes instead of swapping.",
        until="0.8",
    ),
    _old(
        "cpu_cache_usage_perc",
        "gauge",
        Constant(0.0),
        "vllm:kv_offload_cpu_cache_usage_perc",
        "Share of the CPU swap space in use: always 0, the engine has none.",
        until="0.8",
        combine="max",
    ),
    _old(
        "cpu_prefix_cache_hit_rate",
        "gauge",
        Constant(0.0),
        "vllm:external_prefix_cache_hits_total",
        "Hit rate of the CPU block cache: always 0, the engine has none.",
        until="0.8",
        combine="mean",
    ),
    _old(
        "gpu_prefix_cache_hit_rate",
        "gauge",
        Computed("prefix_cache_hit_rate"),
        "vllm:prefix_cache_hits_total over vllm:prefix_cache_queries_total",
        "Share of prompt tokens found in the prefix cache, over the last 1,000 requests.",
        until="0.8",
        combine="mean",
    ),
    _old(
        "avg_prompt_throughput_toks_per_s",
        "gauge",
        Computed("prompt_throughput"),
        "rate(vllm:prompt_tokens_total[1m])",
        "Computed prompt tokens per second over the last statistics interval.",
        until="0.8",
    ),
    _old(
        "avg_generation_throughput_toks_per_s",
        "gauge",
        Computed("generation_throughput"),
        "rate(vllm:generation_tokens_total[1m])",
        "Generated tokens per second over the last statistics interval.",
        until="0.8",
    ),
    _old(
        "time_in_queue_requests",
        "histogram",
        Alias("vllm:request_queue_time_seconds"),
        "vllm:request_queue_time_seconds",
        "Time from a request's entry into the core's queue until it was first scheduled, in seconds; the"
        " engine's own began when the front end received the request, milliseconds earlier.",
        until="0.8",
        buckets="request_latency",
    ),
    _old(
        "model_forward_time_milliseconds",
        "histogram",
        Sampled(),
        "sidestep_iteration_duration_seconds",
        "Time in the model's forward pass; only where an engine sends it.",
        until="0.8",
        buckets="milliseconds",
    ),
    _old(
        "model_execute_time_milliseconds",
        "histogram",
        Sampled(),
        "sidestep_iteration_duration_seconds",
        "Time in the model's execution; only where an engine sends it.",
        until="0.8",
        buckets="milliseconds",
    ),
    _old(
        "spec_decode_draft_acceptance_rate",
        "gauge",
        Computed("draft_acceptance_rate"),
        "vllm:spec_decode_num_accepted_tokens_total over vllm:spec_decode_num_draft_tokens_total",
        "Share of draft tokens that were accepted.",
        until="0.8",
        combine="mean",
    ),
    _old(
        "spec_decode_efficiency",
        "gauge",
        Computed("draft_efficiency"),
        "vllm:spec_decode_num_accepted_tokens_total over vllm:spec_decode_num_drafts_total",
        "Emitted tokens divided by those if every draft token had been accepted.",
        until="0.8",
        combine="mean",
    ),
    _old(
        "spec_decode_num_emitted_tokens_total",
        "counter",
        "scheduler.spec_decoding_stats.num_emitted_tokens",
        "vllm:spec_decode_num_accepted_tokens_total plus vllm:spec_decode_num_drafts_total",
        "Tokens emitted by speculative decoding: the accepted ones and one more per round.",
        until="0.8",
        # All rows of the struct must belong to the option; otherwise the others would be gated.
        feature="spec_decode",
    ),
)
