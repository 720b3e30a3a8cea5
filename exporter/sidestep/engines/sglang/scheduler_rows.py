"""Rows of SGLang's other families of a scheduler (0.5.23): counters, histograms and constants.

They are sent self-described and stand in the order of the engine's page. ``closed`` are the label
values that the engine itself starts at 0.
"""

from __future__ import annotations

from sidestep.catalog.row import Row
from sidestep.engines.sglang.collectors import SCHEDULER as _S

_E = _S.of_rank
PREFILL_MODES = ("input", "device_hit", "host_hit", "storage_hit")
BALANCE_KINDS = ("scheduled", "imbalance")
RANK_STATES = ("active", "idle")

_QUEUE_SECONDS = (
    0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0,
    900.0, 1000.0, 1200.0, 1400.0, 1600.0, 1800.0, 2000.0, 2500.0, 3000.0,
)  # fmt: skip
_STAGE_SECONDS = tuple(0.001 * 1.62**power for power in range(30))
_RELEASE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)
_TRANSFER_MILLISECONDS = (
    1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0,
)  # fmt: skip
_SETUP_MILLISECONDS = _TRANSFER_MILLISECONDS[:-1]
_TRANSFER_GIGABYTES_PER_SECOND = (0.1, 0.5, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
_TRANSFER_MEGABYTES = (1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0, 5000.0, 10000.0)
_COMPILE_SECONDS = (
    0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 90.0, 120.0,
    240.0,
)  # fmt: skip
_TRAVERSAL_SECONDS = (
    0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 90.0, 120.0,
    240.0,
)  # fmt: skip
_SCHEMAS = (
    0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 40.0, 60.0, 80.0, 100.0, 120.0, 140.0, 160.0, 180.0,
    200.0, 300.0, 400.0, 500.0, 700.0, 1000.0,
)  # fmt: skip
_EBNF_SIZES = (
    0.0, 50.0, 100.0, 200.0, 300.0, 500.0, 1000.0, 2000.0, 3000.0, 5000.0, 10000.0, 20000.0,
    30000.0, 50000.0, 100000.0,
)  # fmt: skip
_IMBALANCE = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0)
_SYNC_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip

