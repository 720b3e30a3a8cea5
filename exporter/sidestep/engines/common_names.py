"""Families whose names are the same for every engine, derived from the engines' own data.

Where OpenTelemetry's conventions for generative AI have a name (``CONVENTIONS``), the family has that
name as Prometheus writes it and the recommended bounds; the other names are this project's. Bounds are
the same for all engines, so that one quantile covers a mixed fleet. The families are exposed with
``--metrics.common``, since each duplicates a family of the engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sidestep.catalog.row import ENGINE_LABELS, Kind, Row, Source
from sidestep.engines.row_builders import row

CONVENTIONS = "semantic-conventions-genai as of 2026-08 (status: Development)"
"""Source of the names and bounds."""
TOKEN_TYPE = "gen_ai_token_type"  # noqa: S105 - a label


def _family(kind: Kind, name: str, text: str, **more: Any) -> Row:
    """Return a row without a source, which each dialect has."""
    return row(kind, name, "", text, **more)


# The table is laid out by hand: name above text, two lines a family.
# fmt: off
FAMILIES: tuple[Row, ...] = (
    _family("histogram", "gen_ai_server_time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            buckets="gen_ai_time_to_first_token"),
    _family("histogram", "gen_ai_server_time_per_output_token_seconds",
            "Mean time per output token after the first, one observation per finished request.",
            buckets="gen_ai_time_per_output_token"),
    _family("histogram", "gen_ai_server_request_duration_seconds",
            "Time from a request's arrival to its end; SGLang counts aborted requests, vLLM does"
            " not.", buckets="gen_ai_request_duration"),
    _family("histogram", "gen_ai_client_token_usage",
            "Tokens of a finished request: prompt tokens (input) and generated tokens (output).",
            buckets="gen_ai_token_usage", own=(TOKEN_TYPE,), closed=("input", "output"),
            status="hidden", successor="the engine's own histograms of prompt and generated tokens"),
    _family("histogram", "sidestep_inter_token_latency_seconds",
            "Time between two consecutive outputs of a request.",
            buckets="gen_ai_time_per_output_token"),
    _family("histogram", "sidestep_request_queue_seconds",
            "Time from a request's entry into the queue until it was first scheduled.",
            buckets="gen_ai_request_duration"),
    _family("gauge", "sidestep_requests_running",
            "Requests in the batch that the model executes."),
    _family("gauge", "sidestep_requests_waiting",
            "Requests that wait to be scheduled."),
    _family("gauge", "sidestep_kv_cache_usage_ratio",
            "Share of the KV cache in use, of the fullest pool where there are several, from 0 to"
            " 1.", combine="max"),
    _family("counter", "sidestep_preemptions_total",
            "Times a running request lost its place in the batch because memory was short."),
    _family("counter", "sidestep_prefix_cache_looked_up_tokens_total",
            "Prompt tokens looked up in the prefix cache."),
    _family("counter", "sidestep_prefix_cache_found_tokens_total",
            "Prompt tokens found in the prefix cache; divided by those looked up, the hit rate."),
)
# fmt: on
_BY_NAME = {family.name: family for family in FAMILIES}


def common_row(
    name: str, source: Source, shared: tuple[str, ...] = ENGINE_LABELS, *, mirrored: bool = False
) -> Row:
    """Return a dialect's row of the family ``name``, which ``source`` feeds."""
    family = _BY_NAME[name]
    labels = tuple(sorted((*shared, *family.own_labels)))
    return dataclasses.replace(
        family, source=source, labels=labels, shared=shared, mirrored=mirrored
    )
