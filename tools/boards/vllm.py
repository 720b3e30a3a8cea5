"""The vLLM dashboard: one engine, or some of them."""

from __future__ import annotations

from tools.boards import reasons, speculation
from tools.boards.dashboard import TARGET, Dashboard, Row, Variable
from tools.boards.engine_health import engine_events, engine_health
from tools.boards.gpu import gpus
from tools.boards.panels import DrillDown, Panel, Query
from tools.boards.queries import (
    ENGINE,
    ENGINE_NAME,
    PLACE,
    PLACE_COLUMNS,
    Histogram,
    Scope,
    most,
    rate,
    total,
)
from tools.boards.shapes import SATURATED, TOKENS, heat, lines, quantiles, tile

of = Scope("model_name", "engine")
front = Scope("model_name")
"""The front end's series have no engine."""
CORES = r"~(\\w|\\.|-)+"
"""Pattern of vLLM's engines, which have numbers or names; others have identities, with slashes."""


def histogram(name: str, **matched: str) -> Histogram:
    """Return queries of a histogram of this dashboard's engines."""
    return Histogram(of, name, **matched)


TTFT = histogram("vllm:time_to_first_token_seconds")
INTER = histogram("vllm:inter_token_latency_seconds")
PER_TOKEN = histogram("vllm:request_time_per_output_token_seconds")
WHOLE = histogram("vllm:e2e_request_latency_seconds")
STAGES = {
    "queue": histogram("vllm:request_queue_time_seconds"),
    "prefill": histogram("vllm:request_prefill_time_seconds"),
    "decode": histogram("vllm:request_decode_time_seconds"),
    "inference": histogram("vllm:request_inference_time_seconds"),
}

TILES = (
    tile("Running", "Requests in the batch.", reasons.VLLM, total(of("vllm:num_requests_running"))),
    tile("Waiting", "Requests in the queue.", reasons.VLLM, total(of("vllm:num_requests_waiting"))),
    tile(
        "KV cache usage, max",
        "Share of the KV cache in use, of the fullest engine.",
        reasons.VLLM,
        most(of("vllm:kv_cache_usage_perc")),
        unit="percentunit",
        most=1,
        limits=(0.8, 0.95),
    ),
    tile(
        "Generation throughput",
        "Tokens generated per second.",
        reasons.VLLM,
        rate(of("vllm:generation_tokens_total")),
        unit=TOKENS,
    ),
    tile(
        "Prompt throughput",
        "Prompt tokens per second, cached ones included.",
        reasons.VLLM,
        rate(of("vllm:prompt_tokens_total")),
        unit=TOKENS,
    ),
    tile(
        "TTFT, p95",
        "95th percentile of the time from a request's arrival to its first token.",
        reasons.NO_VLLM_TRAFFIC,
        TTFT.quantile(0.95),
        unit="s",
    ),
    tile(
        "ITL, p95",
        "95th percentile of the time between two outputs of a request.",
        reasons.NO_VLLM_TRAFFIC,
        INTER.quantile(0.95),
        unit="s",
    ),
    tile(
        "E2E latency, p95",
        "95th percentile of the time from a request's arrival to its end.",
        reasons.NO_VLLM_TRAFFIC,
        WHOLE.quantile(0.95),
        unit="s",
    ),
)

LOAD = (
    lines(
        "Requests",
        "Requests in the batch, and those that wait.",
        reasons.VLLM,
        Query(total(of("vllm:num_requests_running"), ENGINE), f"running {ENGINE_NAME}"),
        Query(total(of("vllm:num_requests_waiting"), ENGINE), f"waiting {ENGINE_NAME}"),
    ),
    lines(
        "Waiting by reason",
        (
            "Waiting requests by reason: the batch is full, or a temporary reason such as an "
            "adapter being loaded or KV in transfer."
        ),
        reasons.VLLM,
        Query(total(of("vllm:num_requests_waiting_by_reason"), "reason"), "{{reason}}"),
        stacked=True,
    ),
    lines(
        "Token throughput",
        "Prompt tokens and generated tokens per second.",
        reasons.VLLM,
        Query(rate(of("vllm:prompt_tokens_total"), ENGINE), f"prompt {ENGINE_NAME}"),
        Query(rate(of("vllm:generation_tokens_total"), ENGINE), f"generated {ENGINE_NAME}"),
        unit=TOKENS,
    ),
    lines(
        "Finish reasons",
        "Finished requests per second, by finish reason.",
        reasons.VLLM,
        Query(rate(of("vllm:request_success_total"), "finished_reason"), "{{finished_reason}}"),
        unit="reqps",
        stacked=True,
    ),
    lines(
        "Prompt tokens by source",
        "Prompt tokens per second, by the source of their KV.",
        reasons.VLLM,
        Query(rate(of("vllm:prompt_tokens_by_source_total"), "source"), "{{source}}"),
        unit=TOKENS,
        stacked=True,
    ),
    lines(
        "Rejected requests",
        (
            "Requests per second that were rejected by the front end because queues are full, or "
            "by the core."
        ),
        reasons.VLLM,
        Query(rate(front("vllm:admission_rejections_total"), "reason"), "front end {{reason}}"),
        Query(rate(of("sidestep_refused_requests_total"), "reason"), "core {{reason}}"),
        unit="reqps",
    ),
    lines(
        "Saturation",
        (
            "Offered load divided by the load that an engine can serve. At 1 and above, its "
            "queue grows."
        ),
        reasons.NO_SATURATION,
        Query(most(of("sidestep_saturation_ratio", engine_type=""), ENGINE), ENGINE_NAME),
        unit="percentunit",
        limits=SATURATED,
        width=24,
    ),
)

