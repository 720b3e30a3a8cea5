"""The SGLang dashboard: one server, or some of them."""

from __future__ import annotations

from tools.boards import reasons, speculation
from tools.boards.dashboard import TARGET, Dashboard, Row, Variable
from tools.boards.engine_health import engine_events, engine_health
from tools.boards.gpu import gpus
from tools.boards.panels import DrillDown, Query
from tools.boards.queries import (
    PLACE_NAME,
    RANK,
    RANK_NAME,
    Histogram,
    Scope,
    most,
    once,
    once_mean_rate,
    once_rate,
    rate,
    ratio,
    total,
)
from tools.boards.shapes import SATURATED, TOKENS, heat, lines, quantiles, tile

of = Scope("model_name")
cache = Scope()
"""Scope of the radix cache's and the HTTP server's series, which have no ``model_name``."""
PROCESSES = "~.+/sglang/(scheduler|tokenizer)/.+"
"""Pattern of SGLang's processes, each of which is an engine here."""


def histogram(name: str, **matched: str) -> Histogram:
    """Return queries of a histogram of this dashboard's servers."""
    return Histogram(of, name, **matched)


TTFT = histogram("sglang:time_to_first_token_seconds")
INTER = histogram("sglang:inter_token_latency_seconds")
PER_TOKEN = histogram("sglang:request_time_per_output_token_seconds")
WHOLE = histogram("sglang:e2e_request_latency_seconds")
RUNNING = once(of("sglang:num_running_reqs", priority=""), RANK)
QUEUED = once(of("sglang:num_queue_reqs", priority=""), RANK)

TILES = (
    tile(
        "Running",
        "Requests in batches.",
        reasons.SGLANG,
        once(of("sglang:num_running_reqs", priority="")),
    ),
    tile(
        "Waiting",
        "Requests in queues.",
        reasons.SGLANG,
        once(of("sglang:num_queue_reqs", priority="")),
    ),
    tile(
        "KV cache usage, max",
        "Share of KV slots in use, of the fullest rank.",
        reasons.SGLANG,
        most(of("sglang:token_usage")),
        unit="percentunit",
        most=1,
        limits=(0.9, 0.98),
    ),
    tile(
        "Generation throughput",
        "Tokens generated per second, as they are generated.",
        reasons.SGLANG,
        once_rate(of("sglang:realtime_tokens_total", mode="decode")),
        unit=TOKENS,
    ),
    tile(
        "Prompt throughput",
        "Prompt tokens per second, computed or found in a cache.",
        reasons.SGLANG,
        once_rate(of("sglang:realtime_tokens_total", mode="~prefill_.*")),
        unit=TOKENS,
    ),
    tile(
        "TTFT, p95",
        "95th percentile of the time from a request's arrival to its first token.",
        reasons.NO_SGLANG_TRAFFIC,
        TTFT.quantile(0.95),
        unit="s",
    ),
    tile(
        "ITL, p95",
        "95th percentile of the time between two outputs of a request.",
        reasons.NO_SGLANG_TRAFFIC,
        INTER.quantile(0.95),
        unit="s",
    ),
    tile(
        "E2E latency, p95",
        "95th percentile of the time from a request's arrival to its end.",
        reasons.NO_SGLANG_TRAFFIC,
        WHOLE.quantile(0.95),
        unit="s",
    ),
)

LOAD = (
    lines(
        "Requests",
        "Requests in batches and in queues, by data-parallel rank.",
        reasons.SGLANG,
        Query(RUNNING, f"running {RANK_NAME}"),
        Query(QUEUED, f"waiting {RANK_NAME}"),
    ),
    lines(
        "Token throughput",
        (
            "Tokens per second: prompt tokens computed, prompt tokens found in a cache, and "
            "generated tokens."
        ),
        reasons.SGLANG,
        Query(once_rate(of("sglang:realtime_tokens_total"), "mode"), "{{mode}}"),
        unit=TOKENS,
    ),
    lines(
        "Generation throughput",
        "Tokens generated per second between SGLang's last two reports, by data-parallel rank.",
        reasons.SGLANG,
        Query(once(of("sglang:gen_throughput"), RANK), RANK_NAME),
        unit=TOKENS,
    ),
    lines(
        "Finished, aborted and retracted requests",
        "Requests per second that finished, were aborted, or were retracted.",
        reasons.SGLANG,
        Query(rate(of("sglang:num_requests_total")), "finished"),
        Query(rate(of("sglang:num_aborted_requests_total")), "aborted"),
        Query(once_rate(of("sglang:num_retracted_requests_total")), "retracted"),
        unit="reqps",
    ),
    lines(
        "Saturation of schedulers",
        (
            "Offered load divided by the load that a scheduler can serve. At 1 and above, its "
            "queue grows."
        ),
        reasons.NO_SATURATION,
        Query(most(of("sidestep_saturation_ratio", engine_type="~.+"), RANK), RANK_NAME),
        unit="percentunit",
        limits=SATURATED,
        width=24,
    ),
)

