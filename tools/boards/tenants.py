"""The dashboard of tenants and cost: who used the engines how much, and what tokens and GPUs cost."""

from __future__ import annotations

from collections.abc import Sequence

from tools.boards import gpu, reasons
from tools.boards.colors import PARTS
from tools.boards.dashboard import TARGET, Dashboard, Row, Variable
from tools.boards.engine_health import engine_events
from tools.boards.panels import Panel, Query
from tools.boards.queries import REPLICA, Scope, grouped, rate, ratio
from tools.boards.shapes import TOKENS, lines, tile

of = Scope("model_name")
chosen = Scope("model_name", "tenant")
SHOWN = "!__other__"
TENANT = "{{tenant}}"

PROMPTS, GENERATIONS = (
    "sidestep_service_prompt_tokens_total",
    "sidestep_service_generation_tokens_total",
)
# Counters whose sum is that over all tenants, as docs/tenants.md lists them.
ENDED, ENDED_ALL = (
    "sidestep_tenant_requests_total",
    (of("sidestep_service_requests_total", engine_type=""), of("sglang:num_requests_total")),
)
FAILURES, FAILURES_ALL = (
    "sidestep_tenant_failed_requests_total",
    (
        of("sidestep_service_requests_total", engine_type="", reason="~abort|error"),
        of("sglang:num_aborted_requests_total"),
    ),
)
COMPUTED, COMPUTED_ALL = (
    "sidestep_tenant_prompt_tokens_total",
    (of(PROMPTS, source="computed"),),
)
CACHED, CACHED_ALL = (
    "sidestep_tenant_cached_prompt_tokens_total",
    (of(PROMPTS, source="cached"),),
)
GENERATED, GENERATED_ALL = "sidestep_tenant_generation_tokens_total", (of(GENERATIONS),)
HELD, HELD_ALL = "sidestep_tenant_kv_block_seconds_total", of("sidestep_kv_block_seconds_total")
COST, COST_ALL = "sidestep_tenant_cost_total", of("sidestep_cost_total")
PART = "sidestep_tenant_request_part_seconds_total"
QUEUED, COMPUTING = (
    "sidestep_tenant_queue_seconds_total",
    "sidestep_tenant_compute_seconds_total",
)
PROCESSED = (
    f"({rate(of(PROMPTS))} + {rate(of(GENERATIONS))}"
    f" or {rate(of('vllm:prompt_tokens_total', 'sglang:prompt_tokens_total'))}"
    f" + {rate(of('vllm:generation_tokens_total', 'sglang:generation_tokens_total'))})"
)
"""Tokens per second, each once where prefill and decode are apart; scraped pages have no service's."""

NOT_SHOWN = (
    " *All others* is the engines' total minus the shown tenants, so it does not jump when a tenant"
    " moves there."
)


def by_tenant(family: str) -> str:
    """Return the rate of a counter of the chosen tenants that are shown."""
    return rate(chosen(family, tenant=SHOWN), "tenant")


def others(family: str, whole: Sequence[str]) -> str:
    """Return the rate of what engines counted, in ``whole``, for tenants that are not shown.

    The series of ``__other__`` also rises by all that a tenant had when it moves there. Engines
    without tenants are left out.
    """
    counted = grouped("sum", REPLICA, f"rate({of(family)}[$__rate_interval])")
    all_ = (
        f"(sum (rate({each}[$__rate_interval]) and on ({', '.join(REPLICA)}) {counted}) or vector(0))"
        for each in whole
    )
    return f"clamp_min({' + '.join(all_)} - {rate(of(family, tenant=SHOWN))}, 0)"


def usage(
    title: str,
    says: str,
    family: str,
    whole: Sequence[str],
    unit: str,
    *,
    empty: str = "",
    hourly: bool = False,
) -> Panel:
    """Return a panel of a counter by tenant, and of all others."""
    times = "3600 * " if hourly else ""
    return lines(
        title,
        says + NOT_SHOWN,
        empty or reasons.NO_TENANT_TRAFFIC,
        Query(f"{times}{by_tenant(family)}", TENANT),
        Query(f"{times}{others(family, whole)}", "all others"),
        unit=unit,
        stacked=True,
    )


def gpu_count() -> str:
    """Return the number of GPUs of the engines."""
    return f"count ({grouped('max', gpu.EACH, gpu.used(of, 'DCGM_FI_DEV_POWER_USAGE'))})"


