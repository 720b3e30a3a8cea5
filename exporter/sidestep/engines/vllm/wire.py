"""Wire structs of vLLM's stats objects, with vLLM's field names.

A field that only some releases have is optional, and absent means unknown: unknown values are
omitted from histograms, never guessed. Supported are vLLM 0.11.1 to 0.33, which declares its stats
classes unstable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.protocol.iteration_stats import IterationStats, KVCacheEvictionEvent, Run
from sidestep.protocol.limits import (
    MAX_STRUCTS,
    VALUE_LIMIT,
    Count,
    Counts,
    Observations,
    Ratio,
    Seconds,
    Tally,
    Text,
    Volume,
)
from sidestep.protocol.self_described import EngineIndex


class CacheStats(msgspec.Struct, array_like=True, gc=False):
    """Cache lookups since the last step; ``reset``: the cache was emptied before them."""

    reset: bool = False
    requests: Count = 0
    queries: Count = 0
    hits: Count = 0
    preempted_requests: Count = 0
    preempted_queries: Count = 0
    preempted_hits: Count = 0
    hits_by_source: Tally = {}


class SchedulerIterationDetails(msgspec.Struct, array_like=True, gc=False):
    """Details that ``--enable-logging-iteration-details`` adds; a resumed prefill is *generation*."""

    iteration_index: Count = 0
    num_ctx_requests: Count = 0
    num_ctx_tokens: Count = 0
    num_generation_requests: Count = 0
    num_generation_tokens: Count = 0
    elapsed_ms: Ratio = 0.0
    num_encoder_inputs: Count = 0
    num_encoder_output_tokens: Count = 0
    is_dummy: bool = False

    @property
    def elapsed_seconds(self) -> float:
        """The elapsed time in Prometheus' base unit."""
        return self.elapsed_ms / 1e3


class SpecDecodingStats(msgspec.Struct, array_like=True, gc=False):
    """Speculative decoding since the last step."""

    num_spec_tokens: Count = 0
    num_drafts: Count = 0
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0
    num_accepted_tokens_per_pos: Counts = []
    num_draft_tokens_per_pos: Counts = []

    @property
    def num_emitted_tokens(self) -> int:
        """The emitted tokens: each draft round emits the accepted tokens and one more."""
        return self.num_accepted_tokens + self.num_drafts


class CUDAGraphStat(msgspec.Struct, array_like=True, gc=False):
    """Padding of the step's batch to the size of a captured graph."""

    num_unpadded_tokens: Count = 0
    num_padded_tokens: Count = 0
    num_paddings: Count = 0
    runtime_mode: Text = ""


class PerfStats(msgspec.Struct, array_like=True, gc=False):
    """Estimated work of one GPU in the step."""

    num_flops_per_gpu: Volume = 0
    num_read_bytes_per_gpu: Volume = 0
    num_write_bytes_per_gpu: Volume = 0


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """The scheduler's state after the step (gauges), and its counts since the last step."""

    num_running_reqs: Count = 0
    num_waiting_reqs: Count = 0
    num_skipped_waiting_reqs: Count = 0
    num_kv_fetch_reqs_by_stage: Tally = {}
    kv_cache_usage: Ratio = 0.0
    iteration_details: SchedulerIterationDetails | None = None
    prefix_cache_stats: CacheStats | None = None
    connector_prefix_cache_stats: CacheStats | None = None
    kv_cache_eviction_events: Annotated[
        list[KVCacheEvictionEvent], Meta(max_length=MAX_STRUCTS)
    ] = []
    spec_decoding_stats: SpecDecodingStats | None = None
    waiting_lora_adapters: Tally = {}
    running_lora_adapters: Tally = {}
    cudagraph_stats: CUDAGraphStat | None = None
    perf_stats: PerfStats | None = None
    # vLLM reuses its spec-decoding struct for diffusion models and changes only the metrics'
    # names; the wire has a field for each.
    diffusion_stats: SpecDecodingStats | None = None

    @property
    def num_all_waiting_reqs(self) -> int:
        """Requests that wait for capacity plus deferred requests, as the engine adds them."""
        return self.num_waiting_reqs + self.num_skipped_waiting_reqs


class FrontEndLatencies(msgspec.Struct, array_like=True, gc=False):
    """Latencies as users see them; a tapped core does not know them, its front end does.

    Attributes:
        iteration_timestamp: Unix time at which the front end received the step's output. A latency
            is the difference from its request's arrival.
        time_to_first_tokens: Seconds, of requests with their first output.
        e2e_latencies: Seconds, of requests that finished.
        queue_times: Seconds in the core's queue, of the same requests.
    """

    iteration_timestamp: Seconds = 0.0
    time_to_first_tokens: Observations = []
    e2e_latencies: Observations = []
    queue_times: Observations = []