LATENCY = (
    quantiles(
        "TTFT",
        "From a request's arrival to its first token.",
        reasons.NO_VLLM_TRAFFIC,
        TTFT,
    ),
    quantiles("ITL", "Between two outputs of a request.", reasons.NO_VLLM_TRAFFIC, INTER),
    quantiles(
        "Time per output token",
        "Mean time per token after the first, one value per request.",
        reasons.NO_VLLM_TRAFFIC,
        PER_TOKEN,
    ),
    quantiles(
        "E2E latency", "From a request's arrival to its end.", reasons.NO_VLLM_TRAFFIC, WHOLE
    ),
    quantiles(
        "Queue time",
        "From entry into the queue until first scheduled.",
        reasons.NO_VLLM_TRAFFIC,
        STAGES["queue"],
    ),
    lines(
        "Time by stage, mean",
        "Mean seconds that finished requests spent in each stage; inference is prefill and decode together.",
        reasons.NO_VLLM_TRAFFIC,
        *(Query(stage.mean(), name) for name, stage in STAGES.items()),
        unit="s",
    ),
    heat(
        "TTFT distribution",
        "Distribution of the time from a request's arrival to its first token.",
        reasons.NO_VLLM_TRAFFIC,
        TTFT,
    ),
    heat(
        "ITL distribution",
        "Distribution of the time between two outputs of a request.",
        reasons.NO_VLLM_TRAFFIC,
        INTER,
    ),
    heat(
        "E2E latency distribution",
        "Distribution of the time from a request's arrival to its end.",
        reasons.NO_VLLM_TRAFFIC,
        WHOLE,
    ),
)

LENGTHS = (
    heat(
        "Prompt lengths",
        "Prompt tokens of finished requests.",
        reasons.NO_VLLM_TRAFFIC,
        histogram("vllm:request_prompt_tokens"),
        "short",
        width=6,
    ),
    heat(
        "Generation lengths",
        "Generated tokens of finished requests.",
        reasons.NO_VLLM_TRAFFIC,
        histogram("vllm:request_generation_tokens"),
        "short",
        width=6,
    ),
    quantiles(
        "Longest generation of a request",
        "Generated tokens of the longest among a request's parallel samples.",
        reasons.NO_VLLM_TRAFFIC,
        histogram("vllm:request_max_num_generation_tokens"),
        "short",
        width=6,
    ),
    quantiles(
        "Computed prompt lengths",
        "Prompt tokens of finished requests that were not found in a cache.",
        reasons.NO_VLLM_TRAFFIC,
        histogram("vllm:request_prefill_kv_computed_tokens"),
        "short",
        width=6,
    ),
    quantiles(
        "Requested output limits",
        "Limit on generated tokens that requests set.",
        reasons.NO_VLLM_TRAFFIC,
        histogram("vllm:request_params_max_tokens"),
        "short",
    ),
    lines(
        "Samples and preemptions per request, mean",
        "Parallel samples per request, and preemptions per finished request.",
        reasons.NO_VLLM_TRAFFIC,
        Query(histogram("vllm:request_params_n").mean(), "samples"),
        Query(histogram("vllm:request_num_preemptions").mean(), "preemptions"),
    ),
    lines(
        "Preemptions",
        "Requests per second that were preempted because the KV cache was full.",
        reasons.VLLM,
        Query(rate(of("vllm:num_preemptions_total"), ENGINE), ENGINE_NAME),
        unit="reqps",
    ),
)

STEPS = (
    heat(
        "Tokens per step",
        "Tokens that steps computed.",
        reasons.NO_VLLM_TRAFFIC,
        histogram("vllm:iteration_tokens_total"),
        "short",
    ),
    quantiles(
        "Step duration",
        "Duration of a step, as the engine reports it.",
        reasons.ITERATIONS,
        histogram("sidestep_iteration_duration_seconds"),
    ),
    quantiles(
        "Time between steps",
        "From the output of one step to the output of the next, while there is work.",
        reasons.TAP,
        histogram("sidestep_iteration_interval_seconds"),
    ),
    lines(
        "Batch size, mean",
        "Requests of a step in prefill and in decode.",
        reasons.TAP,
        Query(histogram("sidestep_iteration_prefill_requests").mean(), "prefill"),
        Query(histogram("sidestep_iteration_decode_requests").mean(), "decode"),
    ),
    lines(
        "Tokens per step, mean",
        "Tokens that a step computes in prefill and in decode.",
        reasons.TAP,
        Query(histogram("sidestep_iteration_prefill_tokens").mean(), "prefill"),
        Query(histogram("sidestep_iteration_decode_tokens").mean(), "decode"),
    ),
    lines(
        "Tokens in the KV cache and waiting, mean",
        "Tokens in the KV cache of the requests of a step, and tokens of waiting requests.",
        reasons.TAP,
        Query(histogram("sidestep_iteration_kv_tokens").mean(), "in the KV cache"),
        Query(histogram("sidestep_iteration_waiting_tokens").mean(), "waiting"),
    ),
)

