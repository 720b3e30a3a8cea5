"""Rows of SGLang's gauges of a scheduler's state (0.5.23), in the order of the engine's page.

The source of each is the field of its name in ``SchedulerStats``. All are latest values: a busy
scheduler reports with each prefill batch and every 40 decode iterations, an idle one every 30
seconds. Families that the engine exposes but never fills have no row: see ``DEAD``.
"""

from __future__ import annotations

import dataclasses
import functools

from sidestep.catalog.row import Combine, FeedsFrom, Handler, Row
from sidestep.engines.row_builders import gauge
from sidestep.engines.sglang.collectors import SCHEDULER, TOKENIZER
from sidestep.engines.shared_rows import MAX_RUNNING_REQUESTS

DEAD = (
    ("sglang:is_cuda_graph", "nothing sets it; use sglang:cuda_graph_passes_total"),
    ("sglang:pending_prealloc_token_usage", "nothing sets it"),
    ("sglang:utilization", "its limit is never set: -1 on a prefill node, 0 on all others"),
    ("sglang:max_running_requests_under_SLO", "nothing sets it, so it never has a sample"),
)
"""Families of the engine that carry no information in 0.5.23, and why."""

ROUTING_KEY_BOUNDS = (1, 2, 3, 5, 7, 10, 20, 50, 100, 200)
"""Bounds of the gauges that resemble histograms: bucket ``le`` counts values above ``gt`` (the
previous bound, or 0) and up to ``le``, not cumulative; the last is ``+Inf``."""


QUEUES = (
    "num_running_reqs",
    "num_queue_reqs",
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
    "num_decode_host_receive_queue_reqs",
)
"""Fields of the stats that count requests in total and by priority."""
ROUTING_KEYS = ("routing_key_running_req_counts", "routing_key_all_req_counts")
HITS = ("device_hit", "host_hit", "storage_hit")
"""Modes of prompt tokens whose KV was found in a cache."""
_scheduler_gauge = functools.partial(gauge, shared=SCHEDULER.shared, mirrored=True)


def _gauge(name: str, text: str, *, combine: Combine = "sum", feature: str = "") -> Row:
    return _scheduler_gauge(
        f"sglang:{name}", f"stats.{name}", text, combine=combine, feature=feature
    )


def _queue(name: str, text: str) -> Row:
    """Return a queue's row: the total has an empty priority, and so no such label."""
    row = _scheduler_gauge(f"sglang:{name}", Handler(f"queue:{name}"), text, own=("priority",))
    return dataclasses.replace(row, omits_empty_labels=True)


def _routing_keys(name: str, text: str) -> Row:
    source = Handler(f"routing_keys:{name}s")
    return _scheduler_gauge(f"sglang:{name}", source, text, own=("gt", "le"))


