"""Runs of a real SGLang that bring its metrics into all states, for tests and recordings."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from real_engines.load import Answer, Ask, Client
from real_engines.sglang_server import RETRACTING, TWO_RANKS, TWO_RANKS_ENVIRON

CUSTOM_LABELS = "x-custom-labels"
"""Header with the custom labels of a request."""
BOUNDS = {
    "sglang:time_to_first_token_seconds": "0.01 0.1 1.0",
    "sglang:inter_token_latency_seconds": "0.005 0.05 0.5",
    "sglang:request_time_per_output_token_seconds": "0.005 0.05 0.5",
    "sglang:e2e_request_latency_seconds": "0.25 2.5 25.0",
    "sglang:prompt_tokens_histogram": "10.0 100.0 1000.0",
    "sglang:generation_tokens_histogram": "92.0 96.0 98.0 100.0 102.0 104.0 108.0",
    "sglang:eviction_duration_seconds": "0.0001 0.01",
}
"""Bounds that ``LABELLED`` sets, by histogram."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Arguments and environment of a server, and the load on it."""

    load: Callable[[Client], Awaitable[list[Answer]]]
    arguments: Sequence[str] = ()
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)


async def mixed(client: Client) -> list[Answer]:
    """Request the mixed load, every second completion as a stream."""
    return await client.mixed(streams=2)


async def labelled(client: Client) -> list[Answer]:
    """Request sixty completions with different priorities and custom labels."""
    teams: list[dict[str, str]] = [
        {},
        {"team": "red"},
        {"team": "blue", "tier": "1"},
        {"unknown": "label"},
    ]

    def ask(turn: int) -> Ask:
        options: dict[str, Any] = {"ignore_eos": True}
        if turn % 5:
            options["priority"] = turn % 4
        headers = {CUSTOM_LABELS: json.dumps(teams[turn % len(teams)])}
        text = client.text(60)
        return Ask(text, 90 + turn % 20, stream=turn % 3 > 0, options=options, headers=headers)

    return await client.ask_all([ask(turn) for turn in range(60)])


MIXED = Run(mixed, environ=RETRACTING)
PARALLEL = Run(mixed, TWO_RANKS, {**TWO_RANKS_ENVIRON, **RETRACTING})
LABELLED = Run(
    labelled,
    shlex.split(
        "--enable-priority-scheduling --default-priority-value 3"
        " --tokenizer-metrics-allowed-custom-labels team tier"
        """ --extra-metric-labels '{"site": "here"}'"""
        " --bucket-time-to-first-token 0.01 0.1 1 --bucket-inter-token-latency 0.005 0.05 0.5"
        " --bucket-e2e-request-latency 0.25 2.5 25"
        " --prompt-tokens-buckets custom 10 100 1000 --generation-tokens-buckets tse 100 2 5"
    ),
    {"SGLANG_BUCKET_EVICTION_DURATION": "0.0001,0.01", **RETRACTING},
)