LATENCY = (
    quantiles(
        "TTFT",
        "From a request's arrival to its first token.",
        reasons.NO_SGLANG_TRAFFIC,
        TTFT,
    ),
    quantiles("ITL", "Between two outputs of a request.", reasons.NO_SGLANG_TRAFFIC, INTER),
    quantiles(
        "Time per output token",
        "Mean time per token after the first, one value per request.",
        reasons.NO_SGLANG_TRAFFIC,
        PER_TOKEN,
    ),
    quantiles(
        "E2E latency",
        "From a request's arrival to its end, aborted ones included.",
        reasons.NO_SGLANG_TRAFFIC,
        WHOLE,
    ),
    quantiles(
        "Queue time",
        "From entry into the queue to the first forward pass.",
        reasons.NO_SGLANG_TRAFFIC,
        histogram("sglang:queue_time_seconds"),
    ),
    lines(
        "Time by stage, mean",
        "Time that requests spent in each stage.",
        reasons.NO_SGLANG_TRAFFIC,
        Query(histogram("sglang:per_stage_req_latency_seconds").mean("stage"), "{{stage}}"),
        unit="s",
    ),
    heat(
        "TTFT distribution",
        "Distribution of the time from a request's arrival to its first token.",
        reasons.NO_SGLANG_TRAFFIC,
        TTFT,
    ),
    heat(
        "ITL distribution",
        "Distribution of the time between two outputs of a request.",
        reasons.NO_SGLANG_TRAFFIC,
        INTER,
    ),
    heat(
        "E2E latency distribution",
        "Distribution of the time from a request's arrival to its end.",
        reasons.NO_SGLANG_TRAFFIC,
        WHOLE,
    ),
)

LENGTHS = (
    heat(
        "Prompt lengths",
        "Prompt tokens of requests; only if SGLang collects token histograms.",
        "SGLang collects lengths with --collect-tokens-histogram.",
        histogram("sglang:prompt_tokens_histogram"),
        "short",
    ),
    heat(
        "Computed prompt lengths",
        "Prompt tokens of requests that were not found in a cache.",
        "SGLang collects lengths with --collect-tokens-histogram.",
        histogram("sglang:uncached_prompt_tokens_histogram"),
        "short",
    ),
    heat(
        "Generation lengths",
        "Generated tokens of requests.",
        "SGLang collects lengths with --collect-tokens-histogram.",
        histogram("sglang:generation_tokens_histogram"),
        "short",
    ),
)

MEMORY = (
    lines(
        "KV slots",
        "Token slots in use, cached, and free.",
        reasons.SGLANG,
        Query(once(of("sglang:kv_used_tokens")), "used"),
        Query(once(of("sglang:kv_evictable_tokens")), "evictable"),
        Query(once(of("sglang:kv_available_tokens")), "free"),
        stacked=True,
        width=6,
    ),
    lines(
        "Prompt tokens by source",
        "Prompt tokens per second, by the source of their KV.",
        reasons.SGLANG,
        Query(once_rate(of("sglang:prefill_effective_tokens_total"), "mode"), "{{mode}}"),
        unit=TOKENS,
        stacked=True,
        width=6,
    ),
    lines(
        "Prefix-cache hit rate",
        (
            "Share of prompt tokens that were found in a cache: measured, and of the latest prefill batch as"
            " SGLang reports it."
        ),
        reasons.NO_SGLANG_TRAFFIC,
        Query(
            ratio(
                once_rate(of("sglang:prefill_effective_tokens_total", mode="~.*_hit")),
                once_rate(of("sglang:prefill_effective_tokens_total")),
            ),
            "measured",
        ),
        Query(most(of("sglang:cache_hit_rate"), RANK), f"latest batch {RANK_NAME}"),
        unit="percentunit",
        most=1,
        width=6,
    ),
    lines(
        "Evicted tokens",
        "Token slots freed by eviction per second, by whether they were copied to host memory.",
        reasons.SGLANG,
        Query(
            rate(
                cache("sglang:evicted_tokens_total", tp_rank="0", pp_rank="0"),
                RANK,
            ),
            f"{PLACE_NAME} {{{{dp_rank}}}} {{{{origin}}}}",
        ),
        unit=TOKENS,
        width=6,
    ),
    lines(
        "New-token ratio",
        (
            "Share of a request's output limit that SGLang reserves when it admits the request. "
            "It decreases until requests are retracted."
        ),
        reasons.SGLANG,
        Query(most(of("sglang:new_token_ratio"), RANK), RANK_NAME),
        unit="percentunit",
        most=1,
        width=6,
    ),
)

