"""SGLang's families of a tokenizer (0.5.23): what requests asked for and got.

A tokenizer belongs to no rank. An administrator may have requests' own labels
added, and their priority, so a sender may add labels.
"""

from __future__ import annotations

from sidestep.catalog.model import Row
from sidestep.engines.sglang.collectors import TOKENIZER as _T

_LOADS_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)

# The table is laid out by hand: name above text, two lines a row.
# fmt: off
ROWS: tuple[Row, ...] = (
    _T.gauge("startup_time_seconds", "How long a phase of the start took.", "phase",
             combine="max"),
    _T.gauge("startup_cuda_graph_time_seconds",
             "How long the capture of a phase's CUDA graphs took.", "phase", combine="max"),
    _T.counter("prompt_tokens_total", "Prompt tokens of finished requests.", "is_streaming"),
    _T.counter("generation_tokens_total", "Tokens generated for finished requests.",
               "is_streaming"),
    _T.counter("spec_verify_calls_total",
               "Verifications of drafted tokens for finished requests."),
    _T.histogram("prompt_tokens_histogram", "Prompt tokens of a finished request.",
                 "sglang_prompt_tokens"),
    _T.histogram("uncached_prompt_tokens_histogram",
                 "Prompt tokens of a finished request that no cache had.",
                 "sglang_prompt_tokens"),
    _T.histogram("generation_tokens_histogram", "Generated tokens of a finished request.",
                 "sglang_generation_tokens"),
    _T.counter("cached_tokens_total",
               "Prompt tokens of finished requests found in a cache, by its tier.",
               "cache_source"),
    _T.counter("num_requests_total", "Requests that finished.", "is_streaming"),
    _T.histogram("get_loads_duration_seconds", "How long an answer to /v1/loads took.",
                 _LOADS_SECONDS),
    _T.counter("num_so_requests_total", "Finished requests with structured output."),
    _T.counter("num_aborted_requests_total",
               "Times a request, or all of them at once, was aborted."),
    _T.histogram("time_to_first_token_seconds",
                 "From a request's arrival at the tokenizer to its first token; where it does not"
                 " stream, to the end of its prefill.",
                 "sglang_time_to_first_token", "is_streaming"),
    _T.histogram("inter_token_latency_seconds",
                 "Between two outputs of a request over the tokens of the later one, each of them"
                 " counted.", "sglang_inter_token_latency"),
    _T.histogram("request_time_per_output_token_seconds",
                 "Mean time per token after the first, one value a finished request.",
                 "sglang_inter_token_latency", "is_streaming"),
    _T.histogram("e2e_request_latency_seconds",
                 "From a request's arrival at the tokenizer to its end.",
                 "sglang_e2e_request_latency", "is_streaming"),
)
# fmt: on
