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
    Text,
)
from sidestep.protocol.request_events import Identity
from sidestep.protocol.self_described import EngineIndex, Family

MAX_ENDED = 512
"""Maximum requests of one item."""
MAX_OWN_COUNTERS = 6
"""Maximum families of one item of requests: decoding their samples blocks the event loop for 50 ms."""

Used = Annotated[int, Meta(ge=-COUNT_LIMIT, le=COUNT_LIMIT)]
"""Tokens of a pool minus its free and evictable ones: negative where the engine miscounts these."""
Rate = Annotated[float, Meta(ge=0.0, le=VALUE_LIMIT)]


class QueueCount(msgspec.Struct, array_like=True, gc=False):
    """Requests of a queue; also by priority, where the engine schedules by priority."""

    total: Count = 0
    by_priority: Tally | None = None


class SglangSchedulerStats(msgspec.Struct, array_like=True, gc=False):
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
    stats: SglangSchedulerStats


class SglangRequest(msgspec.Struct, array_like=True, gc=False):
    """A request that ended, as its tokenizer knows it.

    Times are in the tokenizer's monotonic clock; None is unknown.

    Attributes:
        number: Number that the tokenizer gave it.
        arrival: Unix time of ``created``.
        created: Time of its arrival at the tokenizer.
        reason: ``stop``, ``length``, ``abort``, ``error`` or ``refused``.
        queued: Time of its entry into the scheduler's queue.
        scheduled: Time of its first forward pass.
        first: Time of its first token.
        preempted_seconds: Time that it waited in the queue after it was retracted.
        cached_tokens: Prompt tokens found in a cache, ``external_tokens`` of them in a storage.
        draft_tokens: Accepted tokens of drafts.
        max_tokens: Limit on its tokens.
        sample: Its number among the parallel samples of one prompt, in the order in which they ended.
        counted: Whether the engine's own counters have it.
        recorded: Whether it is a request of a client, or a sample of one.
        identity: None where the engine does not say whose request it is.
    """

    number: Count
    arrival: Seconds
    created: Seconds
    ended: Seconds
    reason: Text
    queued: Seconds | None = None
    scheduled: Seconds | None = None
    first: Seconds | None = None
    preempted_seconds: Seconds = 0.0
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    cached_tokens: Count = 0
    external_tokens: Count = 0
    draft_tokens: Count = 0
    retractions: Count = 0
    max_tokens: Count | None = None
    refused: Text = ""
    adapter: Text = ""
    sample: Count = 0
    counted: bool = False
    recorded: bool = True
    identity: Identity | None = None


class SglangAbort(msgspec.Struct, array_like=True, gc=False):
    """An abort of one request; the request itself ends later."""

    adapter: Text = ""
    identity: Identity | None = None


class SglangRequests(msgspec.Struct, array_like=True, gc=False, tag="gr"):
    """Requests of a tokenizer that ended or were aborted, with what its own counters added for them.

    Both are in one item, so that counters by tenant add up to the engine's own at any moment.

    Attributes:
        source: Identifies the process that numbers the requests.
        unseen: Requests that ended and are in no item, since the process could not hold them.
    """

    engine: EngineIndex
    stamp: Seconds
    source: Count
    ended: Annotated[list[SglangRequest], Meta(max_length=MAX_ENDED)] = []
    aborted: Annotated[list[SglangAbort], Meta(max_length=MAX_ENDED)] = []
    counters: Annotated[list[Family], Meta(max_length=MAX_OWN_COUNTERS)] = []
    unseen: Count = 0
