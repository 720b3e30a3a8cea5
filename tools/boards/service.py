"""The dashboard of services whose prompts are computed by other engines than those that generate."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.dashboard import TARGET, Dashboard, Row, Variable
from tools.boards.engine_health import engine_events
from tools.boards.hand_over import AGAIN, ENGINE, HANDED_OVER, INFO, RECEIVED, ROWS, SIGNS, of, side
from tools.boards.panels import Panel, Query
from tools.boards.queries import PLACE_COLUMNS, Histogram, Scope, grouped, mean, once, rate
from tools.boards.shapes import SATURATED, TOKENS, lines
from tools.boards.why import OF_ENGINE


def counted(title: str, says: str, unit: str, service: str, *engines: str) -> Panel:
    """Return the rate of the service, and that of all its engines."""
    found = (Query(rate(of(service)), "service"), Query(rate(of(*engines)), "sum over engines"))
    return lines(title, says, reasons.NO_TRAFFIC, *found, unit=unit)


def latency(title: str, says: str, name: str) -> Panel:
    """Return quantiles over the service's requests, and over those of all its engines."""
    found = {
        "service, vLLM": Histogram(of, f"sidestep_service_{name}", engine_type=""),
        "engines, vLLM": Histogram(of, f"vllm:{name}"),
        # SGLang has other buckets, and this label.
        "service, SGLang": Histogram(of, f"sidestep_service_{name}", engine_type="!"),
        "engines, SGLang": Histogram(of, f"sglang:{name}"),
    }
    return lines(
        f"{title}, p50 and p95",
        says,
        reasons.NO_TRAFFIC,
        *(
            Query(each.quantile(quantile), f"p{quantile * 100:g} {whose}")
            for whose, each in found.items()
            for quantile in (0.5, 0.95)
        ),
        unit="s",
        width=12,
    )


COUNTED = (
    counted(
        "Requests",
        "Requests that ended. The service counts each once, the sum over engines counts hand-overs twice. Use the"
        " service's for capacity and bills.",
        "reqps",
        "sidestep_service_requests_total",
        "vllm:request_success_total",
        "sglang:num_requests_total",
    ),
    counted(
        "Prompt tokens",
        "The service counts a prompt where it is computed, the sum over engines also where its KV is received.",
        TOKENS,
        "sidestep_service_prompt_tokens_total",
        "vllm:prompt_tokens_total",
        "sglang:prompt_tokens_total",
    ),
    counted(
        "Generated tokens",
        "The sum over engines also has the token of each hand-over that the decode engine generates again.",
        TOKENS,
        "sidestep_service_generation_tokens_total",
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
    ),
    latency(
        "TTFT",
        "The service's begins at the prefill engine where the exporter knows both parts of a request"
        " (docs/pd.md), otherwise at the decode engine; the engines' mixes both sides. If it is too long, see"
        " below which side is short, and how long requests wait for KV.",
        "time_to_first_token_seconds",
    ),
    latency(
        "E2E latency",
        "Time from arrival to end. The engines' is too low: the short parts on prefill engines count as requests.",
        "e2e_request_latency_seconds",
    ),
)


def balance(
    title: str,
    says: str,
    empty: str,
    vllm: str,
    sglang: str,
    *more: Query,
    unit: str = "short",
    is_mean: bool = False,
    limits: tuple[float, float] | None = None,
) -> Panel:
    """Return the load of the prefill engines, and of the decode engines."""
    over = mean if is_mean else once
    found = [
        query
        for role in SIGNS
        for query in (
            Query(over(side(role, of(vllm))), f"{role}, vLLM"),
            Query(over(of(sglang, priority="", engine_type=role)), f"{role}, SGLang"),
        )
    ]
    return lines(title, says, empty, *found, *more, unit=unit, width=6, limits=limits)


BALANCE = (
    balance(
        "Saturation by side",
        "Offered load divided by what a side's engines can serve, mean of its engines. From 0.8 on, add engines"
        " to this side; if the other side is far below, give one of its engines this role.",
        reasons.NO_SATURATION,
        *("sidestep_saturation_ratio",) * 2,
        is_mean=True,
        limits=SATURATED,
    ),
    balance(
        "Waiting requests",
        "Requests in the queues of each side, and those for whose KV a decode server of SGLang has no memory. The"
        " side whose queue grows is short.",
        reasons.ENGINES,
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        Query(once(of("sglang:num_decode_prealloc_queue_reqs", priority="")), "no memory, SGLang"),
    ),
    balance(
        "KV cache usage",
        "Share of the KV cache in use, mean of a side's engines. Full on the decode side: it is short, add engines"
        " there. Full on the prefill side: see for how long it holds KV.",
        reasons.ENGINES,
        "vllm:kv_cache_usage_perc",
        "sglang:token_usage",
        unit="percentunit",
        is_mean=True,
    ),
    balance(
        "Tokens to prefill",
        "Prompt tokens that are still to be computed. Those of the decode side should be few: see local prefills.",
        reasons.BACKLOG,
        *("sidestep_unfinished_prefill_tokens",) * 2,
    ),
)


ENGINES = (
    lines(
        "Engines by role",
        "Engines by the role in their settings; of SGLang each process. A model with prefill engines needs decode"
        " engines. vLLM with kv_both has the role both: the table says what it does.",
        reasons.ENGINES,
        Query(f"count by (role, dialect) ({of(INFO)})", "{{role}} {{dialect}}"),
        stacked=True,
    ),
    Panel(
        title="Roles",
        says="Role and connectors of each engine, and what those of vLLM do. One that does nothing is not ready, or"
        " its router does not know it.",
        empty=reasons.ENGINES,
        kind="table",
        width=16,
        queries=[
            Query(grouped("max", (*ENGINE, "dialect", "role", "connectors"), of(INFO))),
            Query(rate(of(HANDED_OVER), ENGINE)),
            Query(rate(of(RECEIVED), ENGINE)),
            Query(rate(of(AGAIN), ENGINE)),
        ],
        columns={
            "model_name": "Model",
            **PLACE_COLUMNS,
            "engine": "Engine",
            "origin": "Origin",
            "dialect": "Kind",
            "role": "Role",
            "connectors": "Connectors",
            "Value #B": "Handed over",
            "Value #C": "Received",
            "Value #D": "Local prefills",
        },
        units={"Handed over": "reqps", "Received": TOKENS, "Local prefills": "reqps"},
        links=OF_ENGINE,
    ),
)

BOARD = Dashboard(
    file="service",
    title="Prefill and decode",
    says="A service whose prompts are computed by other engines than those that generate: counted once, which side is"
    " short, and the hand-over.",
    tags=["llm", "disaggregation"],
    variables=[*TARGET, Variable("model_name", "Model", Scope()(INFO))],
    rows=[
        Row("The service, and the sum over its engines", COUNTED),
        Row("Which side is short", BALANCE),
        *ROWS,
        Row("Engines", ENGINES),
    ],
    annotations=engine_events(of),
    next={"why": "Why is it slow", "vllm": "vLLM engine", "sglang": "SGLang engine"},
)
