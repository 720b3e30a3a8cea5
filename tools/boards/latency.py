"""The latency dashboard: latencies of requests, and the share within a bound."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.dashboard import TARGET, Bound, Dashboard, Row, Variable
from tools.boards.engine_health import engine_events
from tools.boards.panels import Panel, Query
from tools.boards.queries import RUNNING, Histogram, Scope, once_rate, rate, ratio
from tools.boards.shapes import heat, lines, tile

of = Scope("model_name")
SERVED = "stop|length|repetition"
"""vLLM's finish reasons other than aborts and errors."""


def latency(vllm: str, sglang: str, trtllm: str = "") -> dict[str, Histogram]:
    """A latency in the metrics of each engine that has it."""
    names = {"vLLM": vllm, "SGLang": sglang, "TensorRT-LLM": trtllm}
    return {engine: Histogram(of, name) for engine, name in names.items() if name}


INTERVALS = (
    (
        "TTFT",
        "ttft",
        "from a request's arrival to its first token",
        latency(
            "vllm:time_to_first_token_seconds",
            "sglang:time_to_first_token_seconds",
            "trtllm_time_to_first_token_seconds",
        ),
    ),
    (
        "ITL",
        "itl",
        "between two outputs of a request",
        latency("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds"),
    ),
    (
        "E2E latency",
        "e2e",
        "from a request's arrival to its end",
        latency(
            "vllm:e2e_request_latency_seconds",
            "sglang:e2e_request_latency_seconds",
            "trtllm_e2e_request_latency_seconds",
        ),
    ),
)

AVAILABLE = {
    "vLLM": ratio(
        rate(of("vllm:request_success_total", finished_reason=f"~{SERVED}")),
        rate(of("vllm:request_success_total", finished_reason=f"~{SERVED}|error")),
    ),
    "SGLang": (
        f"1 - {ratio(rate(of('sglang:num_aborted_requests_total')), rate(of('sglang:num_requests_total')))}"
    ),
}


def compared(by: tuple[str, ...], **matched: str) -> str:
    """Return the rate of requests that the exporter compared with objectives, once per replica of SGLang."""
    return once_rate(of("sidestep_slo_requests_total", **matched), by)


def met(*by: str) -> str:
    """Return the share of these requests that met their objective."""
    return ratio(compared(by, result="good"), compared(by))


def within(title: str, bound: str, what: str, found: dict[str, Histogram]) -> Panel:
    """Return the current share of requests within the bound."""
    return tile(
        f"{title} within ${bound} s",
        f"Share of times {what} that are at most ${bound} seconds, the bound chosen above.",
        f"{reasons.NO_TRAFFIC} The bound must be one of the engine's buckets.",
        *(Query(each.within(f"${bound}"), engine) for engine, each in found.items()),
        unit="percentunit",
        width=6,
    )


def row(title: str, bound: str, what: str, found: dict[str, Histogram]) -> Row:
    """Return a row for one latency: over time against its bound, by model, and as a heatmap."""
    return Row(
        title,
        (
            lines(
                f"{title} within ${bound} s",
                f"Share of times {what} that are at most ${bound} seconds.",
                f"{reasons.NO_TRAFFIC} The bound must be one of the engine's buckets.",
                *(
                    Query(each.within(f"${bound}", "model_name"), f"{{{{model_name}}}} {engine}")
                    for engine, each in found.items()
                ),
                unit="percentunit",
                most=1,
                width=6,
            ),
            lines(
                f"{title}, p50, p95 and p99",
                f"Time {what}.",
                reasons.NO_TRAFFIC,
                *(
                    Query(each.quantile(share), f"p{share * 100:g} {engine}")
                    for engine, each in found.items()
                    for share in (0.5, 0.95, 0.99)
                ),
                unit="s",
                width=6,
            ),
            heat(
                f"{title}, vLLM",
                f"Distribution of the times {what}.",
                reasons.NO_VLLM_TRAFFIC,
                found["vLLM"],
                width=6,
            ),
            heat(
                f"{title}, SGLang",
                f"Distribution of the times {what}.",
                reasons.NO_SGLANG_TRAFFIC,
                found["SGLang"],
                width=6,
            ),
        ),
    )


