"""Rows for values that vLLM collects but does not expose, with the prefix ``sidestep_``."""

from __future__ import annotations

from sidestep.catalog.model import ENGINE_LABELS, Computed, Handler, Kind, Row

_DETAILS = "scheduler.iteration_details."
_PREEMPTED = "scheduler.prefix_cache_stats.preempted_"
_GRAPH = "scheduler.cudagraph_stats."


def _own(
    name: str,
    kind: Kind,
    source: str | tuple[str, ...] | Handler,
    text: str,
    *,
    labels: tuple[str, ...] = (),
    buckets: str = "",
    feature: str = "",
) -> Row:
    return Row(
        name=f"sidestep_{name}",
        kind=kind,
        source=source,
        help=text,
        labels=tuple(sorted((*ENGINE_LABELS, *labels))),
        buckets=buckets,
        feature=feature,
    )


REFUSED = _own(
    "refused_observations_total",
    "counter",
    Handler("refused_observations"),
    "Observations that were refused because they were negative (the host's wall clock stepped"
    " back) or not a number.",
)
"""Every dialect has this row, so that it is one family."""
SATURATION = Row(
    name="sidestep_saturation_ratio",
    kind="gauge",
    source=Computed("saturation"),
    help="Request rate divided by the rate that the engine can serve; from 1 on, its queue grows. No"
    " sample until the batch was full for the first time.",
    combine="max",
)
"""vLLM's row; SGLang's has a scheduler's labels."""

ROWS: tuple[Row, ...] = (
    _own(
        "prefix_cache_preempted_requests_total",
        "counter",
        _PREEMPTED + "requests",
        "Prefix cache lookups of preempted requests, which vllm:prefix_cache_* omits.",
    ),
    _own(
        "prefix_cache_preempted_queries_total",
        "counter",
        _PREEMPTED + "queries",
        "Tokens looked up by preempted requests, which vllm:prefix_cache_queries_total omits.",
    ),
    _own(
        "prefix_cache_preempted_hits_total",
        "counter",
        _PREEMPTED + "hits",
        "Tokens found by preempted requests, which vllm:prefix_cache_hits_total omits.",
    ),
    _own(
        "spec_decode_draft_tokens_per_position_total",
        "counter",
        "scheduler.spec_decoding_stats.num_draft_tokens_per_pos",
        "Draft tokens by position in the draft, from 0.",
        labels=("position",),
        feature="spec_decode",
    ),
    _own(
        "iteration_duration_seconds",
        "histogram",
        (_DETAILS + "elapsed_seconds", "steps[].duration"),
        "Duration of an engine iteration: from the start of its scheduling to its output with the"
        " tap in the engine's core, otherwise the model's execution alone, as vLLM logs it.",
        buckets="iteration_duration",
        feature="iteration_details",
    ),
    _own(
        "iteration_context_requests",
        "histogram",
        _DETAILS + "num_ctx_requests",
        "Requests in prefill in an iteration.",
        buckets="iteration_requests",
        feature="iteration_details",
    ),
    _own(
        "iteration_context_tokens",
        "histogram",
        _DETAILS + "num_ctx_tokens",
        "Prompt tokens computed in an iteration.",
        buckets="iteration_tokens",
        feature="iteration_details",
    ),
    _own(
        "iteration_generation_requests",
        "histogram",
        _DETAILS + "num_generation_requests",
        "Requests in decode in an iteration; a resumed request counts here, as in the engine.",
        buckets="iteration_requests",
        feature="iteration_details",
    ),
    _own(
        "iteration_generation_tokens",
        "histogram",
        _DETAILS + "num_generation_tokens",
        "Decode tokens of an iteration; a resumed prefill counts here, as in the engine.",
        buckets="iteration_tokens",
        feature="iteration_details",
    ),
    _own(
        "iteration_encoder_inputs_total",
        "counter",
        _DETAILS + "num_encoder_inputs",
        "Inputs processed by the multimodal encoder.",
        feature="iteration_details",
    ),
    _own(
        "iteration_encoder_output_tokens_total",
        "counter",
        _DETAILS + "num_encoder_output_tokens",
        "Embeddings produced by the multimodal encoder.",
        feature="iteration_details",
    ),
    _own(
        "dummy_iterations_total",
        "counter",
        _DETAILS + "is_dummy",
        "Iterations without requests, which keep data-parallel ranks in step.",
        feature="iteration_details",
    ),
    _own(
        "cudagraph_tokens_total",
        "counter",
        Handler("cudagraph_tokens"),
        "Tokens executed, by the CUDA graph mode of their batch; padding not included.",
        labels=("runtime_mode",),
        feature="cudagraph",
    ),
    _own(
        "cudagraph_padding_tokens_total",
        "counter",
        Handler("cudagraph_padding"),
        "Tokens added to a batch to fit a captured CUDA graph, by its mode.",
        labels=("runtime_mode",),
        feature="cudagraph",
    ),
    _own(
        "lora_requests",
        "gauge",
        Handler("lora_requests"),
        "Requests by LoRA adapter and state; requests in the scheduler's queue count only with"
        " the tap in the engine's core.",
        labels=("adapter", "state"),
        feature="lora",
    ),
    SATURATION,
    REFUSED,
)