def gpu_cost() -> str:
    """Return the cost of these GPUs per hour."""
    return f"{gpu_count()} * {grouped('max', '', Scope()('sidestep_gpu_hour_price'))}"


def watts() -> str:
    """Return the power that these GPUs draw."""
    return grouped("sum", "", grouped("max", gpu.EACH, gpu.used(of, "DCGM_FI_DEV_POWER_USAGE")))


NOW = (
    tile(
        "Shown tenants",
        "Tenants with series of their own; all others count together.",
        reasons.TENANTS,
        f"count ({by_tenant(ENDED)})",
        width=4,
    ),
    tile(
        "Requests",
        "Requests that ended per second, of the chosen tenants.",
        reasons.TENANTS,
        rate(chosen(ENDED)),
        unit="reqps",
        width=4,
    ),
    tile(
        "Failure rate",
        "Share of the requests that ended by an abort or an error.",
        reasons.NO_TENANT_TRAFFIC,
        ratio(rate(chosen(FAILURES)), rate(chosen(ENDED))),
        unit="percentunit",
        width=4,
        most=1,
    ),
    tile(
        "Generated tokens",
        "Tokens generated per second, for the chosen tenants.",
        reasons.TENANTS,
        rate(chosen(GENERATED)),
        unit=TOKENS,
        width=4,
    ),
    tile(
        "Cost per hour",
        "Cost of the tokens of the chosen models, in the currency of the prices.",
        reasons.PRICES,
        f"3600 * {rate(COST_ALL)}",
        width=4,
    ),
    tile(
        "Energy per 1,000 tokens",
        f"Joules for 1,000 prompt tokens and generated tokens. {gpu.NEEDS}",
        reasons.GPU,
        f"1000 * {watts()} / ({PROCESSED} > 0)",
        unit="joule",
        width=4,
    ),
)

USAGE = (
    usage("Requests by tenant", "Requests that ended per second.", ENDED, ENDED_ALL, "reqps"),
    usage(
        "Failed requests by tenant",
        "Requests per second that ended by an abort or an error.",
        FAILURES,
        FAILURES_ALL,
        "reqps",
    ),
    usage(
        "Generated tokens by tenant",
        "Tokens generated per second.",
        GENERATED,
        GENERATED_ALL,
        TOKENS,
    ),
    usage(
        "Computed prompt tokens by tenant",
        "Prompt tokens per second whose KV was computed.",
        COMPUTED,
        COMPUTED_ALL,
        TOKENS,
    ),
    usage(
        "Cached prompt tokens by tenant",
        "Prompt tokens per second whose KV came from a cache.",
        CACHED,
        CACHED_ALL,
        TOKENS,
    ),
    lines(
        "Prefix-cache hit rate by tenant",
        "Share of a tenant's prompt tokens whose KV came from a cache.",
        reasons.NO_TENANT_TRAFFIC,
        Query(
            f"{by_tenant(CACHED)} / ({by_tenant(CACHED)} + {by_tenant(COMPUTED)} > 0)",
            TENANT,
        ),
        unit="percentunit",
        most=1,
    ),
)

TIME = (
    lines(
        "Queue time by tenant",
        "Mean time that a tenant's requests waited until they were scheduled.",
        reasons.NO_TENANT_TRAFFIC,
        Query(ratio(by_tenant(QUEUED), by_tenant(ENDED)), TENANT),
        unit="s",
    ),
    lines(
        "Requests in the batch by tenant",
        "Requests of a tenant in the batch: compute seconds per second, of requests that ended.",
        reasons.NO_TENANT_TRAFFIC,
        Query(by_tenant(COMPUTING), TENANT),
        stacked=True,
    ),
    usage(
        "KV blocks by tenant",
        "KV blocks that a tenant's requests hold: block-seconds per second, of requests that left the batch.",
        HELD,
        (HELD_ALL,),
        "short",
    ),
    lines(
        "Latency by part",
        "Share of each part in the latency of the chosen tenants' requests that ended.",
        reasons.NO_TENANT_TRAFFIC,
        Query(
            f"{rate(chosen(PART), 'part')} / on () group_left () ({rate(chosen(PART))} > 0)",
            "{{part}}",
        ),
        unit="percentunit",
        width=24,
        most=1,
        stacked=True,
        colors=PARTS,
    ),
)

