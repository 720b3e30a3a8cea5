"""Wire structs of SGLang's stats object, with SGLang's field names.

The engine updates one object and passes it on repeatedly, so every field is a latest value, not a
difference. A field that the engine does not know is absent, and its gauge has no sample.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.protocol.limits import (
    COUNT_LIMIT,
    VALUE_LIMIT,
    Count,
    Counts,
    Number,
    Ratio,
    Seconds,
    Tally,
)
from sidestep.protocol.self_described import EngineIndex

Used = Annotated[int, Meta(ge=-COUNT_LIMIT, le=COUNT_LIMIT)]
"""Tokens of a pool minus its free and evictable ones: negative where the engine miscounts these."""
Rate = Annotated[float, Meta(ge=0.0, le=VALUE_LIMIT)]


class QueueCount(msgspec.Struct, array_like=True, gc=False):
    """Requests of a queue; also by priority, where the engine schedules by priority."""

    total: Count = 0
    by_priority: Tally | None = None


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """The scheduler's state in its latest report.

    Some of the engine's fields are omitted: two that became histograms
    (``kv_transfer_speed_gb_s``, ``kv_transfer_latency_ms``), and those that nothing in the engine
    sets (``rows.DEAD``).
    """

    num_running_reqs: QueueCount | None = None
    num_queue_reqs: QueueCount | None = None
    num_grammar_queue_reqs: Count | None = None
    gen_throughput: Rate | None = None
    cache_hit_rate: Ratio | None = None
    decode_sum_seq_lens: Count | None = None
    token_usage: Number | None = None
    full_token_usage: Number | None = None
    swa_token_usage: Number | None = None
    mamba_usage: Number | None = None
    num_used_tokens: Used | None = None
    kv_available_tokens: Count | None = None
    kv_evictable_tokens: Count | None = None
    kv_used_tokens: Used | None = None
    swa_available_tokens: Count | None = None
    swa_evictable_tokens: Count | None = None
    swa_used_tokens: Used | None = None
    mamba_available_tokens: Count | None = None
    mamba_evictable_tokens: Count | None = None
    mamba_used_tokens: Used | None = None
    spec_accept_length: Ratio | None = None
    spec_accept_rate: Ratio | None = None
    spec_cap_length: Ratio | None = None
    spec_block_accept_length: Ratio | None = None
    spec_num_steps: Count | None = None
    spec_num_draft_tokens: Count | None = None
    num_retracted_reqs: Count | None = None
    num_paused_reqs: Count | None = None
    num_prefill_bootstrap_queue_reqs: QueueCount | None = None
    num_prefill_inflight_queue_reqs: QueueCount | None = None
    num_decode_prealloc_queue_reqs: QueueCount | None = None
    num_decode_transfer_queue_reqs: QueueCount | None = None
    num_decode_host_receive_queue_reqs: QueueCount | None = None
    num_decode_deferred_kv_release_reqs: Count | None = None
    prealloc_full_token_usage: Ratio | None = None
    prealloc_swa_token_usage: Ratio | None = None
    # NaN in the engine until it is measured; absent here.
    fwd_occupancy: Ratio | None = None
    new_token_ratio: Ratio | None = None
    lora_pool_slots_used: Count | None = None
    lora_pool_slots_total: Count | None = None
    lora_pool_utilization: Ratio | None = None
    hicache_host_used_tokens: Count | None = None
    hicache_host_total_tokens: Count | None = None
    # Absent without such a pool: the engine exposes these two where the total is above 0.
    hicache_host_mamba_used_states: Count | None = None
    hicache_host_mamba_total_states: Count | None = None
    num_streaming_sessions: Count | None = None
    streaming_session_held_tokens: Count | None = None
    num_unique_running_routing_keys: Count | None = None
    routing_key_running_req_counts: Counts | None = None
    routing_key_all_req_counts: Counts | None = None
    # Of the scheduler itself, not of its report.
    max_running_requests: Count | None = None


class SglangStats(msgspec.Struct, array_like=True, gc=False, tag="gs"):
    """One report of an SGLang scheduler's state: gauges only; its counters arrive as Samples."""

    engine: EngineIndex
    stamp: Seconds
    wall: Seconds
    stats: SchedulerStats
