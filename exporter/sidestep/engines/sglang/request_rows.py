"""Rows of a tokenizer: SGLang's families of the requests' tokens and latencies (0.5.23), and its requests.

A tokenizer belongs to no rank. An administrator can configure additional labels of requests, and
their priority, so a sender may add labels.
"""

from __future__ import annotations

from sidestep.catalog.row import Handler, Row
from sidestep.engines import shared_rows
from sidestep.engines.row_builders import counter
from sidestep.engines.sglang.collectors import TOKENIZER as _T

ENDED = "ended_requests"
ENDED_REQUESTS = "sidestep_ended_requests_total"
REASONS = ("stop", "length", "abort", "error", "refused")
_BUCKETS = "sglang_time_to_first_token", "sglang_e2e_request_latency"
_LOADS_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)

# The table is laid out by hand: name above text, two lines a row.
# fmt: off
ROWS: tuple[Row, ...] = (
    _T.gauge("startup_time_seconds", "Duration of a phase of the startup.", "phase",
             combine="max"),
    _T.gauge("startup_cuda_graph_time_seconds",
             "Time to capture a phase's CUDA graphs.", "phase", combine="max"),
    _T.counter("prompt_tokens_total", "Prompt tokens of finished requests.", "is_streaming"),
    _T.counter("generation_tokens_total", "Tokens generated for finished requests.",
               "is_streaming"),
    _T.counter("spec_verify_calls_total",
               "Verifications of draft tokens for finished requests."),
    _T.histogram("prompt_tokens_histogram", "Prompt tokens of a finished request.",
                 "sglang_prompt_tokens"),
    _T.histogram("uncached_prompt_tokens_histogram",
                 "Prompt tokens of a finished request that were in no cache.",
                 "sglang_prompt_tokens"),
    _T.histogram("generation_tokens_histogram", "Generated tokens of a finished request.",
                 "sglang_generation_tokens"),
    _T.counter("cached_tokens_total",
               "Prompt tokens of finished requests found in a cache, by cache tier.",
               "cache_source"),
    _T.counter("num_requests_total", "Requests that finished.", "is_streaming"),
    _T.histogram("get_loads_duration_seconds", "Duration of a request of /v1/loads.",
                 _LOADS_SECONDS),
    _T.counter("num_so_requests_total", "Finished requests with structured output."),
    _T.counter("num_aborted_requests_total",
               "Aborts of a request, or of all requests at once."),
    _T.histogram("time_to_first_token_seconds",
                 "Time from a request's arrival at the tokenizer to its first token; for a request"
                 " that does not stream, to the end of its prefill.",
                 "sglang_time_to_first_token", "is_streaming"),
    _T.histogram("inter_token_latency_seconds",
                 "Time between two outputs of a request divided by the tokens of the later output;"
                 " one observation per token.", "sglang_inter_token_latency"),
    _T.histogram("request_time_per_output_token_seconds",
                 "Mean time per output token after the first, one observation per finished request.",
                 "sglang_inter_token_latency", "is_streaming"),
    _T.histogram("e2e_request_latency_seconds",
                 "Time from a request's arrival at the tokenizer to its end.",
                 "sglang_e2e_request_latency", "is_streaming"),
)
# fmt: on
REQUESTS: tuple[Row, ...] = (
    counter(
        ENDED_REQUESTS,
        Handler(ENDED),
        "Requests that ended, by reason, parallel samples one by one: those that were aborted before"
        " they ran or refused are in none of SGLang's counters. __other__: requests without a record,"
        " since the engine's process could not hold more.",
        own=("reason",),
        closed=REASONS,
        shared=_T.shared,
    ),
    *shared_rows.service(REASONS, _BUCKETS, shared=_T.shared),
    *shared_rows.request_parts(shared=_T.shared),
    *shared_rows.goodput(shared=_T.shared),
    *shared_rows.tenants(shared=_T.shared),
    *shared_rows.cost(shared=_T.shared),
)
HANDLED = frozenset(row.source.name for row in REQUESTS if isinstance(row.source, Handler))
