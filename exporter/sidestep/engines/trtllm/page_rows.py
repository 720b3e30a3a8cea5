"""Rows of trtllm-serve's page, ``/prometheus/metrics``, of releases 1.1 to 1.4's pre-releases.

Bounds are the defaults: an engine sends those of its page under the family's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.model import Row
from sidestep.engines.row_builders import SampledRows

SHARED = ("engine_type", "model_name")
"""The labels of all series on the page; gauges have ``pid`` too, which is dropped."""
PREFIX = "trtllm_"
UNPREFIXED = (
    "request_success_total",
    "e2e_request_latency_seconds",
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "request_queue_time_seconds",
)
"""Families of 1.1 and 1.2, which had no prefix."""

SUCCESS, ERRORS = "trtllm_request_success_total", "trtllm_request_error_total"
RUNNING, WAITING = "trtllm_num_requests_running", "trtllm_num_requests_waiting"
MOST, USAGE = "trtllm_max_num_active_requests", "trtllm_kv_cache_utilization"
PROMPT, GENERATED = "trtllm_prompt_tokens_total", "trtllm_generation_tokens_total"
CACHED = "trtllm_prompt_cached_tokens_total"
TTFT, TPOT = "trtllm_time_to_first_token_seconds", "trtllm_time_per_output_token_seconds"
E2E, QUEUE = "trtllm_e2e_request_latency_seconds", "trtllm_request_queue_time_seconds"

_SHORT: Bounds = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN: Bounds = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_LONG: Bounds = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_PREFILL: Bounds = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_CACHED: Bounds = (0.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
_BATCH: Bounds = (64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0)
_PERPLEXITY: Bounds = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 500.0, 1000.0)

UNMAPPED: Mapping[str, str] = dict.fromkeys(
    (
        "trtllm_ep_rank_active",
        "trtllm_ep_active_ranks",
        "trtllm_ep_failed_ranks",
        "trtllm_ep_health_generation",
        "trtllm_ep_health_available",
    ),
    "of a branch of August 2026 only; no release has it",
)
"""Families of the page that are not exposed, and why."""

_page = SampledRows(PREFIX, SHARED)


def _info(name: str, text: str, *labels: str) -> Row:
    row = _page.gauge(f"{name}_config_info", f"1; {text}", *labels, combine="max")
    return dataclasses.replace(row, omits_empty_labels=True)


REQUESTS: tuple[Row, ...] = (
    _page.counter(
        "request_success_total",
        "Requests that have ended and whose answer was handed out, by reason.",
        "finished_reason",
    ),
    _page.counter("request_error_total", "Refused requests, by HTTP status.", "http_code"),
    _page.histogram(
        "e2e_request_latency_seconds", "Time from a request's arrival to its last token.", _LONG
    ),
    _page.histogram(
        "time_to_first_token_seconds", "Time from a request's arrival to its first token.", _SHORT
    ),
    _page.histogram(
        "time_per_output_token_seconds",
        "Mean time per token after the first, one observation per request; none with n above 1.",
        _PER_TOKEN,
    ),
    _page.histogram(
        "request_queue_time_seconds",
        "Time from a request's arrival until it was first scheduled.",
        _LONG,
    ),
    _page.histogram(
        "request_prefill_time_seconds",
        "Time from a request's first scheduling to its first token.",
        _PREFILL,
    ),
    _page.histogram(
        "request_decode_time_seconds", "Time from a request's first token to its last.", _LONG
    ),
    _page.histogram(
        "request_inference_time_seconds",
        "Time from a request's first scheduling to its last token.",
        _LONG,
    ),
    _page.counter("prompt_tokens_total", "Prompt tokens of ended requests, cached ones included."),
    _page.counter(
        "generation_tokens_total", "Generated tokens of ended requests; none with n above 1."
    ),
    _page.counter(
        "prompt_cached_tokens_total",
        "Prompt tokens of ended requests that were found in the KV cache.",
    ),
    _page.histogram(
        "prompt_cached_tokens_per_request",
        "Prompt tokens of an ended request that were found in the KV cache.",
        _CACHED,
    ),
    _page.counter(
        "spec_decode_drafted_tokens_total",
        "Draft tokens of ended requests, by their position in the draft.",
        "token_position",
    ),
    _page.counter(
        "spec_decode_accepted_tokens_total",
        "Accepted draft tokens of ended requests, by their position in the draft.",
        "token_position",
    ),
    _page.histogram("prefill_perplexity", "Perplexity of prompts, if computed.", _PERPLEXITY),
    _page.histogram("generation_perplexity", "Perplexity of outputs, if computed.", _PERPLEXITY),
)
ITERATIONS: tuple[Row, ...] = (
    _page.gauge("num_requests_running", "Requests in the executor at the last iteration read."),
    _page.gauge("num_requests_waiting", "Requests in the executor's queue likewise."),
    _page.gauge("max_num_active_requests", "Most requests that may be active."),
    _page.gauge("iteration_latency_seconds", "Duration of the last iteration read.", combine="max"),
    _page.gauge("gpu_memory_usage_bytes", "GPU memory in use."),
    _page.gauge("cpu_memory_usage_bytes", "Host memory in use; 0 with PyTorch."),
    _page.gauge("pinned_memory_usage_bytes", "Pinned host memory in use; 0 with PyTorch."),
    _page.gauge("max_batch_size_static", "Configured batch size; 0 with PyTorch."),
    _page.gauge("max_batch_size_runtime", "Batch size in force; 0 with PyTorch."),
    _page.gauge("max_num_tokens_runtime", "Tokens per iteration in force; 0 with PyTorch."),
    _page.gauge("kv_cache_max_blocks", "Blocks of the KV cache."),
    _page.gauge("kv_cache_free_blocks", "Free blocks of the KV cache."),
    _page.gauge("kv_cache_used_blocks", "Blocks of the KV cache in use."),
    _page.gauge("kv_cache_tokens_per_block", "Tokens of a block.", combine="max"),
    _page.gauge("num_context_requests", "Requests in prefill at the last iteration read."),
    _page.gauge("num_generation_requests", "Requests in decode likewise."),
    _page.gauge("num_paused_requests", "Requests paused because the KV cache was full."),
    _page.gauge("num_scheduled_requests", "Requests in the batch of the last iteration read."),
    # A gauge, despite the form of its name in the engine.
    _page.gauge("total_context_tokens", "Prompt tokens of the last iteration read."),
    _page.gauge(
        "avg_decoded_tokens_per_iter",
        "Mean number of tokens that a request decoded in the last iteration read.",
        combine="mean",
    ),
    _page.gauge(
        "spec_decode_acceptance_length",
        "Accepted tokens per drafting request, plus one.",
        combine="mean",
    ),
    _page.gauge(
        "spec_decode_draft_overhead",
        "Share of the iteration that drafting took, from 0 to 1.",
        combine="mean",
    ),
    _page.gauge(
        "prefill_batch_occupancy",
        "Requests in prefill as a share of those that may be active.",
        combine="mean",
    ),
    _page.counter("num_requests_completed_total", "Completed requests, added up over iterations."),
    _page.counter("spec_decode_num_draft_tokens_total", "Draft tokens, by iterations."),
    _page.counter("spec_decode_num_accepted_tokens_total", "Accepted draft tokens, by iterations."),
    _page.histogram("prefill_batch_tokens", "Prompt tokens of iterations that have some.", _BATCH),
    _page.gauge("scheduled_batch_size", "Requests in the last batch of a rank.", "rank"),
)
KV_CACHE: tuple[Row, ...] = (
    _page.gauge(
        "kv_cache_hit_rate", "Hit rate of blocks since the server started.", combine="mean"
    ),
    _page.gauge("kv_cache_utilization", "Share of the KV cache's blocks in use.", combine="max"),
    _page.gauge(
        "kv_cache_host_utilization", "Share of the host pool's blocks in use.", combine="max"
    ),
    _page.gauge(
        "kv_cache_iter_reuse_rate",
        "Share of found blocks in the last iteration with a lookup.",
        combine="mean",
    ),
    _page.counter("kv_cache_reused_blocks_total", "Blocks found in the KV cache."),
    _page.counter("kv_cache_missed_blocks_total", "Blocks not found in the KV cache."),
    _page.counter("kv_cache_iter_reused_blocks_total", "Blocks found, by iterations."),
    _page.counter("kv_cache_iter_full_reused_blocks_total", "Whole blocks found, by iterations."),
    _page.counter("kv_cache_iter_partial_reused_blocks_total", "Parts of blocks found, likewise."),
    _page.counter("kv_cache_iter_missed_blocks_total", "Blocks not found, by iterations."),
    _page.counter("kv_cache_gen_alloc_blocks_total", "Blocks allocated in decode."),
    _page.counter("kv_cache_onboard_bytes_total", "Bytes copied from the host to the GPU."),
    _page.counter("kv_cache_offload_bytes_total", "Bytes copied from the GPU to the host."),
    _page.counter("kv_cache_intra_device_copy_bytes_total", "Bytes copied within the GPU."),
    _page.counter("kv_cache_disk_prefetch_blocks_total", "Blocks fetched from disk to the host."),
    _page.counter(
        "prompt_cache_hit_tokens_total",
        "Prompt tokens found, by level of the cache and its memory; counted by iterations.",
        "cache_level",
        "cache_tier",
    ),
)
CONFIGURATION: tuple[Row, ...] = (
    _info(
        "model", "the model.", "model", "served_model_name", "dtype", "quantization",
        "max_model_len", "gpu_type",
    ),
    _info(
        "parallel", "the division of the model.", "tensor_parallel_size", "pipeline_parallel_size",
        "context_parallel_size", "gpu_count", "expert_parallel_size",
    ),
    _info(
        "speculative", "speculative decoding.", "spec_enabled", "spec_method", "spec_num_tokens",
        "spec_draft_model",
    ),
    _info(
        "kv_cache", "the KV cache.", "page_size", "enable_block_reuse", "enable_partial_reuse",
        "free_gpu_memory_fraction", "cache_dtype",
    ),
)  # fmt: skip
ROWS: tuple[Row, ...] = (*REQUESTS, *ITERATIONS, *KV_CACHE, *CONFIGURATION)
