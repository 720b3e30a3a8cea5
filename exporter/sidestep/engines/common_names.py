"""Families whose names are the same for every engine, derived from the engines' own data.

Where OpenTelemetry's conventions for generative AI have a name (``CONVENTIONS``), the family has that
name as Prometheus writes it and the recommended bounds; the other names are this project's. Bounds are
the same for all engines, so that one quantile covers a mixed fleet. The families are exposed with
``--metrics.common``, since each duplicates a family of the engine.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from sidestep.catalog.row import ENGINE_LABELS, Combine, Kind, Row, Source
from sidestep.engines.row_builders import row

CONVENTIONS = "semantic-conventions-genai as of 2026-08 (status: Development)"
"""Source of the names and bounds."""
TOKEN_TYPE = "gen_ai_token_type"  # noqa: S105 - a label


class Common(NamedTuple):
    """One family.

    Attributes:
        successor: Replacement of a name that the conventions do not define for servers.
    """

    name: str
    kind: Kind
    help: str
    buckets: str = ""
    combine: Combine = "sum"
    closed: tuple[str, ...] = ()
    successor: str = ""


# The table is laid out by hand: name above text, two lines a family.
# fmt: off
FAMILIES: tuple[Common, ...] = (
    Common("gen_ai_server_time_to_first_token_seconds", "histogram",
           "Time from a request's arrival to its first token.",
           buckets="gen_ai_time_to_first_token"),
    Common("gen_ai_server_time_per_output_token_seconds", "histogram",
           "Mean time per output token after the first, one observation per finished request.",
           buckets="gen_ai_time_per_output_token"),
    Common("gen_ai_server_request_duration_seconds", "histogram",
           "Time from a request's arrival to its end; SGLang counts aborted requests, vLLM does"
           " not.", buckets="gen_ai_request_duration"),
    Common("gen_ai_client_token_usage", "histogram",
           "Tokens of a finished request: prompt tokens (input) and generated tokens (output).",
           buckets="gen_ai_token_usage", closed=("input", "output"),
           successor="the engine's own histograms of prompt and generated tokens"),
    Common("sidestep_inter_token_latency_seconds", "histogram",
           "Time between two consecutive outputs of a request.",
           buckets="gen_ai_time_per_output_token"),
    Common("sidestep_request_queue_seconds", "histogram",
           "Time from a request's entry into the queue until it was first scheduled.",
           buckets="gen_ai_request_duration"),
    Common("sidestep_requests_running", "gauge",
           "Requests in the batch that the model executes."),
    Common("sidestep_requests_waiting", "gauge",
           "Requests that wait to be scheduled."),
    Common("sidestep_kv_cache_usage_ratio", "gauge",
           "Share of the KV cache in use, of the fullest pool where there are several, from 0 to"
           " 1.", combine="max"),
    Common("sidestep_preemptions_total", "counter",
           "Times a running request lost its place in the batch because memory was short."),
    Common("sidestep_prefix_cache_looked_up_tokens_total", "counter",
           "Prompt tokens looked up in the prefix cache."),
    Common("sidestep_prefix_cache_found_tokens_total", "counter",
           "Prompt tokens found in the prefix cache; divided by those looked up, the hit rate."),
)
# fmt: on
_BY_NAME = {family.name: family for family in FAMILIES}


def common_row(
    name: str, source: Source, shared: tuple[str, ...] = ENGINE_LABELS, *, mirrored: bool = False
) -> Row:
    """Return a dialect's row of the family ``name``, which ``source`` feeds."""
    family = _BY_NAME[name]
    made = row(
        family.kind,
        name,
        source,
        family.help,
        own=(TOKEN_TYPE,) if family.closed else (),
        shared=shared,
        closed=family.closed,
        buckets=family.buckets,
        combine=family.combine,
        mirrored=mirrored,
    )
    if not family.successor:
        return made
    return dataclasses.replace(made, status="hidden", successor=family.successor)
