"""Rows with the prefix ``sidestep_``: what vLLM does not expose.

vLLM collects some of the values. The others are in raw events: steps and requests in request events,
block lifetimes in block events. A tap in the engine's core sends both: feature ``engine_core``. A front
end whose engine has none sends those of requests: feature ``request_events``, which both have.
"""

from __future__ import annotations

import functools

from sidestep.catalog.row import Computed, Handler, Row, Sampled
from sidestep.engines import shared_rows
from sidestep.engines.row_builders import SampledRows, counter, gauge, histogram
from sidestep.engines.vllm.rows import ADMISSION_REASONS, PROMPT_SOURCES
from sidestep.metrics.registry import TENANT
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.messages import ENGINE_CORE, REQUEST_EVENTS
from sidestep.tracking.requests.inflight import MICROS
from sidestep.tracking.requests.outcomes import UNTRACKED

STATES = ("waiting", "deferred", "preempted", "running", "swapped")
HANDED_OVER_REQUESTS = "sidestep_handed_over_requests_total"
HANDED_OVER_TOKENS = "sidestep_handed_over_generation_tokens_total"
REFUSALS = ("prompt_too_long", *ADMISSION_REASONS)

_DETAILS = "scheduler.iteration_details."
_PREEMPTED = "scheduler.prefix_cache_stats.preempted_"
_detail_counter, _detail_histogram = (
    functools.partial(kind, feature="iteration_details") for kind in (counter, histogram)
)
_counter, _gauge, _histogram = (
    functools.partial(kind, feature=ENGINE_CORE) for kind in (counter, gauge, histogram)
)
_PROCESS = SampledRows("sidestep_engine_process_")

