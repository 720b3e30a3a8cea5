"""Families whose names are the same for every engine, derived from the engines' own data.

Where OpenTelemetry's conventions for generative AI have a name, the family has that name as
Prometheus writes it and the recommended bounds; the other names are this project's. Bounds are
the same for all engines, so that one quantile covers a mixed fleet. The families are exposed with
``--metrics.common``, since each duplicates a family of the engine.
"""

from __future__ import annotations

from typing import NamedTuple

from sidestep.catalog.model import ENGINE_LABELS, Combine, FeedsFrom, Kind, Row, Source
from sidestep.engines.sglang.collectors import SCHEDULER, TOKENIZER

TOKEN_TYPE = "gen_ai_token_type"  # noqa: S105 - a label
_HITS = ("device_hit", "host_hit", "storage_hit")
_FINISHED = "iteration.finished_requests[]."


class Common(NamedTuple):
    """One family and its source for each engine."""

    name: str
    kind: Kind
    help: str
    vllm: Source
    sglang: Source
    buckets: str = ""
    combine: Combine = "sum"
    tokenizer: bool = False
    """True if SGLang's tokenizer, which has no ranks, reports the family."""
    closed: tuple[str, ...] = ()


FAMILIES: tuple[Common, ...] = (
    Common(
        "gen_ai_server_time_to_first_token_seconds",
        "histogram",
        "Time from a request's arrival to its first token.",
        "iteration.time_to_first_tokens_iter[]",
        FeedsFrom("sglang:time_to_first_token_seconds"),
        buckets="gen_ai_time_to_first_token",
        tokenizer=True,
    ),
    Common(
        "gen_ai_server_time_per_output_token_seconds",
        "histogram",
        "Mean time per output token after the first, one observation per finished request.",
        _FINISHED + "mean_time_per_output_token",
        FeedsFrom("sglang:request_time_per_output_token_seconds"),
        buckets="gen_ai_time_per_output_token",
        tokenizer=True,
    ),
    Common(
        "gen_ai_server_request_duration_seconds",
        "histogram",
        "Time from a request's arrival to its end; SGLang counts aborted requests, vLLM does not.",
        _FINISHED + "e2e_latency",
        FeedsFrom("sglang:e2e_request_latency_seconds"),
        buckets="gen_ai_request_duration",
        tokenizer=True,
    ),
    Common(
        "gen_ai_client_token_usage",
        "histogram",
        "Tokens of a finished request: prompt tokens (input) and generated tokens (output).",
        {
            "input": _FINISHED + "num_prompt_tokens",
            "output": _FINISHED + "num_generation_tokens",
        },
        {
            "input": FeedsFrom("sglang:prompt_tokens_histogram"),
            "output": FeedsFrom("sglang:generation_tokens_histogram"),
        },
        buckets="gen_ai_token_usage",
        tokenizer=True,
        closed=("input", "output"),
    ),
    Common(
        "sidestep_inter_token_latency_seconds",
        "histogram",
        "Time between two consecutive outputs of a request.",
        "iteration.inter_token_latencies_iter[]",
        FeedsFrom("sglang:inter_token_latency_seconds"),
        buckets="gen_ai_time_per_output_token",
        tokenizer=True,
    ),
    Common(
        "sidestep_request_queue_seconds",
        "histogram",
        "Time from a request's entry into the queue until it was first scheduled.",
        _FINISHED + "queued_time",
        FeedsFrom("sglang:queue_time_seconds"),
        buckets="gen_ai_request_duration",
    ),
    Common(
        "sidestep_requests_running",
        "gauge",
        "Requests in the batch that the model executes.",
        "scheduler.num_running_reqs",
        "stats.num_running_reqs.total",
    ),
    Common(
        "sidestep_requests_waiting",
        "gauge",
        "Requests that wait to be scheduled.",
        "scheduler.num_all_waiting_reqs",
        "stats.num_queue_reqs.total",
    ),
    Common(
        "sidestep_kv_cache_usage_ratio",
        "gauge",
        "Share of the KV cache in use, of the fullest pool where there are several, from 0 to 1.",
        "scheduler.kv_cache_usage",
        "stats.token_usage",
        combine="max",
    ),
    Common(
        "sidestep_preemptions_total",
        "counter",
        "Times a running request lost its place in the batch because memory was short.",
        "iteration.num_preempted_reqs",
        FeedsFrom("sglang:num_retracted_requests_total"),
    ),
    Common(
        "sidestep_prefix_cache_looked_up_tokens_total",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        "scheduler.prefix_cache_stats.queries",
        FeedsFrom("sglang:prefill_effective_tokens_total"),
    ),
    Common(
        "sidestep_prefix_cache_found_tokens_total",
        "counter",
        "Prompt tokens found in the prefix cache; divided by those looked up, the hit rate.",
        "scheduler.prefix_cache_stats.hits",
        FeedsFrom("sglang:prefill_effective_tokens_total", _HITS),
    ),
)


def _row(family: Common, source: Source, shared: tuple[str, ...], *, mirrored: bool = False) -> Row:
    own = (TOKEN_TYPE,) if family.closed else ()
    return Row(
        name=family.name,
        kind=family.kind,
        source=source,
        help=family.help,
        labels=tuple(sorted((*shared, *own))),
        shared=shared,
        closed=family.closed,
        buckets=family.buckets,
        combine=family.combine,
        mirrored=mirrored,
    )


VLLM: tuple[Row, ...] = tuple(_row(f, f.vllm, ENGINE_LABELS) for f in FAMILIES)
SGLANG: tuple[Row, ...] = tuple(
    _row(f, f.sglang, kind.shared, mirrored=kind.mirrored)
    for f in FAMILIES
    for kind in (TOKENIZER if f.tokenizer else SCHEDULER,)
)
