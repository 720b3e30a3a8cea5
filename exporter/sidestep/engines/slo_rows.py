"""What an operator's objectives count: the same names for vLLM and SGLang, and which families they read."""

from __future__ import annotations

from collections.abc import Mapping

from sidestep.catalog.model import ENGINE_LABELS, Hook, Row
from sidestep.engines.sglang.collectors import TOKENIZER

REQUESTS = "sidestep_slo_requests_total"
UNJUDGED = "sidestep_slo_unjudged_requests_total"
JUDGED = ("slo_requests", "slo_unjudged")
"""Hooks of the two."""
GOOD, BAD = RESULTS = "good", "bad"
AVAILABILITY = "availability"

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "ttft": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "inter_token": ("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds"),
    "time_per_output_token": (
        "vllm:request_time_per_output_token_seconds",
        "sglang:request_time_per_output_token_seconds",
    ),
    "e2e": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    "queue": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
}
"""Objectives that have a name of their own: the family of each engine."""


def _rows(
    shared: tuple[str, ...], *, extra: bool = False, mirrored: bool = False
) -> tuple[Row, ...]:
    return (
        Row(
            name=REQUESTS,
            kind="counter",
            source=Hook(JUDGED[0]),
            help="Requests (gaps between tokens, where the objective is about them) by whether"
            " they meet an objective of --slo: good is at most its threshold.",
            labels=tuple(sorted((*shared, "result", "slo"))),
            shared=shared,
            extra=extra,
            mirrored=mirrored,
        ),
        Row(
            name=UNJUDGED,
            kind="counter",
            source=Hook(JUDGED[1]),
            help="Requests in neither result of sidestep_slo_requests_total: they came as counts of"
            " buckets, of which the objective's threshold divides one.",
            labels=tuple(sorted((*shared, "slo"))),
            shared=shared,
            extra=extra,
            mirrored=mirrored,
        ),
    )


VLLM = _rows(ENGINE_LABELS)
# Queue times are told by every rank.
SGLANG = _rows(TOKENIZER.shared, extra=TOKENIZER.extra, mirrored=True)