TABLE = Panel(
    title="Tenants",
    says="Current usage of each shown tenant.",
    empty=reasons.NO_TENANT_TRAFFIC,
    kind="table",
    width=24,
    height=7,
    queries=[
        Query(by_tenant(ENDED)),
        Query(by_tenant(FAILURES)),
        Query(by_tenant(COMPUTED)),
        Query(by_tenant(CACHED)),
        Query(by_tenant(GENERATED)),
        Query(by_tenant(HELD)),
    ],
    columns={
        "tenant": "Tenant",
        "Value #A": "Requests",
        "Value #B": "Failed",
        "Value #C": "Computed prompt tokens",
        "Value #D": "Cached prompt tokens",
        "Value #E": "Generated tokens",
        "Value #F": "KV blocks",
    },
    units={
        "Requests": "reqps",
        "Failed": "reqps",
        "Computed prompt tokens": TOKENS,
        "Cached prompt tokens": TOKENS,
        "Generated tokens": TOKENS,
    },
)

PRICED = (
    usage(
        "Cost per hour by tenant",
        "Cost of a tenant's tokens, in the currency of the prices.",
        COST,
        (COST_ALL,),
        "short",
        empty=reasons.TENANT_PRICES,
        hourly=True,
    ),
    lines(
        "Cost per hour by model",
        "Cost of a model's tokens, in the currency of the prices.",
        reasons.PRICES,
        Query(f"3600 * {rate(COST_ALL, 'model_name')}", "{{model_name}}"),
        stacked=True,
    ),
    lines(
        "Cost per 1,000 tokens by model",
        "Cost of 1,000 tokens of a model's mix of computed, cached and generated ones.",
        reasons.PRICES,
        Query(
            f"1000 * {rate(COST_ALL, 'model_name')} / ({rate(of(PROMPTS), 'model_name')}"
            f" + {rate(of(GENERATIONS), 'model_name')} > 0)",
            "{{model_name}}",
        ),
    ),
)

GPUS = (
    lines(
        "GPU cost per hour",
        f"Number of the engines' GPUs times --prices.gpu-hour. {gpu.NEEDS}",
        reasons.GPU_PRICE,
        Query(gpu_cost(), "all GPUs"),
    ),
    lines(
        "GPU cost per 1,000 tokens",
        f"Cost of the GPUs divided by prompt tokens and generated tokens. {gpu.NEEDS}",
        reasons.GPU_PRICE,
        Query(f"1000 / 3600 * {gpu_cost()} / ({PROCESSED} > 0)", "all models"),
    ),
    lines(
        "GPU cost per hour by tenant",
        f"Cost of the GPUs, divided by the shares of KV block-seconds. {gpu.NEEDS}",
        reasons.GPU_PRICE,
        Query(
            f"{by_tenant(HELD)} / scalar({rate(HELD_ALL)} > 0) * scalar({gpu_cost()})",
            TENANT,
        ),
        stacked=True,
    ),
    lines(
        "Power",
        f"Power that the engines' GPUs draw. {gpu.NEEDS}",
        reasons.GPU,
        Query(watts(), "all GPUs"),
        unit="watt",
    ),
    lines(
        "Energy per 1,000 tokens",
        f"Joules for 1,000 prompt tokens and generated tokens. {gpu.NEEDS}",
        reasons.GPU,
        Query(f"1000 * {watts()} / ({PROCESSED} > 0)", "all models"),
        unit="joule",
    ),
)

BOARD = Dashboard(
    file="tenants",
    title="Tenants and cost",
    annotations=engine_events(of),
    says="Who used the engines how much, and what tokens and GPUs cost.",
    tags=["llm", "tenants", "cost"],
    variables=[
        *TARGET,
        Variable(
            "model_name", "Model", Scope()("vllm:num_requests_running", "sglang:num_running_reqs")
        ),
        Variable("tenant", "Tenant", of("sidestep_tenant_requests_total")),
    ],
    rows=[
        Row("Now", NOW),
        Row("Usage", USAGE),
        Row("Time and memory", (*TIME, TABLE)),
        Row("Cost of tokens, with --prices.model", PRICED, collapsed=True),
        Row("GPUs, from dcgm-exporter", GPUS, collapsed=True),
    ],
)
