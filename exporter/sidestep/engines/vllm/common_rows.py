"""vLLM's sources of the families that have the same names for all engines."""

from __future__ import annotations

from sidestep.catalog.row import Row
from sidestep.engines.common_names import common_row
from sidestep.engines.vllm.rows import E2E, TTFT

_FINISHED = "iteration.finished_requests[]."

ROWS: tuple[Row, ...] = (
    common_row("gen_ai_server_time_to_first_token_seconds", TTFT),
    common_row(
        "gen_ai_server_time_per_output_token_seconds", _FINISHED + "mean_time_per_output_token"
    ),
    common_row("gen_ai_server_request_duration_seconds", E2E),
    common_row(
        "gen_ai_client_token_usage",
        {"input": _FINISHED + "num_prompt_tokens", "output": _FINISHED + "num_generation_tokens"},
    ),
    common_row("sidestep_inter_token_latency_seconds", "iteration.inter_token_latencies_iter[]"),
    common_row("sidestep_request_queue_seconds", _FINISHED + "queued_time"),
    common_row("sidestep_requests_running", "scheduler.num_running_reqs"),
    common_row("sidestep_requests_waiting", "scheduler.num_all_waiting_reqs"),
    common_row("sidestep_kv_cache_usage_ratio", "scheduler.kv_cache_usage"),
    common_row("sidestep_preemptions_total", "iteration.num_preempted_reqs"),
    common_row(
        "sidestep_prefix_cache_looked_up_tokens_total", "scheduler.prefix_cache_stats.queries"
    ),
    common_row("sidestep_prefix_cache_found_tokens_total", "scheduler.prefix_cache_stats.hits"),
)