ABORTED = histogram("sidestep_aborted_request_generation_tokens")
ABORTS = (
    lines(
        "Requests by state",
        "Requests by state in the core.",
        reasons.TAP,
        Query(total(of("sidestep_requests"), "state"), "{{state}}"),
        stacked=True,
        width=6,
    ),
    lines(
        "Aborted requests",
        "Requests per second whose client disconnected.",
        reasons.REQUEST_EVENTS,
        Query(ABORTED.observed(), "aborted requests"),
        unit="reqps",
        width=6,
    ),
    lines(
        "Tokens of aborted requests",
        "Tokens per second that had been generated for requests that were aborted.",
        reasons.REQUEST_EVENTS,
        Query(ABORTED.added(), "generated tokens"),
        unit=TOKENS,
        width=6,
    ),
    quantiles(
        "Time spent preempted",
        "From a preemption until scheduled again.",
        reasons.REQUEST_EVENTS,
        histogram("sidestep_request_preempted_seconds"),
        width=6,
    ),
)

PROCESS = (
    lines(
        "Estimated FLOPS per GPU",
        "Floating-point operations per second, estimated from the model's shape.",
        reasons.VLLM,
        Query(rate(of("vllm:estimated_flops_per_gpu_total"), ENGINE), ENGINE_NAME),
        unit="flops",
        width=6,
    ),
    lines(
        "Estimated memory bandwidth per GPU",
        "Bytes read and written per second, estimated from the model's shape.",
        reasons.VLLM,
        Query(rate(of("vllm:estimated_read_bytes_per_gpu_total"), ENGINE), f"read {ENGINE_NAME}"),
        Query(
            rate(of("vllm:estimated_write_bytes_per_gpu_total"), ENGINE), f"written {ENGINE_NAME}"
        ),
        unit="Bps",
        width=6,
    ),
    lines(
        "CPU of the engine's processes",
        "Cores that front ends and the core use.",
        reasons.VLLM,
        Query(rate(of("sidestep_engine_process_cpu_seconds_total"), "process"), "{{process}}"),
        width=6,
    ),
    lines(
        "Sleep state",
        "1 for the current state of an engine.",
        reasons.VLLM,
        Query(most(of("vllm:engine_sleep_state"), "sleep_state"), "{{sleep_state}}"),
        width=6,
    ),
    Panel(
        title="Configuration",
        says="KV-cache configuration of each engine.",
        empty=reasons.VLLM,
        kind="table",
        width=24,
        height=6,
        queries=[
            Query(
                most(
                    Scope("engine")("vllm:cache_config_info"),
                    (
                        *PLACE,
                        "engine",
                        "block_size",
                        "num_gpu_blocks",
                        "cache_dtype",
                        "enable_prefix_caching",
                        "gpu_memory_utilization",
                    ),
                )
            )
        ],
        columns={
            **PLACE_COLUMNS,
            "engine": "Engine",
            "block_size": "Block size",
            "num_gpu_blocks": "Blocks",
            "cache_dtype": "Type",
            "enable_prefix_caching": "Prefix caching",
            "gpu_memory_utilization": "GPU memory",
        },
    ),
)

BOARD = Dashboard(
    file="vllm",
    title="vLLM engine",
    says="One vLLM engine, or some of them: load, latency, lengths, steps.",
    tags=["llm", "vllm"],
    variables=[
        *TARGET,
        Variable("model_name", "Model", Scope()("vllm:num_requests_running")),
        Variable(
            "engine",
            "Engine",
            front("vllm:num_requests_running"),
        ),
    ],
    rows=[
        Row("Now", TILES),
        engine_health(of, [DrillDown("Request latency", "latency", ["model_name"])], engine=CORES),
        Row("Load", LOAD),
        Row("Latency", LATENCY),
        Row("Lengths", LENGTHS, collapsed=True),
        Row("Steps", STEPS, collapsed=True),
        Row("Request states", ABORTS, collapsed=True),
        *speculation.OF_VLLM,
        gpus(of),
        Row("Work and processes", PROCESS, collapsed=True),
    ],
    annotations=engine_events(of, engine=CORES),
    next={"why": "Why is it slow", "latency": "Request latency", "kv-cache": "KV cache"},
)