# The tables are laid out by hand: name above text, two lines a row.
# fmt: off
_WORK = (
    _S.gauge("weight_load_duration_seconds",
             "Duration of the last update of the weights, by their source.", "source",
             combine="max"),
    _S.counter("num_retracted_requests_total",
               "Requests retracted to the queue because memory was short."),
    _S.counter("num_retracted_input_tokens_total", "Prompt tokens of retracted requests."),
    _S.counter("num_retracted_output_tokens_total",
               "Tokens that retracted requests had generated before."),
)
_DISAGGREGATION = (
    _S.counter("num_decode_host_receive_reqs_total",
               "Requests of a decode node whose KV was received into the host's memory."),
    _S.histogram("decode_deferred_kv_release_seconds",
                 "Time that the KV slots of a failed request stayed allocated until its transfer"
                 " ended.",
                 _RELEASE_SECONDS),
    _S.counter("decode_deferred_kv_release_total",
               "Failed requests whose KV slots stayed allocated until their transfer ended, by"
               " outcome.", "outcome"),
    _S.histogram("kv_transfer_speed_gb_s",
                 "Speed of a request's KV transfer, in gigabytes per second.",
                 _TRANSFER_GIGABYTES_PER_SECOND),
    _S.histogram("kv_transfer_latency_ms",
                 "Duration of a request's KV transfer, in milliseconds.",
                 _TRANSFER_MILLISECONDS),
    _S.counter("num_bootstrap_failed_reqs_total",
               "Requests whose handshake between prefill and decode node failed."),
    _S.counter("num_transfer_failed_reqs_total", "Requests whose KV transfer failed."),
    _S.counter("num_prefill_retries_total", "Times a prefill was retried."),
    _S.histogram("kv_transfer_bootstrap_ms",
                 "Duration of the handshake between a request's nodes, in milliseconds.",
                 _SETUP_MILLISECONDS),
    _S.histogram("kv_transfer_alloc_ms",
                 "Time that a request waited for memory for its KV, in milliseconds.",
                 _SETUP_MILLISECONDS),
    _E.histogram("kv_transfer_total_mb", "Size of a request's KV transfer, in megabytes.",
                 _TRANSFER_MEGABYTES),
)
_REQUESTS = (
    _S.counter("cuda_graph_passes_total",
               "Forward passes by phase and by whether they ran as a CUDA graph.", "mode"),
    _S.histogram("queue_time_seconds",
                 "Time from a request's entry into the queue to its first forward pass.",
                 _QUEUE_SECONDS),
    _S.histogram("per_stage_req_latency_seconds",
                 "Time that a request spent in a stage.", _STAGE_SECONDS, "stage"),
)
_GRAMMAR = (
    _S.histogram("grammar_compilation_time_seconds", "Time to compile a grammar.",
                 _COMPILE_SECONDS),
    _S.counter("num_grammar_cache_hit_total", "Grammars found in the cache of compiled grammars."),
    _S.counter("num_grammar_aborted_total", "Requests aborted because of their grammar."),
    _S.counter("num_grammar_timeout_total", "Grammars whose compilation timed out."),
    _S.counter("num_grammar_total", "Requests with a grammar."),
    _S.histogram("grammar_schema_count", "Schemas of a grammar.", _SCHEMAS),
    _S.histogram("grammar_ebnf_size", "Size of a grammar's EBNF.", _EBNF_SIZES),
    _S.histogram("grammar_tree_traversal_time_avg",
                 "Mean time of a traversal of a grammar's tree, in seconds.", _TRAVERSAL_SECONDS),
    _S.histogram("grammar_tree_traversal_time_max",
                 "Longest time of a traversal of a grammar's tree, in seconds.",
                 _TRAVERSAL_SECONDS),
)
_EXECUTION = (
    _S.summary("eplb_balancedness",
               "Balance of the ranks' experts in a forward pass: mean load divided by the highest,"
               " from 0 to 1.",
               "forward_mode"),
    _S.counter("realtime_tokens_total",
               "Tokens as they are processed: prompt tokens computed or found in a cache, and"
               " generated tokens.", "mode"),
    _S.counter("prefill_effective_tokens_total",
               "Prompt tokens by source of their KV; those of retracted requests count once.",
               "mode", closed=PREFILL_MODES),
    _E.counter("forward_execution_seconds_total",
               "Time in which the GPU computed forward passes, by kind; requires the engine's"
               " device timer.", "category"),
    _E.counter("scheduler_idle_seconds_total", "Time in which the scheduler was idle."),
    _E.counter("scheduler_process_cpu_seconds_total", "CPU time of the scheduler's process."),
    _E.counter("scheduler_stage_seconds_total",
               "Time of the scheduler's loop by stage, and by whether a forward pass was running"
               " at both ends of the interval, at one, or at neither.",
               "category", "forward_overlap"),
    _E.counter("estimated_flops_per_gpu_total",
               "Floating point operations of one GPU, estimated from the model's shape."),
    _E.counter("estimated_read_bytes_per_gpu_total",
               "Bytes one GPU read from its memory, estimated from the model's shape."),
    _E.counter("estimated_write_bytes_per_gpu_total",
               "Bytes one GPU wrote to its memory, estimated from the model's shape."),
)
_DATA_PARALLEL = (
    _S.counter("dp_cooperation_realtime_tokens_total",
               "Tokens as they are processed, by the number of data-parallel ranks in prefill.",
               "mode", "num_prefill_ranks"),
    _E.counter("dp_cooperation_forward_execution_seconds_total",
               "Time in which the GPU computed forward passes, by the number of data-parallel"
               " ranks in prefill.", "category", "num_prefill_ranks"),
    _S.counter("dp_attention_tokens_total",
               "Tokens of the rank's synchronized steps (scheduled), and by how many the busiest"
               " rank had more (imbalance); a speculative step counts requests.",
               "kind", closed=BALANCE_KINDS),
    _S.counter("dp_attention_steps_total",
               "Steps synchronized with other ranks, by whether this rank had tokens.",
               "rank_state", closed=RANK_STATES),
    _S.counter("dp_attention_pairs_total",
               "Pairs of tokens that attention compared in the rank's synchronized steps"
               " (scheduled), and by how many the busiest rank had more (imbalance); every layer"
               " counts as full attention.",
               "kind", closed=BALANCE_KINDS),
    _S.histogram("dp_attention_token_imbalance_ratio",
                 "Highest number of tokens of a rank in a step divided by the ranks' mean; only"
                 " rank 0 reports it.",
                 _IMBALANCE),
    _S.histogram("dp_attention_sync_wait_seconds",
                 "Time that the rank's scheduler waited for the others in a step.",
                 _SYNC_SECONDS),
)
_PREFILL_DELAYER = (
    _S.histogram("prefill_delayer_wait_forward_passes",
                 "Forward passes by which a prefill was delayed.",
                 "sglang_prefill_delayer_passes"),
    _S.histogram("prefill_delayer_wait_seconds", "Time by which a prefill was delayed.",
                 "sglang_prefill_delayer_seconds"),
    _S.counter("prefill_delayer_outcomes_total",
               "Decisions to delay a prefill or not, by input and outcome.",
               "input_estimation", "output_allow", "output_reason", "actual_execution"),
)
_CONSTANTS = (
    _S.gauge("max_total_num_tokens", "Token slots of the full-attention KV pool."),
    _S.gauge("max_total_num_tokens_swa", "Token slots of the sliding-window KV pool."),
    _E.gauge("weight_memory_usage_gb", "Memory of the weights, in gigabytes."),
    _E.gauge("kv_cache_memory_usage_gb", "Memory of the KV pools, in gigabytes."),
    _E.gauge("graph_memory_usage_gb", "Memory of captured CUDA graphs by phase, in gigabytes.",
             "phase"),
    _S.gauge("page_size", "Tokens per page of the KV cache.", combine="max"),
    _S.gauge("num_pages", "Pages of the KV cache."),
    _S.gauge("context_len", "Longest context of a request, in tokens.", combine="max"),
    _E.gauge("startup_available_gpu_memory_gb",
             "Free GPU memory after the scheduler's start, in gigabytes."),
)
# fmt: on

ROWS: tuple[Row, ...] = (
    *_WORK,
    *_DISAGGREGATION,
    *_REQUESTS,
    *_GRAMMAR,
    *_EXECUTION,
    *_DATA_PARALLEL,
    *_PREFILL_DELAYER,
    *_CONSTANTS,
)
