"""Rows of panels about KV that one engine computes for another: hand-overs, and transfers by connector."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.dashboard import Row
from tools.boards.panels import Panel, Query
from tools.boards.queries import (
    PLACE,
    WINDOW,
    Histogram,
    Scope,
    grouped,
    most,
    once,
    once_rate,
    rate,
    ratio,
    total,
)
from tools.boards.shapes import TOKENS, lines

of = Scope("model_name")
ENGINE = (*PLACE, "job", "model_name", "engine", "origin")
"""Labels that all series of a vLLM engine have; the last only where an exporter has two with equal others."""
INFO, PART = "sidestep_engine_info", "sidestep_request_part_seconds_total"
HANDED_OVER, RECEIVED, AGAIN = (
    "sidestep_handed_over_requests_total",
    "sidestep_received_prompt_tokens_total",
    "sidestep_local_prefills_total",
)
SIGNS = {"prefill": HANDED_OVER, "decode": RECEIVED}
"""Counters that rise on each side, also at engines of vLLM whose role is both."""
MIB = 2**20
"""Bytes of a megabyte, as SGLang counts them."""


def side(role: str, expr: str) -> str:
    """Return the series of ``expr`` that belong to vLLM engines of a side."""
    by_role = grouped("max", ENGINE, of(INFO, role=role))
    return f"{expr} and on ({', '.join(ENGINE)}) ({by_role} or {rate(of(SIGNS[role]), ENGINE)} > 0)"


def held(title: str, says: str, expr: str, unit: str = "short") -> Panel:
    """Return a line per model about KV that its prefill engines hold."""
    return lines(title, says, reasons.KV_HELD, Query(expr, "{{model_name}}"), unit=unit)


def received(**matched: str) -> str:
    """Return the seconds per second of parts of the requests that vLLM's decode engines received."""
    return grouped("sum", "", side("decode", f"rate({of(PART, **matched)}{WINDOW})"))


def by_label(title: str, says: str, family: str, label: str, unit: str) -> Panel:
    """Return the rate of a counter by its own label."""
    query = Query(rate(of(family), label), f"{{{{{label}}}}}")
    return lines(title, says, reasons.HAND_OVERS, query, unit=unit, width=6, stacked=True)


HAND_OVER = (
    by_label(
        "Handed-over requests",
        "Requests that vLLM's prefill engines gave to another engine, by the reason with which they ended there."
        " If the service has many more, its router sends the others to one engine alone: see its rules and"
        " whether it finds the prefill engines.",
        HANDED_OVER,
        "reason",
        "reqps",
    ),
    by_label(
        "Received prompt tokens",
        "Prompt tokens that another engine computed for vLLM's decode engines, by the source of their KV there."
        " local_compute is prefill paid twice: ends of prompts that fill no block, and local prefills.",
        RECEIVED,
        "source",
        TOKENS,
    ),
    lines(
        "Local prefills",
        "Prompts that a decode engine computed again, since none of their KV came; 0 is normal. See failed"
        " transfers, then the log of the decode engine that the table below names.",
        reasons.HAND_OVERS,
        Query(rate(of(AGAIN), "model_name"), "{{model_name}}"),
        unit="reqps",
        width=6,
    ),
    lines(
        "Time that requests wait for KV",
        "Share of the time of decode engines' requests. transfer: the wait for KV alone. prefill_remote: from the"
        " arrival until the KV is there, prefill included. If transfer rises and transfers do not take longer,"
        " decode engines lack free KV blocks.",
        reasons.PARTS,
        Query(ratio(received(part="transfer"), received()), "transfer, vLLM"),
        Query(
            ratio(
                rate(of(PART, part="prefill_remote", engine_type="decode")),
                rate(of(PART, engine_type="decode")),
            ),
            "prefill_remote, SGLang",
        ),
        unit="percentunit",
        width=6,
        most=1,
    ),
    lines(
        "Requests whose KV is held",
        "Requests that a prefill engine has finished and whose KV it holds until it is fetched. If it only rises,"
        " see whether decode engines run, have free blocks, and are known to the router.",
        reasons.KV_HELD,
        Query(total(of("sidestep_kv_held_requests"), "model_name"), "{{model_name}}, vLLM"),
        Query(
            once(of("sglang:num_prefill_inflight_queue_reqs", priority=""), "model_name"),
            "{{model_name}}, SGLang",
        ),
    ),
    held(
        "KV blocks held",
        "KV blocks of these requests, which no prompt can use. If prompts wait meanwhile, add decode engines.",
        total(of("sidestep_kv_held_blocks"), "model_name"),
    ),
    held(
        "Longest hold",
        "Longest time for which KV of a request is held; at the connector's timeout it is dropped. Minutes mean"
        " that the router or a decode engine gave the request up: see their logs of that time.",
        most(of("sidestep_kv_held_longest_seconds"), "model_name"),
        "s",
    ),
)

TIMES = {
    "NIXL": ("vllm:nixl_xfer_time_seconds", ""),
    "Mooncake": ("vllm:mooncake_xfer_time_seconds", ""),
    "3FS": ("vllm:hf3fs_load_duration_seconds", ""),
    "SGLang": ("sglang:kv_transfer_latency_ms", " / 1000"),
}
BYTES = {
    "NIXL": ("vllm:nixl_bytes_transferred", ""),
    "Mooncake": ("vllm:mooncake_bytes_transferred", ""),
    "SGLang": ("sglang:kv_transfer_total_mb", f" * {MIB}"),
}
FAILURES = {
    "NIXL": "vllm:nixl_num_failed_transfers_total",
    "NIXL, not fetched": "vllm:nixl_num_kv_expired_reqs_total",
    "Mooncake, sender": "vllm:mooncake_num_failed_transfers_total",
    "Mooncake, receiver": "vllm:mooncake_num_failed_recvs_total",
    "Mooncake, not fetched": "vllm:mooncake_num_kv_expired_reqs_total",
    "3FS": "vllm:hf3fs_num_failed_load_total",
    "SGLang": "sglang:num_transfer_failed_reqs_total",
    "SGLang, handshake": "sglang:num_bootstrap_failed_reqs_total",
}
TRANSFERS = (
    lines(
        "Transfer time, p50 and p95",
        "Duration of transfers of KV. If it rises with the bytes, the network is full; if it rises alone, see"
        " whether the connector fell back to TCP.",
        reasons.TRANSFERS,
        *(
            Query(
                f"({Histogram(of, name).quantile(quantile)}){scale}", f"p{quantile * 100:g} {of_}"
            )
            for of_, (name, scale) in TIMES.items()
            for quantile in (0.5, 0.95)
        ),
        unit="s",
    ),
    lines(
        "Transferred bytes",
        "Bytes of KV per second. Compare them with the network's bandwidth; a smaller KV type, or hits in the"
        " decode engines' own caches, make them fewer.",
        reasons.TRANSFERS,
        *(
            Query(f"({Histogram(of, name).added()}){scale}", of_)
            for of_, (name, scale) in BYTES.items()
        ),
        unit="Bps",
    ),
    lines(
        "Failed transfers",
        "Failures per second; 0 is normal. Handshakes fail where an engine cannot be reached, transfers where it"
        " restarted or the network broke. Not fetched: see the longest hold.",
        reasons.TRANSFERS,
        *(Query(once_rate(of(name)), connector) for connector, name in FAILURES.items()),
        unit="cps",
    ),
)

ROWS = (Row("The hand-over", HAND_OVER), Row("Transfers by connector", TRANSFERS))