BOARD = Dashboard(
    file="latency",
    title="Request latency",
    annotations=engine_events(of),
    next={"why": "Why is it slow", "vllm": "vLLM engine", "sglang": "SGLang engine"},
    says="Share of requests within chosen bounds, and distributions of all latencies.",
    tags=["llm", "slo"],
    variables=[
        *TARGET,
        Variable(
            "model_name",
            "Model",
            Scope()(*RUNNING),
        ),
        *(
            Bound(
                bound,
                f"{title} within",
                Scope()(__name__=f"~(vllm|sglang):{family}_bucket"),
                default,
            )
            for (title, bound, _, _), family, default in zip(
                INTERVALS,
                (
                    "time_to_first_token_seconds",
                    "inter_token_latency_seconds",
                    "e2e_request_latency_seconds",
                ),
                ("1.0", "0.1", "10.0"),
                strict=True,
            )
        ),
    ],
    rows=[
        Row(
            "Now",
            (
                *(within(*interval) for interval in INTERVALS),
                tile(
                    "Success rate",
                    (
                        "Share of ended requests without an error. For SGLang, all aborted "
                        "requests count as errors, since it does not report the reason."
                    ),
                    reasons.NO_TRAFFIC,
                    *(Query(expr, engine) for engine, expr in AVAILABLE.items()),
                    unit="percentunit",
                    width=6,
                ),
            ),
        ),
        Row(
            "Objectives that the exporter counts (--slo)",
            (
                tile(
                    "Objectives met",
                    "Share of requests, or gaps between tokens, that meet each objective of --slo.",
                    reasons.NO_OBJECTIVES,
                    Query(met("slo"), "{{slo}}"),
                    unit="percentunit",
                    width=24,
                ),
                lines(
                    "Objectives met, by model",
                    "Share of requests, or gaps between tokens, that meet each objective of --slo.",
                    reasons.NO_OBJECTIVES,
                    Query(met("model_name", "slo"), "{{model_name}} {{slo}}"),
                    unit="percentunit",
                    most=1,
                    width=12,
                ),
                lines(
                    "Objectives missed",
                    (
                        "Requests, or gaps between tokens, per second that miss each objective of"
                        " --slo."
                    ),
                    reasons.NO_OBJECTIVES,
                    Query(compared(("model_name", "slo"), result="bad"), "{{model_name}} {{slo}}"),
                    unit="cps",
                    width=12,
                ),
            ),
            collapsed=True,
        ),
        *(row(*interval) for interval in INTERVALS),
        Row(
            "Queue time and failures",
            (
                lines(
                    "Queue time, p95",
                    "From entry into the queue until first scheduled.",
                    reasons.NO_TRAFFIC,
                    Query(
                        Histogram(of, "vllm:request_queue_time_seconds").quantile(
                            0.95, "model_name"
                        ),
                        "{{model_name}} vLLM",
                    ),
                    Query(
                        Histogram(of, "sglang:queue_time_seconds").quantile(0.95, "model_name"),
                        "{{model_name}} SGLang",
                    ),
                    unit="s",
                    width=12,
                ),
                lines(
                    "Failed requests",
                    "Requests per second that ended in an error, were aborted, or were rejected.",
                    reasons.ENGINES,
                    Query(
                        rate(
                            of("vllm:request_success_total", finished_reason="~abort|error"),
                            "finished_reason",
                        ),
                        "vLLM {{finished_reason}}",
                    ),
                    Query(rate(of("vllm:admission_rejections_total")), "vLLM rejected"),
                    Query(rate(of("sglang:num_aborted_requests_total")), "SGLang aborted"),
                    unit="reqps",
                    width=12,
                ),
            ),
        ),
    ],
)
