"""What vLLM collects but exports nowhere, under our own prefix."""

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
    "Observations left out: negative (the host's wall clock stepped back) or not a number.",
)
"""The same row in every dialect: one family."""
SATURATION = Row(
    name="sidestep_saturation_ratio",
    kind="gauge",
    source=Computed("saturation"),
    help="Requests offered over those that the engine can serve: from 1 on its queue grows. Without"
    " a sample until it was full for the first time.",
    combine="max",
)
"""Of vLLM; SGLang has the same with a scheduler's labels."""

ROWS: tuple[Row, ...] = (
    _own(
        "prefix_cache_preempted_requests_total",
        "counter",
        _PREEMPTED + "requests",
        "Preempted requests that looked up the prefix cache again; not in vllm:prefix_cache_*.",
    ),
    _own(
        "prefix_cache_preempted_queries_total",
        "counter",
        _PREEMPTED + "queries",
        "Tokens that preempted requests looked up again; not in vllm:prefix_cache_queries_total.",
    ),
    _own(
        "prefix_cache_preempted_hits_total",
        "counter",
        _PREEMPTED + "hits",
        "Tokens that preempted requests found again; not in vllm:prefix_cache_hits_total.",
    ),
    _own(
        "spec_decode_draft_tokens_per_position_total",
        "counter",
        "scheduler.spec_decoding_stats.num_draft_tokens_per_pos",
        "Drafted tokens by their position in the draft, from 0.",
        labels=("position",),
        feature="spec_decode",
    ),
    _own(
        "iteration_duration_seconds",
        "histogram",
        (_DETAILS + "elapsed_seconds", "steps[].duration"),
        "Time of an engine iteration: from the begin of its scheduling to its output where"
        " the engine's core is tapped, else the model's execution alone, as vLLM logs it.",
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
        "Inputs given to the multimodal encoder.",
        feature="iteration_details",
    ),
    _own(
        "iteration_encoder_output_tokens_total",
        "counter",
        _DETAILS + "num_encoder_output_tokens",
        "Embeddings the multimodal encoder made.",
        feature="iteration_details",
    ),
    _own(
        "dummy_iterations_total",
        "counter",
        _DETAILS + "is_dummy",
        "Iterations run without requests, to keep data-parallel ranks in step.",
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
        "Requests by LoRA adapter and state; what waits in the scheduler's queue is seen only"
        " where the engine's core is tapped.",
        labels=("adapter", "state"),
        feature="lora",
    ),
    SATURATION,
    REFUSED,
)
