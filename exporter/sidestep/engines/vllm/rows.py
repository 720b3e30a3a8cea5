"""Rows of vLLM's own families (0.33), in the order of the engine's page.

Paths start below ``VllmStep``: ``scheduler`` is SchedulerStats, ``iteration`` is IterationStats.
Names, labels and bounds are the engine's; the HELP texts are this project's.
"""

from __future__ import annotations

from sidestep.catalog.model import Combine, Handler, Info, Kind, Row
from sidestep.protocol.iteration_stats import FINISH_REASONS

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
WAITING_REASONS = ("capacity", "deferred")
KV_FETCH_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
WATERMARK_STATUSES = ("watermarked", "skipped", "not_watermarked")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
ADMISSION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


def _counter(name: str, source: str, text: str, *, feature: str = "", since: str = "") -> Row:
    return Row(
        name=f"vllm:{name}", kind="counter", source=source, help=text, feature=feature, since=since
    )


def _gauge(name: str, source: str, text: str, *, combine: Combine = "sum") -> Row:
    return Row(name=f"vllm:{name}", kind="gauge", source=source, help=text, combine=combine)


def _histogram(name: str, source: str, buckets: str, text: str, *, feature: str = "") -> Row:
    return Row(
        name=f"vllm:{name}",
        kind="histogram",
        source=source,
        help=text,
        buckets=buckets,
        feature=feature,
    )


def _split(  # noqa: PLR0917 - the columns of a row
    name: str,
    kind: Kind,
    label: str,
    source: dict[str, str] | str | Handler,
    closed: tuple[str, ...],
    text: str,
    *,
    feature: str = "",
    since: str = "",
    combine: Combine = "sum",
) -> Row:
    return Row(
        name=f"vllm:{name}",
        kind=kind,
        source=source,
        help=text,
        labels=tuple(sorted(("engine", "model_name", label))),
        closed=closed,
        combine=combine,
        feature=feature,
        since=since,
    )


_REQUEST = "iteration.finished_requests[]."
_EVICTED = "scheduler.kv_cache_eviction_events[]."

