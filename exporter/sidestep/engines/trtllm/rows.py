"""Further rows of TensorRT-LLM: iteration statistics, and families with the same names for all engines."""

from __future__ import annotations

from sidestep.catalog.model import Alias, FeedsFrom, Row
from sidestep.engines.common_names import common_row
from sidestep.engines.polled_page import resets_row
from sidestep.engines.row_builders import SampledRows
from sidestep.engines.shared_rows import REFUSED_OBSERVATIONS, objectives, saturation
from sidestep.engines.trtllm.page_rows import (
    CACHED,
    E2E,
    PROMPT,
    QUEUE,
    RUNNING,
    SHARED,
    TPOT,
    TTFT,
    USAGE,
    WAITING,
)

_own = SampledRows("sidestep_trtllm_", SHARED)
DURATION = "sidestep_trtllm_iteration_duration_seconds"
SCHEDULED = "sidestep_trtllm_iteration_requests"
CONTEXT_TOKENS = "sidestep_trtllm_iteration_context_tokens"
PAUSES = "sidestep_trtllm_pauses_total"
LOST = "sidestep_trtllm_lost_iterations_total"

OWN_ROWS: tuple[Row, ...] = (
    _own.histogram(
        "iteration_duration_seconds",
        "Duration of an iteration; only with iterations=true.",
        "iteration_duration",
    ),
    _own.histogram(
        "iteration_requests",
        "Requests in the batch of an iteration; only with iterations=true.",
        "iteration_requests",
    ),
    _own.histogram(
        "iteration_context_tokens",
        "Prompt tokens that an iteration computes; only with iterations=true.",
        "iteration_tokens",
    ),
    _own.counter(
        "pauses_total",
        "Times that requests were paused or suspended because the KV cache was full; only with"
        " iterations=true.",
    ),
    _own.counter(
        "lost_iterations_total",
        "Iterations missing between those that were read; only with iterations=true.",
    ),
    resets_row("sidestep_trtllm_", SHARED),
    REFUSED_OBSERVATIONS,
    *saturation(SHARED),
    *objectives(SHARED),
)

COMMON_ROWS: tuple[Row, ...] = (
    common_row("gen_ai_server_time_to_first_token_seconds", FeedsFrom(TTFT), SHARED),
    common_row("gen_ai_server_time_per_output_token_seconds", FeedsFrom(TPOT), SHARED),
    common_row("gen_ai_server_request_duration_seconds", FeedsFrom(E2E), SHARED),
    common_row("sidestep_request_queue_seconds", FeedsFrom(QUEUE), SHARED),
    common_row("sidestep_requests_running", Alias(RUNNING), SHARED),
    common_row("sidestep_requests_waiting", Alias(WAITING), SHARED),
    common_row("sidestep_kv_cache_usage_ratio", Alias(USAGE), SHARED),
    common_row("sidestep_preemptions_total", FeedsFrom(PAUSES), SHARED),
    common_row("sidestep_prefix_cache_looked_up_tokens_total", FeedsFrom(PROMPT), SHARED),
    common_row("sidestep_prefix_cache_found_tokens_total", FeedsFrom(CACHED), SHARED),
)
