"""Speculative decoding, whether it pays, and LoRA adapters, which of them run and wait."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.dashboard import TARGET, Dashboard, Row, Variable
from tools.boards.panels import Panel, Query
from tools.boards.queries import Scope, grouped, most, once, rate, ratio, total
from tools.boards.shapes import lines, tile

of = Scope("model_name", "engine", "job", "instance")
info = Scope("job", "instance")
"""``vllm:lora_requests_info`` has neither model nor engine."""
sglang = Scope("model_name", "job", "instance")
EACH = ("instance", "engine")
NAME = "{{instance}} {{engine}}"
RANK = ("instance", "dp_rank")

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
DRAFTED_BY_POSITION = "sidestep_spec_decode_draft_tokens_per_position_total"


def speculating(family: str, by: tuple[str, ...] | str = "") -> str:
    """A gauge of SGLang; 0 tokens a verification means that nothing speculates."""
    return grouped("avg", by, f"{sglang(family)} and {sglang('sglang:spec_accept_length')} > 0")


def accepted(by: tuple[str, ...] | str = "") -> str:
    """Share of drafted tokens that the model accepted."""
    return ratio(rate(of(ACCEPTED), by), rate(of(DRAFTED), by))


def length(by: tuple[str, ...] | str = "") -> str:
    """Tokens that a verification gives: those accepted, and the model's own."""
    return f"1 + {ratio(rate(of(ACCEPTED), by), rate(of(DRAFTS), by))}"


TILES = (
    tile(
        "Accepted",
        "Share of drafted tokens that the model accepted.",
        reasons.SPECULATION,
        accepted(),
        unit="percentunit",
        width=4,
        most=1,
    ),
    tile(
        "Tokens a verification",
        "Tokens that a verification gives, the model's own included; 1 is what it gives without speculation.",
        reasons.SPECULATION,
        length(),
        width=4,
    ),
    tile(
        "Rejected draft tokens",
        "Drafted tokens in a second that were not accepted: work for nothing.",
        reasons.SPECULATION,
        f"{rate(of(DRAFTED))} - {rate(of(ACCEPTED))}",
        unit="cps",
        width=4,
    ),
    tile(
        "Accepted, SGLang",
        "Share of drafted tokens that were accepted since SGLang's report before.",
        reasons.SGLANG_SPECULATION,
        speculating("sglang:spec_accept_rate"),
        unit="percentunit",
        width=4,
        most=1,
    ),
    tile(
        "Adapters running",
        "LoRA adapters that have requests in a batch.",
        reasons.LORA,
        f"count ({total(of('sidestep_lora_requests', state='running'), 'adapter')} > 0) or 0 * {total(of('sidestep_lora_requests'))}",
        width=4,
    ),
    tile(
        "Waiting for an adapter",
        "Requests of adapters that wait; seen whole where the core is tapped.",
        reasons.LORA,
        total(of("sidestep_lora_requests", state="waiting")),
        width=4,
    ),
)

SPECULATION = (
    lines(
        "Accepted",
        "Share of drafted tokens that the model accepted.",
        reasons.SPECULATION,
        Query(accepted(EACH), NAME),
        unit="percentunit",
        most=1,
    ),
    lines(
        "Tokens a verification",
        "Tokens that a verification gives, the model's own included.",
        reasons.SPECULATION,
        Query(length(EACH), NAME),
    ),
    lines(
        "Tokens",
        "Drafted and accepted tokens in a second, and all that were generated.",
        reasons.SPECULATION,
        Query(rate(of(DRAFTED)), "drafted"),
        Query(rate(of(ACCEPTED)), "accepted"),
        Query(
            f"{rate(of('vllm:generation_tokens_total'), EACH)} and {rate(of(DRAFTS), EACH)}",
            f"generated {NAME}",
        ),
        unit="cps",
    ),
    lines(
        "Accepted by position",
        "Share of drafts whose token at a position was accepted; what is left of a position that is hardly ever accepted is work for nothing.",
        reasons.SPECULATION,
        Query(
            ratio(rate(of(BY_POSITION), "position"), rate(of(DRAFTED_BY_POSITION), "position")),
            "position {{position}}",
        ),
        unit="percentunit",
        most=1,
    ),
    Panel(
        title="Accepted by position, now",
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
    lines(
        "SGLang",
        "Tokens a verification gave since SGLang's report before, its own included.",
        reasons.SGLANG_SPECULATION,
        Query(speculating("sglang:spec_accept_length", RANK), "{{instance}} {{dp_rank}}"),
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
    lines(
        "SGLang's slots",
        "Slots for adapters in use, and all of them.",
        reasons.SGLANG_LORA,
        Query(once(sglang("sglang:lora_pool_slots_used")), "used"),
        Query(once(sglang("sglang:lora_pool_slots_total")), "all"),
    ),
    Panel(
        title="What routers read",
        says="The adapters that each engine runs and has waiting, as an endpoint picker sees them.",
        empty=reasons.LORA,
        kind="table",
        width=24,
        height=5,
        queries=[
            Query(
                most(
                    info("vllm:lora_requests_info"),
                    ("instance", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
                )
            )
        ],
        columns={
            "instance": "Exporter",
            "max_lora": "Slots",
            "running_lora_adapters": "Running",
            "waiting_lora_adapters": "Waiting",
            "Value": "Since",
        },
        units={"Since": "dateTimeAsIso"},
    ),
)

BOARD = Dashboard(
    file="speculation-lora",
    title="Speculative decoding and LoRA",
    says="Whether speculative decoding pays, and which LoRA adapters run and wait.",
    tags=["llm", "speculative-decoding", "lora"],
    variables=[
        *TARGET,
        Variable(
            "model_name",
            "Model",
            '{__name__=~"vllm:num_requests_running|sglang:num_running_reqs",job=~"$job",instance=~"$instance"}',
        ),
        Variable(
            "engine",
            "Engine",
            'vllm:num_requests_running{model_name=~"$model_name",job=~"$job",instance=~"$instance"}',
        ),
    ],
    rows=[
        Row("Now", TILES),
        Row("Speculative decoding", SPECULATION),
        Row("LoRA adapters", ADAPTERS),
    ],
)
