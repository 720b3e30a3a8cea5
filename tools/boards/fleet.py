"""The fleet dashboard: all engines by model, and where to look when something is wrong."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.dashboard import TARGET, Dashboard, Row, Variable
from tools.boards.engine_health import ENGINES, engine_events, engine_health
from tools.boards.gpu import gpus
from tools.boards.panels import AlertList, DrillDown, LivePage, Panel, Query
from tools.boards.queries import (
    ENGINE,
    PLACE_COLUMNS,
    RUNNING,
    WAITING,
    Histogram,
    Scope,
    mean,
    most,
    once,
    once_rate,
    rate,
    ratio,
    total,
)
from tools.boards.shapes import SATURATED, TOKENS, lines, tile

GENERATED = (
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
    "llamacpp:tokens_predicted_total",
    "trtllm_generation_tokens_total",
)
PROMPTS = (
    "vllm:prompt_tokens_total",
    "sglang:prompt_tokens_total",
    "llamacpp:prompt_tokens_total",
    "trtllm_prompt_tokens_total",
)
FINISHED = (
    "vllm:request_success_total",
    "sglang:num_requests_total",
    "trtllm_request_success_total",
)
PREEMPTED = (
    "vllm:num_preemptions_total",
    "sglang:num_retracted_requests_total",
)
FILLED = (
    "vllm:kv_cache_usage_perc",
    "sglang:token_usage",
    "sidestep_llamacpp_context_usage_ratio",
    "trtllm_kv_cache_utilization",
)

of = Scope("model_name")
target = Scope()
"""Triton's series have no ``model_name``."""

TTFT = {
    "vLLM": Histogram(of, "vllm:time_to_first_token_seconds"),
    "SGLang": Histogram(of, "sglang:time_to_first_token_seconds"),
    "TensorRT-LLM": Histogram(of, "trtllm_time_to_first_token_seconds"),
}
INTER = {
    "vLLM": Histogram(of, "vllm:inter_token_latency_seconds"),
    "SGLang": Histogram(of, "sglang:inter_token_latency_seconds"),
}
WHOLE = {
    "vLLM": Histogram(of, "vllm:e2e_request_latency_seconds"),
    "SGLang": Histogram(of, "sglang:e2e_request_latency_seconds"),
    "TensorRT-LLM": Histogram(of, "trtllm_e2e_request_latency_seconds"),
}

OF_ENGINE = (
    DrillDown("vLLM engine", "vllm", ("engine", "model_name", "instance")),
    DrillDown("SGLang engine", "sglang", ("model_name", "instance")),
)
"""Links from one engine."""
LATENCY_OF_MODEL = DrillDown("Request latency", "latency", ("model_name",))
OF_MODEL = (
    DrillDown("vLLM engines", "vllm", ("model_name",)),
    DrillDown("SGLang engines", "sglang", ("model_name",)),
    DrillDown("Why is it slow", "why", ("model_name",)),
    LATENCY_OF_MODEL,
)
"""Links from all engines of a model."""


def slowest(title: str, says: str, by_engine: dict[str, Histogram]) -> Panel:
    """Return queries of the 95th percentile by model, one per engine, whose bounds differ."""
    found = [
        Query(histogram.quantile(0.95, "model_name"), f"{{{{model_name}}}} {engine}")
        for engine, histogram in by_engine.items()
    ]
    return lines(title, says, reasons.NO_TRAFFIC, *found, unit="s", links=(LATENCY_OF_MODEL,))


def by_model(
    title: str, says: str, expr: str, unit: str = "short", *, most: float | None = None
) -> Panel:
    """Return a query with a line per model."""
    query = Query(expr, "{{model_name}}")
    return lines(title, says, reasons.ENGINES, query, unit=unit, width=6, most=most, links=OF_MODEL)