SCHEDULER = (
    lines(
        "Scheduler time by activity",
        "Share of the scheduler loop's time by activity, mean of all schedulers.",
        reasons.SGLANG,
        Query(
            once_mean_rate(of("sglang:scheduler_stage_seconds_total"), "category"), "{{category}}"
        ),
        unit="percentunit",
        stacked=True,
    ),
    lines(
        "Forward passes",
        "Per second, by phase and by whether they ran as a CUDA graph.",
        reasons.SGLANG,
        Query(once_rate(of("sglang:cuda_graph_passes_total"), "mode"), "{{mode}}"),
        unit="cps",
    ),
    lines(
        "Data-parallel attention",
        "Tokens per second that ranks were given, and the differences between ranks.",
        reasons.PARALLEL,
        Query(once_rate(of("sglang:dp_attention_tokens_total"), "kind"), "{{kind}}"),
        unit=TOKENS,
    ),
)

STREAM = Scope("model_name")
PASSES = (
    quantiles(
        "Forward pass",
        "Duration of forward passes, from the engine's stream.",
        reasons.FORWARD_PASS,
        Histogram(STREAM, "sidestep_forward_pass_duration_seconds"),
    ),
    lines(
        "Tokens of forward passes",
        "Tokens per second, by phase.",
        reasons.FORWARD_PASS,
        Query(rate(STREAM("sidestep_forward_pass_tokens_total"), "phase"), "{{phase}}"),
        unit=TOKENS,
    ),
    lines(
        "Batch size, mean",
        "Requests of a forward pass in prefill and in decode.",
        reasons.FORWARD_PASS,
        Query(Histogram(STREAM, "sidestep_forward_pass_prefill_requests").mean(), "prefill"),
        Query(Histogram(STREAM, "sidestep_forward_pass_decode_requests").mean(), "decode"),
    ),
)

SEPARATED = (
    lines(
        "Prefill and decode servers",
        "Requests between a prefill server and a decode server, by queue.",
        reasons.DISAGGREGATION,
        Query(
            once(of("sglang:num_prefill_bootstrap_queue_reqs", priority="")), "prefill, handshake"
        ),
        Query(once(of("sglang:num_prefill_inflight_queue_reqs", priority="")), "prefill, transfer"),
        Query(
            once(of("sglang:num_decode_prealloc_queue_reqs", priority="")), "decode, preallocation"
        ),
        Query(once(of("sglang:num_decode_transfer_queue_reqs", priority="")), "decode, transfer"),
    ),
    quantiles(
        "KV transfer",
        "Duration of the KV transfer of a request.",
        reasons.DISAGGREGATION,
        histogram("sglang:kv_transfer_latency_ms"),
        "ms",
    ),
)

WEB = (
    lines(
        "HTTP requests by endpoint",
        "HTTP requests per second that the server received, by endpoint.",
        reasons.SGLANG,
        Query(rate(cache("sglang:http_requests_total"), "endpoint"), "{{endpoint}}"),
        unit="reqps",
    ),
    lines(
        "HTTP responses by status",
        "HTTP responses per second, by status.",
        reasons.SGLANG,
        Query(rate(cache("sglang:http_responses_total"), "status_code"), "{{status_code}}"),
        unit="reqps",
        stacked=True,
    ),
    lines(
        "HTTP requests in progress",
        "HTTP requests that the server has received and not yet responded to, by endpoint.",
        reasons.SGLANG,
        Query(total(cache("sglang:http_requests_active"), "endpoint"), "{{endpoint}}"),
    ),
)

BOARD = Dashboard(
    file="sglang",
    title="SGLang engine",
    says="One SGLang server, or some of them: load, latency, lengths, memory, scheduler.",
    tags=["llm", "sglang"],
    variables=[
        *TARGET,
        Variable("model_name", "Model", cache("sglang:num_running_reqs")),
    ],
    rows=[
        Row("Now", TILES),
        engine_health(
            of,
            [DrillDown("Request latency", "latency", ["model_name"])],
            engine=PROCESSES,
        ),
        Row("Load", LOAD),
        Row("Latency", LATENCY),
        Row("Lengths", LENGTHS, collapsed=True),
        Row("Memory", MEMORY),
        Row("Scheduler", SCHEDULER),
        Row("Forward passes, from the engine's stream", PASSES, collapsed=True),
        *speculation.OF_SGLANG,
        gpus(of),
        Row("Disaggregated prefill and decode", SEPARATED, collapsed=True),
        Row("HTTP", WEB, collapsed=True),
    ],
    annotations=engine_events(of, engine=PROCESSES),
    next={"why": "Why is it slow", "latency": "Request latency", "kv-cache": "KV cache"},
)