ROWS: tuple[Row, ...] = (
    # Speculative decoding; a diffusion model has the same numbers under other names.
    _counter(
        "spec_decode_num_drafts_total",
        "scheduler.spec_decoding_stats.num_drafts",
        "Draft rounds of speculative decoding.",
        feature="spec_decode",
    ),
    _counter(
        "spec_decode_num_draft_tokens_total",
        "scheduler.spec_decoding_stats.num_draft_tokens",
        "Tokens that the drafter proposed.",
        feature="spec_decode",
    ),
    _counter(
        "spec_decode_num_accepted_tokens_total",
        "scheduler.spec_decoding_stats.num_accepted_tokens",
        "Proposed tokens that the model accepted.",
        feature="spec_decode",
    ),
    _split(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "position",
        "scheduler.spec_decoding_stats.num_accepted_tokens_per_pos",
        (),
        "Accepted tokens by their position in the draft, from 0.",
        feature="spec_decode",
    ),
    _counter(
        "diffusion_num_denoising_steps_total",
        "scheduler.diffusion_stats.num_drafts",
        "Denoising steps of a diffusion model.",
        feature="diffusion",
    ),
    _counter(
        "diffusion_num_canvas_positions_total",
        "scheduler.diffusion_stats.num_draft_tokens",
        "Canvas positions a diffusion model worked on.",
        feature="diffusion",
    ),
    _counter(
        "diffusion_num_committed_tokens_total",
        "scheduler.diffusion_stats.num_accepted_tokens",
        "Tokens a diffusion model committed.",
        feature="diffusion",
    ),
    # Estimated work.
    _counter(
        "estimated_flops_per_gpu_total",
        "scheduler.perf_stats.num_flops_per_gpu",
        "Floating point operations of one GPU, estimated from the model's shape.",
    ),
    _counter(
        "estimated_read_bytes_per_gpu_total",
        "scheduler.perf_stats.num_read_bytes_per_gpu",
        "Bytes one GPU read from its memory, estimated from the model's shape.",
    ),
    _counter(
        "estimated_write_bytes_per_gpu_total",
        "scheduler.perf_stats.num_write_bytes_per_gpu",
        "Bytes one GPU wrote to its memory, estimated from the model's shape.",
    ),
    # Scheduler state.
    _gauge(
        "num_requests_running",
        "scheduler.num_running_reqs",
        "Requests in the batch that the model executes.",
    ),
    _gauge(
        "num_requests_waiting",
        "scheduler.num_all_waiting_reqs",
        "Requests that wait to be scheduled, including deferred ones.",
    ),
    _split(
        "num_requests_waiting_by_reason",
        "gauge",
        "reason",
        {
            "capacity": "scheduler.num_waiting_reqs",
            "deferred": "scheduler.num_skipped_waiting_reqs",
        },
        WAITING_REASONS,
        "Waiting requests by reason: capacity of the batch, or a temporary constraint such as a"
        " LoRA limit or a KV transfer.",
    ),
    _split(
        "num_requests_kv_fetch_by_stage",
        "gauge",
        "stage",
        "scheduler.num_kv_fetch_reqs_by_stage",
        KV_FETCH_STAGES,
        "Waiting requests by the stage of the asynchronous load of their KV.",
        feature="kv_consumer",
    ),
    _split(
        "engine_sleep_state",
        "gauge",
        "sleep_state",
        Handler("sleep_state"),
        SLEEP_STATES,
        "1 for the current state of the engine: awake, asleep at level 1 (weights offloaded) or"
        " asleep at level 2 (all discarded).",
        combine="max",
    ),
    _gauge(
        "kv_cache_usage_perc",
        "scheduler.kv_cache_usage",
        "Share of the KV cache in use, from 0 to 1; cached blocks without a request count as free.",
        combine="max",
    ),
    _counter(
        "corrupted_requests_total",
        "iteration.num_corrupted_reqs",
        "Finished requests whose logits contained a NaN.",
        feature="nan_check",
    ),
    _split(
        "watermark_requests_total",
        "counter",
        "status",
        {
            "watermarked": "iteration.num_watermarked_reqs",
            "skipped": "iteration.num_watermark_skipped_reqs",
            "not_watermarked": "iteration.num_not_watermarked_reqs",
        },
        WATERMARK_STATUSES,
        "Finished requests by whether their text carries the engine's watermark.",
        feature="watermark",
        since="0.32",
    ),
    # Caches.
    _counter(
        "prefix_cache_queries_total",
        "scheduler.prefix_cache_stats.queries",
        "Prompt tokens looked up in the prefix cache.",
    ),
    _counter(
        "prefix_cache_hits_total",
        "scheduler.prefix_cache_stats.hits",
        "Prompt tokens found in the prefix cache.",
    ),
    _counter(
        "external_prefix_cache_queries_total",
        "scheduler.connector_prefix_cache_stats.queries",
        "Prompt tokens looked up in a cache shared between engines.",
    ),
    _counter(
        "external_prefix_cache_hits_total",
        "scheduler.connector_prefix_cache_stats.hits",
        "Prompt tokens found in a cache shared between engines.",
    ),
    _counter(
        "mm_cache_queries_total",
        "mm_cache.queries",
        "Multimodal items looked up in the front end's cache.",
    ),
    _counter(
        "mm_cache_hits_total",
        "mm_cache.hits",
        "Multimodal items found in the front end's cache.",
    ),
    # Tokens and requests.
    _counter(
        "num_preemptions_total",
        "iteration.num_preempted_reqs",
        "Preemptions, counted at the request's next output, or immediately with the tap in the"
        " engine's core.",
    ),
    _counter(
        "prompt_tokens_total",
        "iteration.prompt_tokens",
        "Prompt tokens of requests at their first output token, including cached ones.",
    ),
    _split(
        "prompt_tokens_by_source_total",
        "counter",
        "source",
        {
            "local_compute": "iteration.prompt_token_stats.computed",
            "local_cache_hit": "iteration.prompt_token_stats.local_cache_hit",
            "external_kv_transfer": "iteration.prompt_token_stats.external_kv_transfer",
        },
        PROMPT_SOURCES,
        "Prompt tokens by source of their KV.",
    ),
    _counter(
        "prompt_tokens_cached_total",
        "iteration.prompt_token_stats.cached_tokens",
        "Prompt tokens whose KV came from a cache, local or external.",
    ),
    _split(
        "prompt_tokens_cached_by_source_total",
        "counter",
        "source",
        Handler("cached_by_source"),
        CACHE_SOURCES,
        "Prompt tokens found in a cache, by cache tier; counted at admission.",
        since="0.32",
    ),
    _counter(
        "generation_tokens_total",
        "iteration.num_generation_tokens",
        "Tokens generated.",
    ),
    _split(
        "request_success_total",
        "counter",
        "finished_reason",
        "iteration.finished_requests[].finish_reason",
        FINISH_REASONS,
        "Finished requests by reason; vLLM's stat logger does not receive clients' aborts.",
    ),
    Row(
        name="vllm:admission_rejections_total",
        kind="counter",
        source=Handler("rejection"),
        help="Requests that the front end rejected because its queue was full, by limit.",
        labels=("model_name", "reason"),
        closed=ADMISSION_REASONS,
        since="0.32",
    ),
    # Request histograms.
    _histogram(
        "request_prompt_tokens",
        _REQUEST + "num_prompt_tokens",
        "request_tokens",
        "Prompt tokens of a finished request.",
    ),
    _histogram(
        "request_generation_tokens",
        _REQUEST + "num_generation_tokens",
        "request_tokens",
        "Generated tokens of a finished request.",
    ),
    Row(
        name="vllm:iteration_tokens_total",
        kind="histogram",
        source=Handler("iteration_tokens"),
        help="Generated tokens and computed prompt tokens of an engine step; one observation per"
        " step, whatever the number of API servers.",
        buckets="iteration_tokens",
    ),
    _histogram(
        "request_max_num_generation_tokens",
        "iteration.max_num_generation_tokens_iter[]",
        "request_tokens",
        "Generated tokens of the longest of a request's parallel samples.",
    ),
    _histogram(
        "request_params_n",
        "iteration.n_params_iter[]",
        "request_params_n",
        "Parallel samples that a request asked for (its parameter n).",
    ),
    _histogram(
        "request_params_max_tokens",
        _REQUEST + "max_tokens_limit",
        "request_tokens",
        "Limit of generated tokens that a request set (its parameter max_tokens), if any.",
    ),
    _histogram(
        "time_to_first_token_seconds",
        "iteration.time_to_first_tokens_iter[]",
        "time_to_first_token",
        "Time from a request's arrival at the front end to its first token.",
    ),
    _histogram(
        "inter_token_latency_seconds",
        "iteration.inter_token_latencies_iter[]",
        "inter_token_latency",
        "Time between two consecutive outputs of a request.",
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        _REQUEST + "mean_time_per_output_token",
        "inter_token_latency",
        "Mean time per output token after the first, one observation per request; 0 for a single"
        " token.",
    ),
    _histogram(
        "e2e_request_latency_seconds",
        _REQUEST + "e2e_latency",
        "request_latency",
        "Time from a request's arrival at the front end to its end.",
    ),
    _histogram(
        "request_queue_time_seconds",
        _REQUEST + "queued_time",
        "request_latency",
        "Time from a request's entry into the queue until it was first scheduled.",
    ),
    _histogram(
        "request_inference_time_seconds",
        _REQUEST + "inference_time",
        "request_latency",
        "Time from a request's first scheduling to its last token.",
    ),
    _histogram(
        "request_prefill_time_seconds",
        _REQUEST + "prefill_time",
        "request_latency",
        "Time from a request's first scheduling to its first token.",
    ),
    _histogram(
        "request_decode_time_seconds",
        _REQUEST + "decode_time",
        "request_latency",
        "Time from a request's first token to its last.",
    ),
    _histogram(
        "request_num_preemptions",
        _REQUEST + "num_preemptions",
        "request_num_preemptions",
        "Preemptions of a finished request; the first bucket contains 0 and 1.",
    ),
    _histogram(
        "request_prefill_kv_computed_tokens",
        _REQUEST + "num_prefill_kv_computed_tokens",
        "request_tokens",
        "Prompt tokens of a finished request whose KV had to be computed.",
    ),
    # KV block residency, sampled by the engine.
    _histogram(
        "kv_block_lifetime_seconds",
        _EVICTED + "lifetime_seconds",
        "kv_cache_residency",
        "Time from a sampled KV block's allocation to its eviction.",
        feature="kv_cache_metrics",
    ),
    _histogram(
        "kv_block_idle_before_evict_seconds",
        _EVICTED + "idle_seconds",
        "kv_cache_residency",
        "Time from a sampled KV block's last prefix hit to its eviction.",
        feature="kv_cache_metrics",
    ),
    _histogram(
        "kv_block_reuse_gap_seconds",
        _EVICTED + "reuse_gaps_seconds[]",
        "kv_cache_residency",
        "Time between consecutive prefix hits on a sampled KV block; only its last few.",
        feature="kv_cache_metrics",
    ),
    # Information.
    Row(
        name="vllm:lora_requests_info",
        kind="gauge",
        source=Handler("lora"),
        help="Unix time of the last step with this combination of LoRA adapters; only the current"
        " combination has a series. Both lists name all active adapters, as on the engine's own"
        " page; with the tap in the engine's core, each lists only its own.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        combine="max",
    ),
    Row(
        name="vllm:cache_config_info",
        kind="gauge",
        source=Info("cache_config"),
        help="The engine's cache configuration as labels, which depend on the engine's release.",
        labels=("engine",),
        combine="max",
    ),
)