TILES = (
    tile("Engines", ENGINES, reasons.STATES, f"count ({of('sidestep_engine_up')})"),
    tile(
        "Engines down",
        "Engines that have stopped, or are silent.",
        reasons.STATES,
        total(f"{of('sidestep_engine_up')} == bool 0"),
        limits=(1, 1),
    ),
    tile(
        "Unreachable targets",
        "Targets that Prometheus cannot scrape.",
        "Prometheus has no such target.",
        total(f"{target('up')} == bool 0"),
        limits=(1, 1),
    ),
    tile("Running", "Requests in batches.", reasons.ENGINES, once(of(*RUNNING, priority=""))),
    tile("Waiting", "Requests in queues.", reasons.ENGINES, once(of(*WAITING, priority=""))),
    tile(
        "Generation throughput",
        "Tokens generated per second. All but vLLM count the tokens of a request when it ends.",
        reasons.ENGINES,
        rate(of(*GENERATED)),
        unit=TOKENS,
    ),
    tile(
        "Prompt throughput",
        "Prompt tokens per second, cached ones included except llama.cpp's.",
        reasons.ENGINES,
        rate(of(*PROMPTS)),
        unit=TOKENS,
    ),
    tile(
        "TTFT, p95",
        "95th percentile of the time from a request's arrival to its first token.",
        reasons.NO_TRAFFIC,
        *(Query(histogram.quantile(0.95), engine) for engine, histogram in TTFT.items()),
        unit="s",
    ),
)

MODELS = Panel(
    title="Models",
    says="Current load of each model.",
    empty=reasons.ENGINES,
    kind="table",
    width=17,
    height=7,
    queries=[
        Query(once(of(*RUNNING, priority=""), "model_name")),
        Query(once(of(*WAITING, priority=""), "model_name")),
        Query(rate(of(*GENERATED), "model_name")),
        Query(rate(of(*PROMPTS), "model_name")),
        Query(rate(of(*FINISHED), "model_name")),
        Query(most(of(*FILLED), "model_name")),
        Query(mean(of("sidestep_saturation_ratio"), "model_name")),
    ],
    columns={
        "model_name": "Model",
        "Value #A": "Running",
        "Value #B": "Waiting",
        "Value #C": "Generation throughput",
        "Value #D": "Prompt throughput",
        "Value #E": "Finished requests",
        "Value #F": "KV cache usage, max",
        "Value #G": "Saturation",
    },
    units={
        "KV cache usage, max": "percentunit",
        "Generation throughput": TOKENS,
        "Prompt throughput": TOKENS,
        "Finished requests": "reqps",
        "Saturation": "percentunit",
    },
    links=OF_MODEL,
)

ALERTS = AlertList(
    title="Alerts",
    says=(
        "Alerts of engines that are firing or pending, of all data sources whose alerts Grafana shows"
        " (*Manage alerts via Alerting UI* in the data source's settings). The filters above do not apply."
    ),
    named="Inference",
    width=7,
    height=7,
)

LOAD = (
    by_model("Running", "Requests in batches.", once(of(*RUNNING, priority=""), "model_name")),
    by_model(
        "Waiting",
        "Requests in queues. A queue that keeps growing needs more engines.",
        once(of(*WAITING, priority=""), "model_name"),
    ),
    by_model(
        "Generation throughput",
        "Tokens generated per second. All but vLLM count the tokens of a request when it ends.",
        rate(of(*GENERATED), "model_name"),
        TOKENS,
    ),
    by_model(
        "Prompt throughput",
        "Prompt tokens per second, cached ones included except llama.cpp's.",
        rate(of(*PROMPTS), "model_name"),
        TOKENS,
    ),
)

LATENCY = (
    slowest("TTFT, p95", "From arrival to the first token.", TTFT),
    slowest("ITL, p95", "Between two outputs of a request.", INTER),
    slowest("E2E latency, p95", "From a request's arrival to its end.", WHOLE),
)

