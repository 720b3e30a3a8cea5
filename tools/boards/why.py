"""The dashboard that says why requests are slow: which limit binds, where their time goes, what to change."""

from __future__ import annotations

from collections.abc import Mapping

from tools.boards import reasons
from tools.boards.colors import LIMITS, PARTS
from tools.boards.dashboard import TARGET, Dashboard, Row, Variable
from tools.boards.engine_health import engine_events
from tools.boards.panels import DrillDown, LivePage, Panel, Query, Text
from tools.boards.queries import (
    ENGINE,
    PLACE_COLUMNS,
    RUNNING,
    WAITING,
    Histogram,
    Scope,
    grouped,
    once,
    once_rate,
    rate,
)
from tools.boards.shapes import lines
from tools.docs import flags_as_code

from sidestep.catalog.tuning import CAUSES
from sidestep.engines.dialects import DIALECTS

of = Scope("model_name")
LIMIT = "sidestep_step_limit_seconds_total"
PART = "sidestep_request_part_seconds_total"
ALL, FIRST = ".+", "front_end_in|queue|prefill|prefill_gap"
"""Patterns of the parts of the whole latency, and of those before the first token."""
BESIDE_QUEUE = {ALL: "!queue", FIRST: "~front_end_in|prefill|prefill_gap"}
DOCS = "https://sidestep.example/docs"
"""The place where an operator's copies of the documents are, as in the alerts."""
EACH = (*ENGINE, "dp_rank")
BUSY = "Busy time is the time with unfinished requests. `none`: no request waited."
EARLY = (
    "Parts before the first token: front end, queue and prefill. A preemption or a stall before the first"
    " token is left out."
)
LATENCIES = {
    "TTFT": "time_to_first_token_seconds",
    "E2E latency": "e2e_request_latency_seconds",
}
OF_ENGINE = (
    DrillDown("vLLM engine", "vllm", ("model_name", "instance")),
    DrillDown("SGLang engine", "sglang", ("model_name", "instance")),
    LivePage(),
)


def share(part: str, whole: str, by: tuple[str, ...] = ()) -> str:
    """Return the share of ``part``, which has more labels than ``by``, of ``whole``, which has these."""
    return f"{part} / on ({', '.join(by)}) group_left () ({whole} > 0)"


def limits(by: tuple[str, ...] = (), **matched: str) -> str:
    """Return the share of the busy time by limit."""
    held = once_rate(of(LIMIT, **matched), (*by, "limit"))
    return share(held, once_rate(of(LIMIT), by), by)


WAITED = limits(EACH, limit="!none")
"""Share of each engine's busy time in which a limit kept requests waiting."""


def parts(among: str) -> tuple[Query, Query]:
    """Return the share of each part in the time of the parts ``among``; the queue is divided by limit."""
    whole = rate(of(PART, part=f"~{among}"))
    return (
        Query(share(rate(of(PART, part=BESIDE_QUEUE[among]), "part"), whole), "{{part}}"),
        Query(share(rate(of(PART, part="queue"), "limit"), whole), "queue.{{limit}}"),
    )


def parts_of_models(among: str) -> Query:
    """Return the share of each part and limit, by model."""
    by = ("model_name",)
    selected = of(PART, part=f"~{among}")
    shares = share(rate(selected, (*by, "part", "limit")), rate(selected, by), by)
    return Query(f"{shares} > 0")


def bars(title: str, says: str, empty: str, *queries: Query, colors: Mapping[str, str]) -> Panel:
    """Return the present shares as bars."""
    return Panel(
        title=title,
        says=says,
        empty=empty,
        queries=queries,
        unit="percentunit",
        kind="bargauge",
        width=6,
        most=1,
        colors=colors,
    )


def latency(title: str) -> Panel:
    """Return the median and a high quantile of a latency, by engine."""
    found = {
        name: Histogram(of, f"{prefix}:{LATENCIES[title]}")
        for name, prefix in (("vLLM", "vllm"), ("SGLang", "sglang"))
    }
    return lines(
        f"{title}, p50 and p95",
        "How slow requests are, at the left of what their time goes to.",
        reasons.NO_TRAFFIC,
        *(
            Query(each.quantile(quantile), f"p{quantile * 100:g} {name}")
            for name, each in found.items()
            for quantile in (0.5, 0.95)
        ),
        unit="s",
        width=6,
    )


def parted(title: str, says: str, among: str) -> tuple[Panel, Panel]:
    """Return the shares of parts over time and now."""
    over_time = lines(
        f"{title} by part",
        says,
        reasons.PARTS,
        *parts(among),
        unit="percentunit",
        width=12,
        most=1,
        stacked=True,
        colors=PARTS,
    )
    now = bars(f"{title} by part, now", says, reasons.PARTS, *parts(among), colors=PARTS)
    return over_time, now