# The table is laid out by hand: name above text, two lines a row.
# fmt: off
ROWS: tuple[Row, ...] = (
    # Requests and throughput.
    _queue("num_running_reqs",
           "Requests in the running batch; on a prefill node, in the batch being computed."),
    _queue("num_queue_reqs", "Requests that wait to be scheduled."),
    _gauge("num_grammar_queue_reqs", "Requests that wait for their grammar to be compiled."),
    _gauge("gen_throughput",
           "Generated tokens per second since the previous report; 0 after 30 s without a decode."),
    _gauge("cache_hit_rate",
           "Share of the last prefill batch's prompt tokens found in a cache, from 0 to 1.",
           combine="mean"),
    _gauge("decode_sum_seq_lens", "Tokens of all sequences in the decode batch."),
    # Memory pools: usage, from 0 to 1, then tokens.
    _gauge("token_usage", "Share of the fullest memory pool in use, from 0 to 1.",
           combine="max"),
    _gauge("full_token_usage", "Share of the full-attention KV pool in use, from 0 to 1.",
           combine="max"),
    _gauge("swa_token_usage", "Share of the sliding-window KV pool in use, from 0 to 1.",
           combine="max"),
    _gauge("mamba_usage", "Share of the Mamba state pool in use, from 0 to 1.", combine="max"),
    _gauge("num_used_tokens",
           "Tokens in use in the full-attention or the sliding-window KV pool, whichever is higher."),
    _gauge("kv_available_tokens", "Free token slots of the full-attention KV pool."),
    _gauge("kv_evictable_tokens",
           "Token slots of the full-attention KV pool with cached prefixes that no request uses."),
    _gauge("kv_used_tokens", "Token slots of the full-attention KV pool that requests use."),
    _gauge("swa_available_tokens", "Free token slots of the sliding-window KV pool."),
    _gauge("swa_evictable_tokens",
           "Token slots of the sliding-window KV pool with cached prefixes that no request uses."),
    _gauge("swa_used_tokens", "Token slots of the sliding-window KV pool that requests use."),
    _gauge("mamba_available_tokens", "Free slots of the Mamba state pool."),
    _gauge("mamba_evictable_tokens",
           "Slots of the Mamba state pool with cached states that no request uses."),
    _gauge("mamba_used_tokens", "Slots of the Mamba state pool that requests use."),
    # Speculative decoding.
    _gauge("spec_accept_length",
           "Mean tokens per verification since the previous report, including the verifier's own.",
           combine="mean"),
    _gauge("spec_accept_rate",
           "Share of draft tokens that were accepted since the previous report, from 0 to 1.",
           combine="mean"),
    _gauge("spec_cap_length",
           "Mean limit of tokens per verification, including the verifier's own; 0 without a"
           " limit.", combine="mean"),
    _gauge("spec_block_accept_length",
           "Mean tokens per verification as they would be without a limit; 0 where the engine"
           " does not compute this.", combine="mean"),
    _gauge("spec_num_steps", "Current draft steps per round.", combine="max"),
    _gauge("spec_num_draft_tokens", "Current draft tokens per round.", combine="max"),
    # Retraction.
    _gauge("num_retracted_reqs",
           "Requests retracted to the queue because memory was short, since the previous report."),
    _gauge("num_paused_reqs",
           "Requests paused for an update of the weights since the previous report."),
    # Prefill and decode on separate nodes.
    _queue("num_prefill_bootstrap_queue_reqs",
           "Requests of a prefill node that wait for the handshake with their decode node."),
    _queue("num_prefill_inflight_queue_reqs",
           "Requests of a prefill node whose KV is being sent."),
    _queue("num_decode_prealloc_queue_reqs",
           "Requests of a decode node that wait for memory for their KV."),
    _queue("num_decode_transfer_queue_reqs",
           "Requests of a decode node whose KV is being received."),
    _queue("num_decode_host_receive_queue_reqs",
           "Requests of a decode node whose KV is being received into the host's memory."),
    _gauge("num_decode_deferred_kv_release_reqs",
           "Failed requests of a decode node whose KV slots stay allocated until their transfer"
           " ends."),
    _gauge("prealloc_full_token_usage",
           "Share of the full-attention KV pool reserved for KV that is not yet received, from 0"
           " to 1.", combine="max"),
    _gauge("prealloc_swa_token_usage",
           "Share of the sliding-window KV pool reserved for KV that is not yet received, from 0"
           " to 1.", combine="max"),
    # Policy.
    _gauge("fwd_occupancy",
           "Share of time in which the GPU computed forward passes, in percent; requires the"
           " engine's device timer.", combine="mean"),
    _gauge("new_token_ratio",
           "Share of a request's possible new tokens for which the scheduler reserves memory, from"
           " 0 to 1.", combine="mean"),
    _scheduler_gauge(MAX_RUNNING_REQUESTS, "stats.max_running_requests",
                     "Most requests in the running batch (SGLang's max_running_requests)."),
    # Options.
    _gauge("lora_pool_slots_used", "LoRA adapters in the running batch.", feature="lora"),
    _gauge("lora_pool_slots_total", "LoRA adapters that fit into a batch.", feature="lora"),
    _gauge("lora_pool_utilization", "Share of the LoRA slots in use, from 0 to 1.",
           combine="max", feature="lora"),
    _gauge("hicache_host_used_tokens", "Tokens in the host's KV cache.", feature="hicache"),
    _gauge("hicache_host_total_tokens", "Capacity of the host's KV cache, in tokens.",
           feature="hicache"),
    _gauge("hicache_host_mamba_used_states", "Mamba states in the host's cache.",
           feature="hicache"),
    _gauge("hicache_host_mamba_total_states",
           "Capacity of the host's cache, in Mamba states.", feature="hicache"),
    _gauge("num_streaming_sessions", "Streaming sessions that are open.",
           feature="streaming_session"),
    _gauge("streaming_session_held_tokens", "KV token slots that streaming sessions use.",
           feature="streaming_session"),
    # Routing keys; the engine computes these only while every running request has one.
    _gauge("num_unique_running_routing_keys", "Distinct routing keys in the running batch."),
    _routing_keys("routing_key_running_req_count",
                  "Routing keys by their number of running requests: more than gt and up to le;"
                  " not cumulative."),
    _routing_keys("routing_key_all_req_count",
                  "Routing keys by their number of running and waiting requests: more than gt and"
                  " up to le; not cumulative."),
)
COMMON: tuple[Row, ...] = (
    TOKENIZER.common("gen_ai_server_time_to_first_token_seconds",
                     FeedsFrom("sglang:time_to_first_token_seconds")),
    TOKENIZER.common("gen_ai_server_time_per_output_token_seconds",
                     FeedsFrom("sglang:request_time_per_output_token_seconds")),
    TOKENIZER.common("gen_ai_server_request_duration_seconds",
                     FeedsFrom("sglang:e2e_request_latency_seconds")),
    TOKENIZER.common("gen_ai_client_token_usage",
                     {"input": FeedsFrom("sglang:prompt_tokens_histogram"),
                      "output": FeedsFrom("sglang:generation_tokens_histogram")}),
    TOKENIZER.common("sidestep_inter_token_latency_seconds",
                     FeedsFrom("sglang:inter_token_latency_seconds")),
    SCHEDULER.common("sidestep_request_queue_seconds", FeedsFrom("sglang:queue_time_seconds")),
    SCHEDULER.common("sidestep_requests_running", "stats.num_running_reqs.total"),
    SCHEDULER.common("sidestep_requests_waiting", "stats.num_queue_reqs.total"),
    SCHEDULER.common("sidestep_kv_cache_usage_ratio", "stats.token_usage"),
    SCHEDULER.common("sidestep_preemptions_total",
                     FeedsFrom("sglang:num_retracted_requests_total")),
    SCHEDULER.common("sidestep_prefix_cache_looked_up_tokens_total",
                     FeedsFrom("sglang:prefill_effective_tokens_total")),
    SCHEDULER.common("sidestep_prefix_cache_found_tokens_total",
                     FeedsFrom("sglang:prefill_effective_tokens_total", HITS)),
)
# fmt: on
