"""Rows of former names of SGLang's families, exposed with ``--metrics.legacy`` for old dashboards.

Each has the same data as a family of current releases. Names without such a family have no row:
see ``LOST``.
"""

from __future__ import annotations

import dataclasses

from sidestep.catalog.row import Alias, Row
from sidestep.engines.sglang import request_rows, rows

LOST = (
    ("sglang:num_running_reqs_offline_batch", "the engine no longer counts such requests"),
    ("sglang:engine_startup_time", "one phase of sglang:startup_time_seconds"),
    ("sglang:engine_load_weights_time", "the phase load_weight of sglang:startup_time_seconds"),
)
"""Families of 0.5.4 that 0.5.23 does not have, and why they have no row: an alias has all children
of another row, never one of them."""

_ROWS = {row.name: row for row in (*rows.ROWS, *request_rows.ROWS)}


def _old(name: str, successor: str, *, until: str = "") -> Row:
    return dataclasses.replace(
        _ROWS[f"sglang:{successor}"],
        name=f"sglang:{name}",
        source=Alias(f"sglang:{successor}"),
        until=until,
        status="hidden",
        successor=f"sglang:{successor}",
    )


ROWS: tuple[Row, ...] = (
    _old("num_prefill_prealloc_queue_reqs", "num_prefill_bootstrap_queue_reqs", until="0.5.4"),
    _old("time_per_output_token_seconds", "inter_token_latency_seconds", until="0.4"),
    # Guides and dashboards use this name; neither 0.5.4 nor 0.5.23 has it.
    _old("ttft_seconds", "time_to_first_token_seconds"),
)