class VllmStep(msgspec.Struct, array_like=True, gc=False, tag="vs"):
    """One call of vLLM's stat logger: one engine step as one front end sees it.

    ``scheduler`` is present in one front end per step, ``iteration`` where the step had output for
    requests of this front end. ``more`` marks the rest of a step that did not fit into one item: it
    has observations only, no counts or gauges. ``front_end`` is present where a core sends the rest.
    """

    engine: EngineIndex
    stamp: Seconds
    wall: Seconds
    scheduler: SchedulerStats | None = None
    iteration: IterationStats | None = None
    mm_cache: CacheStats | None = None
    more: bool = False
    front_end: FrontEndLatencies | None = None


class VllmSleep(msgspec.Struct, array_like=True, gc=False, tag="vz"):
    """The engine fell asleep (``sleep`` 1, at ``level`` 1 or 2) or woke up."""

    engine: EngineIndex
    stamp: Seconds
    sleep: Annotated[int, Meta(ge=0, le=1)] = 0
    level: Annotated[int, Meta(ge=0, le=16)] = 0


class VllmRejection(msgspec.Struct, array_like=True, gc=False, tag="vr"):
    """The front end rejected a request before it reached the engine."""

    engine: EngineIndex
    stamp: Seconds
    reason: Text


_GRAPH = "scheduler.cudagraph_stats."
_DRAFTS = "scheduler.spec_decoding_stats."
_STEPS = "scheduler.diffusion_stats."
_REQUESTS = "iteration.finished_requests."
_COMPUTED = f"{_REQUESTS}num_prefill_kv_computed_tokens"
NEEDED_BY: Mapping[str, tuple[str, ...]] = {
    "scheduler.num_running_reqs": ("requests_by_state",),
    "scheduler.num_waiting_reqs": ("scheduler.num_all_waiting_reqs", "requests_by_state"),
    "scheduler.num_skipped_waiting_reqs": ("scheduler.num_all_waiting_reqs", "requests_by_state"),
    "scheduler.iteration_details.elapsed_ms": ("scheduler.iteration_details.elapsed_seconds",),
    "scheduler.prefix_cache_stats": ("cached_by_source",),
    "scheduler.prefix_cache_stats.hits": ("cached_by_source",),
    "scheduler.connector_prefix_cache_stats.hits_by_source": ("cached_by_source",),
    "scheduler.cudagraph_stats": ("cudagraph_tokens", "cudagraph_padding"),
    f"{_GRAPH}runtime_mode": ("cudagraph_tokens", "cudagraph_padding"),
    f"{_GRAPH}num_unpadded_tokens": ("cudagraph_tokens",),
    f"{_GRAPH}num_paddings": ("cudagraph_padding",),
    "scheduler.spec_decoding_stats": ("scheduler.diffusion_stats",),
    f"{_DRAFTS}num_drafts": (f"{_DRAFTS}num_emitted_tokens", f"{_STEPS}num_drafts"),
    f"{_DRAFTS}num_draft_tokens": (f"{_STEPS}num_draft_tokens",),
    f"{_DRAFTS}num_accepted_tokens": (
        f"{_DRAFTS}num_emitted_tokens",
        f"{_STEPS}num_accepted_tokens",
    ),
    "scheduler.running_lora_adapters": ("lora", "lora_requests"),
    "scheduler.waiting_lora_adapters": ("lora", "lora_requests"),
    "iteration.num_generation_tokens": ("iteration_tokens",),
    "iteration.num_prompt_tokens": ("iteration.prompt_tokens", "iteration_tokens"),
    "iteration.prompt_token_stats.total": ("iteration.prompt_tokens",),
    "iteration.prompt_token_stats.computed": ("iteration_tokens",),
    f"{_REQUESTS}num_prompt_tokens": (_COMPUTED,),
    f"{_REQUESTS}num_cached_tokens": (_COMPUTED,),
    f"{_REQUESTS}max_tokens_param": (f"{_REQUESTS}max_tokens_limit",),
}
"""Properties and handlers that need a field of vLLM's, by its path."""

_encoder = msgspec.msgpack.Encoder()
_FEW = 16
_HEAD = 3
_FLOAT = 9
"""Bytes in msgpack of the header of a list of 16 or more elements, and of a float."""


def run_of(values: object) -> Run | None:
    """Return a run if ``values`` is a list of many equal floats, else None.

    A step's inter-token latencies nearly always are equal, since the requests of a batch get their
    tokens at the same time (99 of 100 steps of four recorded runs). The comparison of the encoded
    bytes takes 1 us for 256 values; a comparison of each value would take 10 us.
    """
    if not isinstance(values, list) or len(values) < _FEW:
        return None
    if not isinstance(values[0], float) or not 0.0 <= values[0] <= VALUE_LIMIT:
        return None
    try:
        data = _encoder.encode(values)
    except (TypeError, ValueError):
        return None
    one = data[_HEAD : _HEAD + _FLOAT]
    return Run(values[0], len(values)) if data[_HEAD:] == one * len(values) else None