BINDING = (
    lines(
        "Time by limit",
        f"Share of the engines' busy time in which each limit kept the next request from the batch. {BUSY}",
        reasons.LIMITS,
        Query(limits(), "{{limit}}"),
        unit="percentunit",
        width=12,
        most=1,
        stacked=True,
        colors=LIMITS,
    ),
    bars("Time by limit, now", BUSY, reasons.LIMITS, Query(limits(), "{{limit}}"), colors=LIMITS),
    lines(
        "Steps by limit",
        "Steps per second, by what kept the next request from the batch when the step was scheduled.",
        reasons.LIMITS,
        Query(once_rate(of("sidestep_steps_total"), "limit"), "{{limit}}"),
        unit="cps",
        width=6,
        stacked=True,
        colors=LIMITS,
    ),
    Panel(
        title="Limit that binds most, by engine",
        says="The limit that kept requests waiting for the largest share of an engine's busy time.",
        empty=reasons.NO_LIMIT,
        kind="table",
        width=24,
        height=7,
        queries=[Query(f"{grouped('topk', EACH, f'1, {WAITED}')} > 0")],
        columns={
            "model_name": "Model",
            **PLACE_COLUMNS,
            "engine": "Engine",
            "origin": "Origin",
            "dp_rank": "Rank",
            "limit": "Limit",
            "Value": "Busy time",
        },
        units={"Busy time": "percentunit"},
        links=OF_ENGINE,
    ),
)

GOES = (
    latency("TTFT"),
    *parted("TTFT", f"Share of each part in the time to first tokens. {EARLY}", FIRST),
    latency("E2E latency"),
    *parted(
        "E2E latency",
        "Share of each part in the time of requests that ended; the parts of a request sum to its latency.",
        ALL,
    ),
    Panel(
        title="Parts by model",
        says=f"Share of each part in the present end-to-end latency and TTFT of a model. {EARLY}",
        empty=reasons.PARTS,
        kind="table",
        width=24,
        height=9,
        queries=[parts_of_models(ALL), parts_of_models(FIRST)],
        columns={
            "model_name": "Model",
            "part": "Part",
            "limit": "Limit of the queue",
            "Value #A": "Of E2E latency",
            "Value #B": "Of TTFT",
        },
        units={"Of E2E latency": "percentunit", "Of TTFT": "percentunit"},
        links=(
            DrillDown("vLLM engines", "vllm", ("model_name",)),
            DrillDown("SGLang engines", "sglang", ("model_name",)),
        ),
    ),
)

BACKLOG = (
    lines(
        "Waiting requests",
        "Requests in queues.",
        reasons.ENGINES,
        Query(once(of(*WAITING, priority=""), "model_name"), "{{model_name}}"),
        width=6,
    ),
    lines(
        "Tokens to prefill",
        (
            "Prompt tokens that are still to be computed, of waiting requests and of those in the batch. What a"
            " cache has of them is included."
        ),
        reasons.BACKLOG,
        Query(once(of("sidestep_unfinished_prefill_tokens"), "model_name"), "{{model_name}}"),
        width=6,
    ),
    lines(
        "Prompt tokens of waiting requests",
        "Prompt tokens of the requests that wait for a place in the batch.",
        reasons.BACKLOG,
        Query(once(of("sidestep_waiting_prompt_tokens"), "model_name"), "{{model_name}}"),
        width=6,
    ),
    lines(
        "Waiting tokens that no cache has",
        "Tokens of waiting requests without those in the prefix cache, where the engine looks them up early.",
        reasons.UNCACHED,
        Query(once(of("sidestep_waiting_uncached_tokens"), "model_name"), "{{model_name}}"),
        width=6,
    ),
)


def what_to_change() -> str:
    """Return the table of docs/tuning.md, a row for each cause."""
    text = (
        "Find the largest part or limit above, and change one thing at a time: a setting moves the wait as"
        " often as it ends it. `prefill`, `decode` and `queue.none` are the work itself: compute less, or use"
        " faster hardware. `sidestep why URL` names the cause with its evidence; the exporter's address is"
        f" the live page. [docs/tuning.md]({DOCS}/tuning.md) has the same table,"
        f" [docs/requests.md]({DOCS}/requests.md#where-the-time-went) explains the parts.\n\n"
        "| Limit or parts | it means | change | not if | look at |\n|---|---|---|---|---|\n"
    )
    for cause in CAUSES:
        keys = "<br>".join(f"`{part}`" for part in cause.parts)
        changes = [
            f"{DIALECTS[each.dialect].title}: {flags_as_code(each.text)}." for each in cause.changes
        ]
        cells = (
            keys,
            cause.meaning,
            "<br>".join([*changes, cause.otherwise]),
            cause.unless,
            cause.evidence,
        )
        text += f"| {' | '.join(cells)} |\n"
    return text


BOARD = Dashboard(
    file="why",
    title="Why is it slow",
    says="Which limit binds, where requests' time goes, how much work waits, and what to change.",
    tags=["llm", "slo"],
    variables=[*TARGET, Variable("model_name", "Model", Scope()(*RUNNING))],
    rows=[
        Row("Which limit binds", BINDING),
        Row("Where requests' time goes", GOES),
        Row("How much work waits", BACKLOG),
        Row(
            "What to change",
            (
                Text(
                    title="What to change",
                    says="What each limit and part means, and the settings that shorten it.",
                    text=what_to_change(),
                    height=26,
                ),
            ),
        ),
    ],
    annotations=engine_events(of),
    next={"latency": "Request latency", "vllm": "vLLM engine", "sglang": "SGLang engine"},
)
