"""SGLang's sources of the families that have the same names for all engines."""

from __future__ import annotations

from sidestep.catalog.row import FeedsFrom, Row
from sidestep.engines.sglang.collectors import SCHEDULER, TOKENIZER

HITS = ("device_hit", "host_hit", "storage_hit")
"""Modes of prompt tokens whose KV was found in a cache."""

ROWS: tuple[Row, ...] = (
    TOKENIZER.common(
        "gen_ai_server_time_to_first_token_seconds", FeedsFrom("sglang:time_to_first_token_seconds")
    ),
    TOKENIZER.common(
        "gen_ai_server_time_per_output_token_seconds",
        FeedsFrom("sglang:request_time_per_output_token_seconds"),
    ),
    TOKENIZER.common(
        "gen_ai_server_request_duration_seconds", FeedsFrom("sglang:e2e_request_latency_seconds")
    ),
    TOKENIZER.common(
        "gen_ai_client_token_usage",
        {
            "input": FeedsFrom("sglang:prompt_tokens_histogram"),
            "output": FeedsFrom("sglang:generation_tokens_histogram"),
        },
    ),
    TOKENIZER.common(
        "sidestep_inter_token_latency_seconds", FeedsFrom("sglang:inter_token_latency_seconds")
    ),
    SCHEDULER.common("sidestep_request_queue_seconds", FeedsFrom("sglang:queue_time_seconds")),
    SCHEDULER.common("sidestep_requests_running", "stats.num_running_reqs.total"),
    SCHEDULER.common("sidestep_requests_waiting", "stats.num_queue_reqs.total"),
    SCHEDULER.common("sidestep_kv_cache_usage_ratio", "stats.token_usage"),
    SCHEDULER.common(
        "sidestep_preemptions_total", FeedsFrom("sglang:num_retracted_requests_total")
    ),
    SCHEDULER.common(
        "sidestep_prefix_cache_looked_up_tokens_total",
        FeedsFrom("sglang:prefill_effective_tokens_total"),
    ),
    SCHEDULER.common(
        "sidestep_prefix_cache_found_tokens_total",
        FeedsFrom("sglang:prefill_effective_tokens_total", HITS),
    ),
)
