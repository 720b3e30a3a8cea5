"""Rows of vLLM's own families (0.33), in the order of the engine's page.

Paths start below ``VllmStep``: ``scheduler`` is SchedulerStats, ``iteration`` is IterationStats.
Names, labels and bounds are the engine's; the HELP texts are this project's.
"""

from __future__ import annotations

from sidestep.catalog.row import ENGINE_LABELS, Handler, Info, Row
from sidestep.engines.common_names import common_row
from sidestep.engines.row_builders import counter, gauge, histogram
from sidestep.protocol.iteration_stats import FINISH_REASONS

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
WAITING_REASONS = ("capacity", "deferred")
KV_FETCH_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
WATERMARK_STATUSES = ("watermarked", "skipped", "not_watermarked")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
ADMISSION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


_REQUEST = "iteration.finished_requests[]."
_EVICTED = "scheduler.kv_cache_eviction_events[]."
_FRONT_END = "front_end."
_PROMPT = "iteration.prompt_token_stats."
_DRAFTS = "scheduler.spec_decoding_stats."
_DENOISING = "scheduler.diffusion_stats."
_WORK = "scheduler.perf_stats."
_PREFIX = "scheduler.prefix_cache_stats."
_EXTERNAL = "scheduler.connector_prefix_cache_stats."
TTFT = ("iteration.time_to_first_tokens_iter[]", _FRONT_END + "time_to_first_tokens[]")
E2E = (_REQUEST + "e2e_latency", _FRONT_END + "e2e_latencies[]")
"""Sources of the latencies that users see; the front ends of a tapped core send them if they can."""