SATURATION = lines(
    "Saturation",
    (
        "Offered load divided by the load that the engines can serve, mean of the "
        "engines. At 1 and above, queues grow."
    ),
    reasons.NO_SATURATION,
    Query(mean(of("sidestep_saturation_ratio"), "model_name"), "{{model_name}}"),
    unit="percentunit",
    limits=SATURATED,
    width=24,
    links=OF_MODEL,
)

CAPACITY = (
    by_model(
        "KV cache usage, max",
        "Share of the KV cache in use in the fullest engine; near 1, requests wait or are preempted.",
        most(of(*FILLED), "model_name"),
        "percentunit",
        most=1,
    ),
    by_model(
        "Preemptions",
        "Preempted requests per second; SGLang calls them retracted.",
        once_rate(of(*PREEMPTED), "model_name"),
        "reqps",
    ),
    lines(
        "Prefix-cache hit rate",
        "Share of prompt tokens that were found in the prefix cache.",
        reasons.NO_TRAFFIC,
        Query(
            ratio(
                rate(of("vllm:prefix_cache_hits_total"), "model_name"),
                rate(of("vllm:prefix_cache_queries_total"), "model_name"),
            ),
            "{{model_name}} vLLM",
        ),
        Query(
            ratio(
                once_rate(
                    of("sglang:prefill_effective_tokens_total", mode="~.*_hit"), "model_name"
                ),
                once_rate(of("sglang:prefill_effective_tokens_total"), "model_name"),
            ),
            "{{model_name}} SGLang",
        ),
        Query(
            ratio(
                rate(of("llamacpp:prompt_tokens_cached_total"), "model_name"),
                " + ".join(
                    rate(of(f"llamacpp:{name}"), "model_name")
                    for name in ("prompt_tokens_total", "prompt_tokens_cached_total")
                ),
            ),
            "{{model_name}} llama.cpp",
        ),
        Query(
            ratio(
                rate(of("trtllm_prompt_cached_tokens_total"), "model_name"),
                rate(of("trtllm_prompt_tokens_total"), "model_name"),
            ),
            "{{model_name}} TensorRT-LLM",
        ),
        unit="percentunit",
        width=6,
        most=1,
    ),
    lines(
        "Triton",
        "Successful Triton requests per second, by model.",
        reasons.TRITON,
        Query(rate(target("nv_inference_request_success"), "model"), "{{model}}"),
        unit="reqps",
        width=6,
    ),
)

EACH = Panel(
    title="Engines by exporter",
    says=ENGINES,
    empty=reasons.STATES,
    kind="table",
    width=24,
    height=10,
    queries=[
        Query(most(of("sidestep_engine_up"), ENGINE)),
        Query(rate(of("sidestep_engine_restarts_total"), ENGINE)),
        Query(f"time() - {most(of('sidestep_engine_last_seen_timestamp_seconds'), ENGINE)}"),
    ],
    columns={
        **PLACE_COLUMNS,
        "model_name": "Model",
        "engine": "Engine",
        "origin": "Origin",
        "Value #A": "Up",
        "Value #B": "Restarts/s",
        "Value #C": "Last item",
    },
    units={"Last item": "s"},
    links=(*OF_ENGINE, LivePage()),
)

BOARD = Dashboard(
    file="fleet",
    title="Fleet",
    says="All engines that sidestep exposes, by model.",
    tags=["llm"],
    variables=[
        *TARGET,
        Variable(
            "model_name",
            "Model",
            Scope()(*RUNNING),
        ),
    ],
    rows=[
        Row("Now", (*TILES, MODELS, ALERTS)),
        engine_health(of, OF_ENGINE),
        Row("Load", (*LOAD, SATURATION)),
        Row("Latency", LATENCY),
        Row("Capacity", CAPACITY),
        gpus(of),
        Row("Engines by exporter", (EACH,), collapsed=True),
    ],
    annotations=engine_events(of),
    next={
        "why": "Why is it slow",
        "vllm": "vLLM engine",
        "sglang": "SGLang engine",
        "latency": "Request latency",
    },
)
