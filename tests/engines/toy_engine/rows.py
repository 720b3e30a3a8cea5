"""Rows of the toy engine."""

from __future__ import annotations

from sidestep.catalog.row import Handler
from sidestep.engines.common_names import common_row
from sidestep.engines.row_builders import counter, gauge, histogram
from sidestep.engines.shared_rows import REFUSED_OBSERVATIONS, objectives, saturation

ROWS = (
    gauge("toy:requests_running", "running", "Requests in the batch."),
    gauge("toy:requests_waiting", "waiting", "Requests that wait to be scheduled."),
    gauge("toy:kv_usage_ratio", "kv_usage", "Share of the KV cache in use, from 0 to 1."),
    counter("toy:prompt_tokens_total", "prompt_tokens", "Prompt tokens computed."),
    counter("toy:generated_tokens_total", "generated_tokens", "Tokens generated."),
    histogram(
        "toy:first_token_seconds",
        "first_token_seconds[]",
        "Time from a request's arrival to its first token.",
        buckets=(0.1, 1.0, 10.0),
    ),
    counter("toy:steps_total", Handler("steps"), "Steps by phase.", own=("phase",)),
    REFUSED_OBSERVATIONS,
    *saturation(),
    *objectives(),
)
COMMON_ROWS = (
    common_row("gen_ai_server_time_to_first_token_seconds", "first_token_seconds[]"),
    common_row("sidestep_requests_running", "running"),
    common_row("sidestep_requests_waiting", "waiting"),
)