# The tables are laid out by hand: name above text, two lines a row.
# fmt: off
_COLLECTED: tuple[Row, ...] = (
    counter("sidestep_prefix_cache_preempted_requests_total", _PREEMPTED + "requests",
            "Prefix cache lookups of preempted requests, which vllm:prefix_cache_* omits."),
    counter("sidestep_prefix_cache_preempted_queries_total", _PREEMPTED + "queries",
            "Tokens looked up by preempted requests, which vllm:prefix_cache_queries_total omits."),
    counter("sidestep_prefix_cache_preempted_hits_total", _PREEMPTED + "hits",
            "Tokens found by preempted requests, which vllm:prefix_cache_hits_total omits."),
    counter("sidestep_spec_decode_draft_tokens_per_position_total",
            "scheduler.spec_decoding_stats.num_draft_tokens_per_pos",
            "Draft tokens by position in the draft, from 0.", own=("position",),
            feature="spec_decode"),
    _detail_histogram("sidestep_iteration_duration_seconds",
                      (_DETAILS + "elapsed_seconds", "steps[].duration"),
                      "Duration of an engine iteration: from the start of its scheduling to its"
                      " output with the tap in the engine's core, otherwise the model's execution"
                      " alone, as vLLM logs it.", buckets="iteration_duration"),
    _detail_histogram("sidestep_iteration_context_requests", _DETAILS + "num_ctx_requests",
                      "Requests in prefill in an iteration.", buckets="iteration_requests"),
    _detail_histogram("sidestep_iteration_context_tokens", _DETAILS + "num_ctx_tokens",
                      "Prompt tokens computed in an iteration.", buckets="iteration_tokens"),
    _detail_histogram("sidestep_iteration_generation_requests",
                      _DETAILS + "num_generation_requests",
                      "Requests in decode in an iteration; a resumed request counts here, as in"
                      " the engine.", buckets="iteration_requests"),
    _detail_histogram("sidestep_iteration_generation_tokens", _DETAILS + "num_generation_tokens",
                      "Decode tokens of an iteration; a resumed prefill counts here, as in the"
                      " engine.", buckets="iteration_tokens"),
    _detail_counter("sidestep_iteration_encoder_inputs_total", _DETAILS + "num_encoder_inputs",
                    "Inputs processed by the multimodal encoder."),
    _detail_counter("sidestep_iteration_encoder_output_tokens_total",
                    _DETAILS + "num_encoder_output_tokens",
                    "Embeddings produced by the multimodal encoder."),
    _detail_counter("sidestep_dummy_iterations_total", _DETAILS + "is_dummy",
                    "Iterations without requests, which keep data-parallel ranks in step."),
    counter("sidestep_cudagraph_tokens_total", Handler("cudagraph_tokens"),
            "Tokens executed, by the CUDA graph mode of their batch; padding not included.",
            own=("runtime_mode",), feature="cudagraph"),
    counter("sidestep_cudagraph_padding_tokens_total", Handler("cudagraph_padding"),
            "Tokens added to a batch to fit a captured CUDA graph, by its mode.",
            own=("runtime_mode",), feature="cudagraph"),
    gauge("sidestep_lora_requests", Handler("lora_requests"),
          "Requests by LoRA adapter and state; requests in the scheduler's queue count only with"
          " the tap in the engine's core.", own=("adapter", "state"), feature="lora"),
    gauge(shared_rows.MAX_RUNNING_REQUESTS, Computed("max_running_requests"),
          "Most requests in the batch (vLLM's max_num_seqs)."),
    gauge("sidestep_startup_seconds", Sampled(),
          "Duration of the engine's start, by phase: core, from the start of the core's process"
          " until its workers had loaded, compiled and warmed up; compile and compile_encoder,"
          " torch.compile within it, in the slowest worker; front_end, from the start of the front"
          " end's process until its engines were ready. Phases overlap: they do not add up.",
          own=("phase",), combine="max"),
    *shared_rows.service(FINISH_REASONS, ("time_to_first_token", "request_latency"),
                         feature=REQUEST_EVENTS),
    counter(HANDED_OVER_REQUESTS, "handed_over[].finish_reason",
            "Requests that only computed their prompt, by reason: another engine continues and counts"
            " them.", own=("reason",), closed=FINISH_REASONS, feature="kv_transfer"),
    counter(HANDED_OVER_TOKENS, "handed_over_tokens",
            "Tokens generated for the requests in sidestep_handed_over_requests_total, which the other"
            " engine generates again.", feature="kv_transfer"),
    counter(shared_rows.RECEIVED_PROMPT,
            {"local_compute": "received.computed", "local_cache_hit": "received.local_cache_hit", "external_kv_transfer": "received.external_kv_transfer"},
            "Prompt tokens that another engine has computed and counts, by where their KV came from"
            " here; local_compute is computed again, such as after a failed transfer.",
            own=("source",), closed=PROMPT_SOURCES, feature="kv_transfer"),
    counter("sidestep_local_prefills_total", "local_prefills",
            "Prompts that another engine had computed, and that this engine computed again, since none"
            " of their KV was transferred.", feature="kv_transfer"),
    *shared_rows.cost(),
    *shared_rows.saturation(),
    shared_rows.REFUSED_OBSERVATIONS,
)
TAPPED: tuple[Row, ...] = (
    # The scheduler's state.
    _gauge("sidestep_requests", Handler("requests_by_state"),
           "Requests in the scheduler by state; preempted requests do not count as waiting. vLLM"
           " V1 never swaps.", own=("state",), closed=STATES),
    _counter("sidestep_refused_requests_total", Handler("refused_requests"),
             "Requests rejected before any work: by the front end because its queue was full, or"
             " by the engine's core because the prompt was too long. Up to 0.33, the front end"
             " answers prompts that are too long with 400, uncounted.", own=("reason",),
             closed=REFUSALS, feature=""),
    counter("sidestep_untracked_requests_total", Handler("untracked_requests"),
            "Requests some of whose intervals are in no histogram: over the limit of requests in"
            " flight, unfinished for too long, interrupted by a restart of the engine or by"
            " dropped events, started before this exporter, or in flight while events were folded"
            " because no exporter was connected. Reason samples: some of a request's parallel"
            " samples may be missing, so their number is in no histogram.", own=("reason",),
            closed=UNTRACKED, feature=REQUEST_EVENTS),
    *shared_rows.request_parts(feature=REQUEST_EVENTS),
    *shared_rows.goodput(feature=REQUEST_EVENTS),
    counter("sidestep_kv_block_seconds_total", "held_micros",
            "KV blocks that requests held, times the seconds for which they were in the batch;"
            " counted when a request leaves it. A block that requests share counts for each.",
            unit_divisor=MICROS, feature=REQUEST_EVENTS),
    counter("sidestep_tenant_kv_block_seconds_total", Handler("tenant_kv_block_seconds"),
            "KV blocks that requests held, times the seconds for which they were in the batch, by"
            " tenant.", own=(TENANT,), unit_divisor=MICROS, feature=REQUEST_EVENTS),
    *shared_rows.tenants(feature=REQUEST_EVENTS),
    histogram("sidestep_request_preempted_seconds", "preempted_seconds[]",
              "Time from a request's preemption until it was scheduled again or aborted.",
              buckets="request_latency", feature=REQUEST_EVENTS),
    _gauge("sidestep_longest_preemption_seconds", Handler("longest_preemption"),
           "Longest time that a preempted request had waited at the engine's last step; 0 if none"
           " waits.", combine="max"),
    _histogram("sidestep_frontend_hop_seconds", Handler("front_end_hop"),
               "Time from a request's first token in the engine's core until its front end has"
               " received it, by both hosts' clocks. With the tap and the plugin.",
               buckets="iteration_duration"),
    # Aborted requests, which are in no request histogram of the engine's.
    histogram("sidestep_aborted_request_prompt_tokens", "aborted[].prompt_tokens",
              "Prompt tokens of an aborted request.", buckets="request_tokens",
              feature=REQUEST_EVENTS),
    histogram("sidestep_aborted_request_generation_tokens", "aborted[].generation_tokens",
              "Tokens generated for a request before it was aborted.", buckets="request_tokens",
              feature=REQUEST_EVENTS),
    histogram("sidestep_aborted_request_duration_seconds", "aborted[].seconds",
              "Time from an aborted request's entry into the queue to its abort.",
              buckets="request_latency", feature=REQUEST_EVENTS),
    *shared_rows.backlog(Computed("waiting_prompt_tokens"), Computed("unfinished_prefill_tokens"),
                         feature=ENGINE_CORE),
    # KV for other engines.
    gauge("sidestep_kv_held_requests", Sampled(),
          "Requests that have ended, and whose KV is held until another engine has fetched it.",
          feature="kv_transfer"),
    gauge("sidestep_kv_held_blocks", Sampled(),
          "KV blocks of the requests in sidestep_kv_held_requests.", feature="kv_transfer"),
    gauge("sidestep_kv_held_longest_seconds", Sampled(),
          "Longest time for which one of the requests in sidestep_kv_held_requests has been held.",
          feature="kv_transfer", combine="max"),
    # Engine steps.
    *shared_rows.step_limits(Handler("step_limit_seconds"), Handler("steps_by_limit"),
                             unit_divisor=MICROS, feature=ENGINE_CORE),
    _histogram("sidestep_iteration_interval_seconds", "steps[].interval",
               "Time from the output of one iteration to the output of the next, including idle"
               " time.", buckets="iteration_duration"),
    _histogram("sidestep_iteration_prefill_requests", "steps[].prefill_requests",
               "Requests of an iteration in prefill; after a preemption, a request is in prefill"
               " again.", buckets="iteration_requests"),
    _histogram("sidestep_iteration_prefill_tokens", "steps[].prefill_tokens",
               "Tokens scheduled in an iteration for requests in prefill.",
               buckets="iteration_tokens"),
    _histogram("sidestep_iteration_decode_requests", "steps[].decode_requests",
               "Requests of an iteration in decode.", buckets="iteration_requests"),
    _histogram("sidestep_iteration_decode_tokens", "steps[].decode_tokens",
               "Tokens scheduled in an iteration for requests in decode, including draft tokens.",
               buckets="iteration_tokens"),
    _histogram("sidestep_iteration_kv_tokens", "steps[].kv_tokens",
               "Tokens whose KV was computed before an iteration for its requests, and which"
               " attention reads.", buckets="held_tokens"),
    _histogram("sidestep_iteration_waiting_tokens", "steps[].waiting_tokens",
               "Tokens of the requests that waited during an iteration.", buckets="held_tokens"),
    # KV blocks: values that the engine's own three families do not have.
    _histogram("sidestep_kv_block_reuse_gap_seconds", Handler("kv_block_gaps"),
               "Time between consecutive prefix hits on a sampled KV block; all hits count.",
               buckets="kv_cache_residency"),
    _histogram("sidestep_kv_block_reuses", Handler("kv_block_reuses"),
               "Prefix hits on a sampled KV block from its allocation until its eviction.",
               buckets="reuses"),
    _histogram("sidestep_kv_block_reset_age_seconds", Handler("kv_block_reset_ages"),
               "Age of a sampled KV block when the prefix cache was reset.",
               buckets="kv_cache_residency"),
    _histogram("sidestep_kv_block_reset_idle_seconds", Handler("kv_block_reset_idles"),
               "Time since a sampled KV block's last prefix hit when the prefix cache was reset.",
               buckets="kv_cache_residency"),
    _counter("sidestep_kv_cache_resets_total", Handler("kv_cache_resets"),
             "Resets of the prefix cache."),
    _gauge("sidestep_kv_sample_ratio", Computed("kv_sample_ratio"),
           "Share of KV blocks that is sampled, by the engine itself or by the tap.",
           combine="mean", feature=""),
    _gauge("sidestep_kv_tracked_blocks", Computed("kv_tracked_blocks"),
           "Sampled KV blocks that are tracked now.", feature=""),
    _counter("sidestep_kv_refused_blocks_total", Handler("kv_refused_blocks"),
             "Sampled KV blocks that were not tracked because --kv.max-tracked was reached:"
             " histograms of KV blocks are biased while this grows; lower --kv.sample-rate."),
    _counter("sidestep_kv_abandoned_blocks_total", Handler("kv_abandoned_blocks"),
             "Tracked KV blocks whose eviction was never reported; their lifetimes are in no"
             " histogram."),
    _counter("sidestep_kv_unknown_events_total", Handler("kv_unknown_events"),
             "Events of KV blocks whose allocation was not seen, or out of order."),
    # The engine's processes: prometheus_client exposes none in multiprocess mode.
    _PROCESS.counter("cpu_seconds_total",
                     "CPU time of a process of the engine.", "process"),
    _PROCESS.gauge("resident_memory_bytes",
                   "Resident memory of a process of the engine.", "process"),
    _PROCESS.gauge("virtual_memory_bytes",
                   "Virtual memory of a process of the engine.", "process"),
    _PROCESS.gauge("open_fds",
                   "Open file descriptors of a process of the engine.", "process"),
    _PROCESS.gauge("max_fds",
                   "File descriptors that a process of the engine may open.", "process"),
    _PROCESS.gauge("threads",
                   "Threads of a process of the engine.", "process"),
    _PROCESS.gauge("start_time_seconds",
                   "Unix time when a process of the engine started.", "process", combine="max"),
    _PROCESS.counter("gc_collections_total",
                     "Runs of Python's cyclic garbage collector in a process of the engine.",
                     "process", "generation"),
    _PROCESS.counter("gc_collected_total",
                     "Objects that Python's cyclic garbage collector found and freed.", "process",
                     "generation"),
    _PROCESS.counter("gc_uncollectable_total",
                     "Objects that Python's cyclic garbage collector found and could not free.",
                     "process", "generation"),
    _PROCESS.gauge("builds_statistics",
                   "1 if vLLM builds its statistics on the event loop of this API server, although"
                   " the plugin replaces its metrics, and why; 0 if sidestep makes them in a thread.",
                   "process", "reason"),
    _PROCESS.gauge("python_info",
                   "Python interpreter of a process of the engine, as labels; always 1.",
                   "implementation", "major", "minor", "patchlevel", "process", "version",
                   combine="max"),
)
# fmt: on

ROWS: tuple[Row, ...] = (*_COLLECTED, *TAPPED)
