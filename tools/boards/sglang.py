"""One SGLang server, or some of them."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.dashboard import TARGET, Dashboard, Row, Variable
from tools.boards.panels import Query
from tools.boards.queries import Histogram, Scope, most, once, once_mean_rate, once_rate, rate
from tools.boards.shapes import SATURATED, heat, lines, quantiles, tile

of = Scope("model_name", "job", "instance")
cache = Scope("job", "instance")
"""A radix cache and what counts HTTP have no ``model_name``."""
RANK = ("instance", "dp_rank")
NAME = "{{instance}} {{dp_rank}}"


def histogram(name: str, **matched: str) -> Histogram:
    """Of this dashboard's servers."""
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
        "Queued",
        "Requests in queues.",
        reasons.SGLANG,
        once(of("sglang:num_queue_reqs", priority="")),
    ),
    tile(
        "Tokens in use",
        "Share of KV slots in use, of the fullest rank.",
        reasons.SGLANG,
        most(of("sglang:token_usage")),
        unit="percentunit",
        most=1,
        limits=(0.9, 0.98),
    ),
    tile(
        "Generated tokens",
        "Tokens generated in a second, as they come.",
        reasons.SGLANG,
        once_rate(of("sglang:realtime_tokens_total", mode="decode")),
        unit="cps",
    ),
    tile(
        "Prompt tokens",
        "Prompt tokens computed or found in a cache in a second.",
        reasons.SGLANG,
        once_rate(of("sglang:realtime_tokens_total", mode="~prefill_.*")),
        unit="cps",
    ),
    tile(
        "First token, p95",
        "Time to the first token that 95 % of requests stay below.",
        reasons.NO_SGLANG_TRAFFIC,
        TTFT.quantile(0.95),
        unit="s",
    ),
    tile(
        "Inter-token, p95",
        "Time between two outputs that 95 % stay below.",
        reasons.NO_SGLANG_TRAFFIC,
        INTER.quantile(0.95),
        unit="s",
    ),
    tile(
        "End to end, p95",
        "Time of whole requests that 95 % stay below.",
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
        Query(RUNNING, f"running {NAME}"),
        Query(QUEUED, f"queued {NAME}"),
    ),
    lines(
        "Tokens",
        "Tokens in a second as they are worked on: prompt tokens computed, found in a cache, and generated ones.",
        reasons.SGLANG,
        Query(once_rate(of("sglang:realtime_tokens_total"), "mode"), "{{mode}}"),
        unit="cps",
    ),
    lines(
        "Ends of requests",
        "In a second: finished, aborted, and those that had to give up their place.",
        reasons.SGLANG,
        Query(rate(of("sglang:num_requests_total")), "finished"),
        Query(rate(of("sglang:num_aborted_requests_total")), "aborted"),
        Query(once_rate(of("sglang:num_retracted_requests_total")), "retracted"),
        unit="reqps",
    ),
    lines(
        "Saturation of schedulers",
        "Requests offered over those that a scheduler can serve; from 1 on its queue grows.",
        reasons.UNSATURATED,
        Query(most(of("sidestep_saturation_ratio", engine_type="~.+"), RANK), NAME),
        unit="percentunit",
        limits=SATURATED,
        width=24,
    ),
)

LATENCY = (
    quantiles(
        "Time to first token",
        "From a request's arrival to its first token.",
        reasons.NO_SGLANG_TRAFFIC,
        TTFT,
    ),
    quantiles(
        "Inter-token latency", "Between two outputs of a request.", reasons.NO_SGLANG_TRAFFIC, INTER
    ),
    quantiles(
        "Time per output token",
        "Mean time per token after the first, one value a request.",
        reasons.NO_SGLANG_TRAFFIC,
        PER_TOKEN,
    ),
    quantiles(
        "End to end",
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
        "Stages, mean",
        "How long requests spent in each stage of their way.",
        reasons.NO_SGLANG_TRAFFIC,
        Query(histogram("sglang:per_stage_req_latency_seconds").mean("stage"), "{{stage}}"),
        unit="s",
    ),
    heat("First tokens", "How many first tokens took how long.", reasons.NO_SGLANG_TRAFFIC, TTFT),
    heat(
        "Inter-token",
        "How many outputs came how long after the one before.",
        reasons.NO_SGLANG_TRAFFIC,
        INTER,
    ),
    heat("Whole requests", "How many requests took how long.", reasons.NO_SGLANG_TRAFFIC, WHOLE),
)

LENGTHS = (
    heat(
        "Prompt lengths",
        "How many requests had how many prompt tokens; only where SGLang collects token histograms.",
        "SGLang collects lengths with --collect-tokens-histogram.",
        histogram("sglang:prompt_tokens_histogram"),
        "short",
    ),
    heat(
        "Computed prompt lengths",
        "How many requests had how many prompt tokens that were in no cache.",
        "SGLang collects lengths with --collect-tokens-histogram.",
        histogram("sglang:uncached_prompt_tokens_histogram"),
        "short",
    ),
    heat(
        "Generation lengths",
        "How many requests had how many generated tokens.",
        "SGLang collects lengths with --collect-tokens-histogram.",
        histogram("sglang:generation_tokens_histogram"),
        "short",
    ),
)