# The table is laid out by hand: name above text, two lines a row.
# fmt: off
ROWS: tuple[Row, ...] = (
    # Speculative decoding; a diffusion model has the same numbers under other names.
    counter("vllm:spec_decode_num_drafts_total", _DRAFTS + "num_drafts",
            "Draft rounds of speculative decoding.", feature="spec_decode"),
    counter("vllm:spec_decode_num_draft_tokens_total", _DRAFTS + "num_draft_tokens",
            "Tokens that the drafter proposed.", feature="spec_decode"),
    counter("vllm:spec_decode_num_accepted_tokens_total", _DRAFTS + "num_accepted_tokens",
            "Proposed tokens that the model accepted.", feature="spec_decode"),
    counter("vllm:spec_decode_num_accepted_tokens_per_pos_total",
            _DRAFTS + "num_accepted_tokens_per_pos",
            "Accepted tokens by their position in the draft, from 0.", own=("position",),
            feature="spec_decode"),
    counter("vllm:diffusion_num_denoising_steps_total", _DENOISING + "num_drafts",
            "Denoising steps of a diffusion model.", feature="diffusion"),
    counter("vllm:diffusion_num_canvas_positions_total", _DENOISING + "num_draft_tokens",
            "Canvas positions a diffusion model worked on.", feature="diffusion"),
    counter("vllm:diffusion_num_committed_tokens_total", _DENOISING + "num_accepted_tokens",
            "Tokens a diffusion model committed.", feature="diffusion"),
    # Estimated work.
    counter("vllm:estimated_flops_per_gpu_total", _WORK + "num_flops_per_gpu",
            "Floating point operations of one GPU, estimated from the model's shape."),
    counter("vllm:estimated_read_bytes_per_gpu_total", _WORK + "num_read_bytes_per_gpu",
            "Bytes one GPU read from its memory, estimated from the model's shape."),
    counter("vllm:estimated_write_bytes_per_gpu_total", _WORK + "num_write_bytes_per_gpu",
            "Bytes one GPU wrote to its memory, estimated from the model's shape."),
    # Scheduler state.
    gauge("vllm:num_requests_running", "scheduler.num_running_reqs",
          "Requests in the batch that the model executes."),
    gauge("vllm:num_requests_waiting", "scheduler.num_all_waiting_reqs",
          "Requests that wait to be scheduled, including deferred ones."),
    gauge("vllm:num_requests_waiting_by_reason",
          {"capacity": "scheduler.num_waiting_reqs", "deferred": "scheduler.num_skipped_waiting_reqs"},
          "Waiting requests by reason: capacity of the batch, or a temporary constraint such as a"
          " LoRA limit or a KV transfer.", own=("reason",), closed=WAITING_REASONS),
    gauge("vllm:num_requests_kv_fetch_by_stage", "scheduler.num_kv_fetch_reqs_by_stage",
          "Waiting requests by the stage of the asynchronous load of their KV.", own=("stage",),
          closed=KV_FETCH_STAGES, feature="kv_consumer"),
    Row(
        name="vllm:engine_sleep_state",
        kind="gauge",
        source=Handler("sleep_state"),
        help="1 for the current state of the engine: awake, asleep at level 1 (weights offloaded) or"
        " asleep at level 2 (all discarded).",
        labels=(*ENGINE_LABELS, "sleep_state"),
        closed=SLEEP_STATES,
        combine="max",
        lasting=True,
    ),
    gauge("vllm:kv_cache_usage_perc", "scheduler.kv_cache_usage",
          "Share of the KV cache in use, from 0 to 1; cached blocks without a request count as"
          " free.", combine="max"),
    counter("vllm:corrupted_requests_total", "iteration.num_corrupted_reqs",
            "Finished requests whose logits contained a NaN.", feature="nan_check"),
    counter("vllm:watermark_requests_total",
            {"watermarked": "iteration.num_watermarked_reqs", "skipped": "iteration.num_watermark_skipped_reqs", "not_watermarked": "iteration.num_not_watermarked_reqs"},
            "Finished requests by whether their text carries the engine's watermark.",
            own=("status",), closed=WATERMARK_STATUSES, feature="watermark", since="0.32"),
    # Caches.
    counter("vllm:prefix_cache_queries_total", _PREFIX + "queries",
            "Prompt tokens looked up in the prefix cache."),
    counter("vllm:prefix_cache_hits_total", _PREFIX + "hits",
            "Prompt tokens found in the prefix cache."),
    counter("vllm:external_prefix_cache_queries_total", _EXTERNAL + "queries",
            "Prompt tokens looked up in a cache shared between engines."),
    counter("vllm:external_prefix_cache_hits_total", _EXTERNAL + "hits",
            "Prompt tokens found in a cache shared between engines."),
    counter("vllm:mm_cache_queries_total", "mm_cache.queries",
            "Multimodal items looked up in the front end's cache."),
    counter("vllm:mm_cache_hits_total", "mm_cache.hits",
            "Multimodal items found in the front end's cache."),
    # Tokens and requests.
    counter("vllm:num_preemptions_total", "iteration.num_preempted_reqs",
            "Preemptions, counted at the request's next output, or immediately with the tap in"
            " the engine's core."),
    counter("vllm:prompt_tokens_total", "iteration.prompt_tokens",
            "Prompt tokens of requests at their first output token, including cached ones."),
    counter("vllm:prompt_tokens_by_source_total",
            {"local_compute": _PROMPT + "computed", "local_cache_hit": _PROMPT + "local_cache_hit", "external_kv_transfer": _PROMPT + "external_kv_transfer"},
            "Prompt tokens by source of their KV.", own=("source",), closed=PROMPT_SOURCES),
    counter("vllm:prompt_tokens_cached_total", _PROMPT + "cached_tokens",
            "Prompt tokens whose KV came from a cache, local or external."),
    counter("vllm:prompt_tokens_cached_by_source_total", Handler("cached_by_source"),
            "Prompt tokens found in a cache, by cache tier; counted at admission.", own=("source",),
            closed=CACHE_SOURCES, since="0.32"),
    counter("vllm:generation_tokens_total", "iteration.num_generation_tokens",
            "Tokens generated."),
    counter("vllm:request_success_total", "iteration.finished_requests[].finish_reason",
            "Finished requests by reason; vLLM's stat logger does not receive clients' aborts.",
            own=("finished_reason",), closed=FINISH_REASONS),
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
    histogram("vllm:request_prompt_tokens", _REQUEST + "num_prompt_tokens",
              "Prompt tokens of a finished request.", buckets="request_tokens"),
    histogram("vllm:request_generation_tokens", _REQUEST + "num_generation_tokens",
              "Generated tokens of a finished request.", buckets="request_tokens"),
    histogram("vllm:iteration_tokens_total", Handler("iteration_tokens"),
              "Generated tokens and computed prompt tokens of an engine step; one observation per"
              " step, whatever the number of API servers.", buckets="iteration_tokens"),
    histogram("vllm:request_max_num_generation_tokens",
              "iteration.max_num_generation_tokens_iter[]",
              "Generated tokens of the longest of a request's parallel samples.",
              buckets="request_tokens"),
    histogram("vllm:request_params_n", "iteration.n_params_iter[]",
              "Parallel samples that a request asked for (its parameter n).",
              buckets="request_params_n"),
    histogram("vllm:request_params_max_tokens", _REQUEST + "max_tokens_limit",
              "Limit of generated tokens that a request set (its parameter max_tokens), if any.",
              buckets="request_tokens"),
    histogram("vllm:time_to_first_token_seconds", TTFT,
              "Time from a request's arrival at the front end to its first token.",
              buckets="time_to_first_token"),
    histogram("vllm:inter_token_latency_seconds", "iteration.inter_token_latencies_iter[]",
              "Time between two consecutive outputs of a request.", buckets="inter_token_latency"),
    histogram("vllm:request_time_per_output_token_seconds", _REQUEST + "mean_time_per_output_token",
              "Mean time per output token after the first, one observation per request; 0 for a"
              " single token.", buckets="inter_token_latency"),
    histogram("vllm:e2e_request_latency_seconds", E2E,
              "Time from a request's arrival at the front end to its end.",
              buckets="request_latency"),
    histogram("vllm:request_queue_time_seconds", _REQUEST + "queued_time",
              "Time from a request's entry into the queue until it was first scheduled.",
              buckets="request_latency"),
    histogram("vllm:request_inference_time_seconds", _REQUEST + "inference_time",
              "Time from a request's first scheduling to its last token.",
              buckets="request_latency"),
    histogram("vllm:request_prefill_time_seconds", _REQUEST + "prefill_time",
              "Time from a request's first scheduling to its first token.",
              buckets="request_latency"),
    histogram("vllm:request_decode_time_seconds", _REQUEST + "decode_time",
              "Time from a request's first token to its last.", buckets="request_latency"),
    histogram("vllm:request_num_preemptions", _REQUEST + "num_preemptions",
              "Preemptions of a finished request; the first bucket contains 0 and 1.",
              buckets="request_num_preemptions"),
    histogram("vllm:request_prefill_kv_computed_tokens",
              _REQUEST + "num_prefill_kv_computed_tokens",
              "Prompt tokens of a finished request whose KV had to be computed.",
              buckets="request_tokens"),
    # KV block residency, sampled by the engine.
    histogram("vllm:kv_block_lifetime_seconds", _EVICTED + "lifetime_seconds",
              "Time from a sampled KV block's allocation to its eviction.",
              buckets="kv_cache_residency", feature="kv_cache_metrics"),
    histogram("vllm:kv_block_idle_before_evict_seconds", _EVICTED + "idle_seconds",
              "Time from a sampled KV block's last prefix hit to its eviction.",
              buckets="kv_cache_residency", feature="kv_cache_metrics"),
    histogram("vllm:kv_block_reuse_gap_seconds", _EVICTED + "reuse_gaps_seconds[]",
              "Time between consecutive prefix hits on a sampled KV block; only its last few.",
              buckets="kv_cache_residency", feature="kv_cache_metrics"),
    # Information.
    Row(
        name="vllm:lora_requests_info",
        kind="gauge",
        source=Handler("lora"),
        help="Unix time of the last step with this combination of LoRA adapters; only the current"
        " combination has a series, both lists empty when no adapter is active. Both lists name all"
        " active adapters, as on the engine's own page; with the tap in the engine's core, each"
        " lists only its own.",
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
COMMON: tuple[Row, ...] = (
    common_row("gen_ai_server_time_to_first_token_seconds", TTFT),
    common_row("gen_ai_server_time_per_output_token_seconds",
               _REQUEST + "mean_time_per_output_token"),
    common_row("gen_ai_server_request_duration_seconds", E2E),
    common_row("gen_ai_client_token_usage",
               {"input": _REQUEST + "num_prompt_tokens",
                "output": _REQUEST + "num_generation_tokens"}),
    common_row("sidestep_inter_token_latency_seconds", "iteration.inter_token_latencies_iter[]"),
    common_row("sidestep_request_queue_seconds", _REQUEST + "queued_time"),
    common_row("sidestep_requests_running", "scheduler.num_running_reqs"),
    common_row("sidestep_requests_waiting", "scheduler.num_all_waiting_reqs"),
    common_row("sidestep_kv_cache_usage_ratio", "scheduler.kv_cache_usage"),
    common_row("sidestep_preemptions_total", "iteration.num_preempted_reqs"),
    common_row("sidestep_prefix_cache_looked_up_tokens_total", _PREFIX + "queries"),
    common_row("sidestep_prefix_cache_found_tokens_total", _PREFIX + "hits"),
)
# fmt: on
