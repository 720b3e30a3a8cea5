"""Rows of speculative decoding and of LoRA adapters, for the engines' dashboards."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.dashboard import Row
from tools.boards.panels import Panel, Query
from tools.boards.queries import (
    ENGINE,
    ENGINE_NAME,
    PLACE,
    PLACE_COLUMNS,
    RANK,
    RANK_NAME,
    Scope,
    grouped,
    most,
    once,
    rate,
    ratio,
    total,
)
from tools.boards.shapes import TOKENS, lines

of = Scope("model_name", "engine")
info = Scope()
"""``vllm:lora_requests_info`` has neither model nor engine."""
sglang = Scope("model_name")

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
DRAFTED_BY_POSITION = "sidestep_spec_decode_draft_tokens_per_position_total"


def speculating(family: str, by: tuple[str, ...] | str = "") -> str:
    """Return a gauge of SGLang where it speculates; otherwise it has 0 tokens per verification."""
    return grouped("avg", by, f"{sglang(family)} and {sglang('sglang:spec_accept_length')} > 0")


def accepted(by: tuple[str, ...] | str = "") -> str:
    """Return the share of draft tokens that the model accepted."""
    return ratio(rate(of(ACCEPTED), by), rate(of(DRAFTED), by))


def length(by: tuple[str, ...] | str = "") -> str:
    """Return the tokens per verification: those accepted, and the model's own."""
    return f"1 + {ratio(rate(of(ACCEPTED), by), rate(of(DRAFTS), by))}"


SPECULATION = (
    lines(
        "Acceptance rate",
        "Share of draft tokens that the target model accepted.",
        reasons.SPECULATION,
        Query(accepted(ENGINE), ENGINE_NAME),
        unit="percentunit",
        most=1,
    ),
    lines(
        "Acceptance length",
        "Tokens per verification, including the target model's own.",
        reasons.SPECULATION,
        Query(length(ENGINE), ENGINE_NAME),
    ),
    lines(
        "Draft tokens",
        "Draft tokens, accepted and rejected ones, and all generated tokens per second.",
        reasons.SPECULATION,
        Query(rate(of(DRAFTED)), "drafted"),
        Query(rate(of(ACCEPTED)), "accepted"),
        Query(f"{rate(of(DRAFTED))} - {rate(of(ACCEPTED))}", "rejected"),
        Query(
            f"{rate(of('vllm:generation_tokens_total'), ENGINE)} and {rate(of(DRAFTS), ENGINE)}",
            f"generated {ENGINE_NAME}",
        ),
        unit=TOKENS,
    ),
    lines(
        "Acceptance rate by position",
        (
            "Share of drafts whose token at a position was accepted. Positions that are hardly "
            "ever accepted cost more than they gain."
        ),
        reasons.SPECULATION,
        Query(
            ratio(rate(of(BY_POSITION), "position"), rate(of(DRAFTED_BY_POSITION), "position")),
            "position {{position}}",
        ),
        unit="percentunit",
        most=1,
    ),
    Panel(
        title="Acceptance rate by position, now",
        says="Share of drafts whose token at a position was accepted.",
        empty=reasons.SPECULATION,
        kind="bargauge",
        unit="percentunit",
        most=1,
        queries=[
            Query(
                ratio(rate(of(BY_POSITION), "position"), rate(of(DRAFTED_BY_POSITION), "position")),
                "position {{position}}",
            )
        ],
    ),
)

ADAPTERS = (
    lines(
        "Running requests by adapter",
        "Requests in batches that use an adapter.",
        reasons.LORA,
        Query(total(of("sidestep_lora_requests", state="running"), "adapter"), "{{adapter}}"),
        stacked=True,
    ),
    lines(
        "Waiting requests by adapter",
        "Requests that wait and use an adapter.",
        reasons.LORA,
        Query(total(of("sidestep_lora_requests", state="waiting"), "adapter"), "{{adapter}}"),
        stacked=True,
    ),
    Panel(
        title="LoRA adapters by engine",
        says="Running and waiting adapters of each engine, as an endpoint picker reads them.",
        empty=reasons.LORA,
        kind="table",
        width=24,
        height=5,
        queries=[
            Query(
                most(
                    info("vllm:lora_requests_info"),
                    (*PLACE, "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
                )
            )
        ],
        columns={
            **PLACE_COLUMNS,
            "max_lora": "Slots",
            "running_lora_adapters": "Running",
            "waiting_lora_adapters": "Waiting",
            "Value": "Since",
        },
        units={"Since": "dateTimeAsIso"},
    ),
)

OF_VLLM = (
    Row("Speculative decoding", SPECULATION, collapsed=True),
    Row("LoRA adapters", ADAPTERS, collapsed=True),
)
OF_SGLANG = (
    Row(
        "Speculative decoding",
        (
            lines(
                "Acceptance rate",
                "Share of draft tokens that were accepted since SGLang's previous report.",
                reasons.SGLANG_SPECULATION,
                Query(speculating("sglang:spec_accept_rate", RANK), RANK_NAME),
                unit="percentunit",
                most=1,
                width=12,
            ),
            lines(
                "Acceptance length",
                (
                    "Tokens per verification since SGLang's previous report, including the target model's"
                    " own."
                ),
                reasons.SGLANG_SPECULATION,
                Query(speculating("sglang:spec_accept_length", RANK), RANK_NAME),
                width=12,
            ),
        ),
        collapsed=True,
    ),
    Row(
        "LoRA adapters",
        (
            lines(
                "Adapter slots",
                "Adapter slots in use, and all adapter slots.",
                reasons.SGLANG_LORA,
                Query(once(sglang("sglang:lora_pool_slots_used")), "used"),
                Query(once(sglang("sglang:lora_pool_slots_total")), "capacity"),
                width=24,
            ),
        ),
        collapsed=True,
    ),
)