MEMORY = (
    lines(
        "KV slots",
        "Token slots in use, kept for a hit, and free.",
        reasons.SGLANG,
        Query(once(of("sglang:kv_used_tokens")), "used"),
        Query(once(of("sglang:kv_evictable_tokens")), "evictable"),
        Query(once(of("sglang:kv_available_tokens")), "free"),
        stacked=True,
        width=6,
    ),
    lines(
        "Prompt tokens by source",
        "Where the KV of prompt tokens came from, in a second.",
        reasons.SGLANG,
        Query(once_rate(of("sglang:prefill_effective_tokens_total"), "mode"), "{{mode}}"),
        unit="cps",
        stacked=True,
        width=6,
    ),
    lines(
        "Evicted",
        "Token slots freed by eviction in a second, copied to the host or not.",
        reasons.SGLANG,
        Query(rate(cache("sglang:evicted_tokens_total", tp_rank="0", pp_rank="0"), RANK), NAME),
        unit="cps",
        width=6,
    ),
    lines(
        "Reserved for a token",
        "Share of a request's limit that SGLang sets aside when it admits it; it falls until requests are retracted.",
        reasons.SGLANG,
        Query(most(of("sglang:new_token_ratio"), RANK), NAME),
        unit="percentunit",
        most=1,
        width=6,
    ),
)

SCHEDULER = (
    lines(
        "What the scheduler does",
        "Seconds of a second by what its loop was busy with, the mean of all schedulers.",
        reasons.SGLANG,
        Query(
            once_mean_rate(of("sglang:scheduler_stage_seconds_total"), "category"), "{{category}}"
        ),
        unit="percentunit",
        stacked=True,
    ),
    lines(
        "Forward passes",
        "In a second, by phase and by whether they ran as a CUDA graph.",
        reasons.SGLANG,
        Query(once_rate(of("sglang:cuda_graph_passes_total"), "mode"), "{{mode}}"),
        unit="cps",
    ),
    lines(
        "Parallel attention",
        "Tokens in a second that ranks were given, and those by which they differed.",
        reasons.PARALLEL,
        Query(once_rate(of("sglang:dp_attention_tokens_total"), "kind"), "{{kind}}"),
        unit="cps",
    ),
)

STREAM = Scope("model_name", "job", "instance")
PASSES = (
    quantiles(
        "Forward pass",
        "How long forward passes took, by the engine's own stream.",
        reasons.FORWARD_PASS,
        Histogram(STREAM, "sidestep_forward_pass_duration_seconds"),
    ),
    lines(
        "Tokens of forward passes",
        "In a second, by phase.",
        reasons.FORWARD_PASS,
        Query(rate(STREAM("sidestep_forward_pass_tokens_total"), "phase"), "{{phase}}"),
        unit="cps",
    ),
    lines(
        "Batch, mean",
        "Requests of a forward pass in prefill and in decode.",
        reasons.FORWARD_PASS,
        Query(Histogram(STREAM, "sidestep_forward_pass_prefill_requests").mean(), "prefill"),
        Query(Histogram(STREAM, "sidestep_forward_pass_decode_requests").mean(), "decode"),
    ),
)

SEPARATED = (
    lines(
        "Prefill and decode servers",
        "Requests on their way from a prefill server to a decode server, by where they wait.",
        reasons.DISAGGREGATION,
        Query(
            once(of("sglang:num_prefill_bootstrap_queue_reqs", priority="")), "prefill, handshake"
        ),
        Query(once(of("sglang:num_prefill_inflight_queue_reqs", priority="")), "prefill, transfer"),
        Query(once(of("sglang:num_decode_prealloc_queue_reqs", priority="")), "decode, room"),
        Query(once(of("sglang:num_decode_transfer_queue_reqs", priority="")), "decode, transfer"),
    ),
    quantiles(
        "KV transfer",
        "How long the transfer of a request's KV took.",
        reasons.DISAGGREGATION,
        histogram("sglang:kv_transfer_latency_ms"),
        "ms",
    ),
    lines(
        "HTTP",
        "Answers in a second, by status.",
        reasons.SGLANG,
        Query(rate(cache("sglang:http_responses_total"), "status_code"), "{{status_code}}"),
        unit="reqps",
    ),
)

BOARD = Dashboard(
    file="sglang",
    title="SGLang engine",
    says="One SGLang server, or some of them: load, latency, lengths, memory, scheduler.",
    tags=["llm", "sglang"],
    variables=[
        *TARGET,
        Variable(
            "model_name", "Model", 'sglang:num_running_reqs{job=~"$job",instance=~"$instance"}'
        ),
    ],
    rows=[
        Row("Now", TILES),
        Row("Load", LOAD),
        Row("Latency", LATENCY),
        Row("Lengths", LENGTHS),
        Row("Memory", MEMORY),
        Row("Scheduler", SCHEDULER),
        Row("Forward passes, by the engine's own stream", PASSES),
        Row("Prefill and decode apart, and HTTP", SEPARATED),
    ],
)
