"""Rows for values that vLLM collects but does not expose, with the prefix ``sidestep_``."""

from __future__ import annotations

from sidestep.catalog.row import Computed, Handler, Row
from sidestep.engines.row_builders import SampledRows, counter, gauge, histogram
from sidestep.engines.shared_rows import (
    MAX_RUNNING_REQUESTS,
    REFUSED_OBSERVATIONS,
    cost,
    saturation,
)

_DETAILS = "scheduler.iteration_details."
_PREEMPTED = "scheduler.prefix_cache_stats.preempted_"
_GRAPH = "scheduler.cudagraph_stats."


ROWS: tuple[Row, ...] = (
    counter(
        "sidestep_prefix_cache_preempted_requests_total",
        _PREEMPTED + "requests",
        "Prefix cache lookups of preempted requests, which vllm:prefix_cache_* omits.",
    ),
    counter(
        "sidestep_prefix_cache_preempted_queries_total",
        _PREEMPTED + "queries",
        "Tokens looked up by preempted requests, which vllm:prefix_cache_queries_total omits.",
    ),
    counter(
        "sidestep_prefix_cache_preempted_hits_total",
        _PREEMPTED + "hits",
        "Tokens found by preempted requests, which vllm:prefix_cache_hits_total omits.",
    ),
    counter(
        "sidestep_spec_decode_draft_tokens_per_position_total",
        "scheduler.spec_decoding_stats.num_draft_tokens_per_pos",
        "Draft tokens by position in the draft, from 0.",
        own=("position",),
        feature="spec_decode",
    ),
    histogram(
        "sidestep_iteration_duration_seconds",
        (_DETAILS + "elapsed_seconds", "steps[].duration"),
        "Duration of an engine iteration: from the start of its scheduling to its output with the"
        " tap in the engine's core, otherwise the model's execution alone, as vLLM logs it.",
        buckets="iteration_duration",
        feature="iteration_details",
    ),
    histogram(
        "sidestep_iteration_context_requests",
        _DETAILS + "num_ctx_requests",
        "Requests in prefill in an iteration.",
        buckets="iteration_requests",
        feature="iteration_details",
    ),
    histogram(
        "sidestep_iteration_context_tokens",
        _DETAILS + "num_ctx_tokens",
        "Prompt tokens computed in an iteration.",
        buckets="iteration_tokens",
        feature="iteration_details",
    ),
    histogram(
        "sidestep_iteration_generation_requests",
        _DETAILS + "num_generation_requests",
        "Requests in decode in an iteration; a resumed request counts here, as in the engine.",
        buckets="iteration_requests",
        feature="iteration_details",
    ),
    histogram(
        "sidestep_iteration_generation_tokens",
        _DETAILS + "num_generation_tokens",
        "Decode tokens of an iteration; a resumed prefill counts here, as in the engine.",
        buckets="iteration_tokens",
        feature="iteration_details",
    ),
    counter(
        "sidestep_iteration_encoder_inputs_total",
        _DETAILS + "num_encoder_inputs",
        "Inputs processed by the multimodal encoder.",
        feature="iteration_details",
    ),
    counter(
        "sidestep_iteration_encoder_output_tokens_total",
        _DETAILS + "num_encoder_output_tokens",
        "Embeddings produced by the multimodal encoder.",
        feature="iteration_details",
    ),
    counter(
        "sidestep_dummy_iterations_total",
        _DETAILS + "is_dummy",
        "Iterations without requests, which keep data-parallel ranks in step.",
        feature="iteration_details",
    ),
    counter(
        "sidestep_cudagraph_tokens_total",
        Handler("cudagraph_tokens"),
        "Tokens executed, by the CUDA graph mode of their batch; padding not included.",
        own=("runtime_mode",),
        feature="cudagraph",
    ),
    counter(
        "sidestep_cudagraph_padding_tokens_total",
        Handler("cudagraph_padding"),
        "Tokens added to a batch to fit a captured CUDA graph, by its mode.",
        own=("runtime_mode",),
        feature="cudagraph",
    ),
    gauge(
        "sidestep_lora_requests",
        Handler("lora_requests"),
        "Requests by LoRA adapter and state; requests in the scheduler's queue count only with"
        " the tap in the engine's core.",
        own=("adapter", "state"),
        feature="lora",
    ),
    gauge(
        MAX_RUNNING_REQUESTS,
        Computed("max_running_requests"),
        "Most requests in the batch (vLLM's max_num_seqs).",
    ),
    SampledRows("sidestep_").gauge(
        "startup_seconds",
        "Duration of the engine's start, by phase: core, from the start of the core's process until its"
        " workers had loaded, compiled and warmed up; compile and compile_encoder, torch.compile"
        " within it, in the slowest worker; front_end, from the start of the front end's process until"
        " its engines were ready. Phases overlap: they do not add up.",
        "phase",
        combine="max",
    ),
    *cost(),
    *saturation(),
    REFUSED_OBSERVATIONS,
)
