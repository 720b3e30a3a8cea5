"""Names SGLang once had, shown with ``--metrics.legacy`` for dashboards not yet moved.

Each is the same data as a family of today's engine. What cannot be had so is not
here: see ``LOST``.
"""

from __future__ import annotations

import dataclasses

from sidestep.catalog.model import Alias, Row
from sidestep.engines.sglang import request_rows as sglang_requests
from sidestep.engines.sglang import rows as sglang

LOST = (
    ("sglang:num_running_reqs_offline_batch", "the engine counts such requests no longer"),
    ("sglang:engine_startup_time", "one phase of sglang:startup_time_seconds"),
    ("sglang:engine_load_weights_time", "the phase load_weight of sglang:startup_time_seconds"),
)
"""Families of 0.5.4 that today's engine no longer has, and why they are in no row: a row shows
all children of another again, not one of them."""

_ROWS = {row.name: row for row in (*sglang.ROWS, *sglang_requests.ROWS)}


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
    # Guides and dashboards have this name; neither 0.5.4 nor 0.5.23 does.
    _old("ttft_seconds", "time_to_first_token_seconds"),
)
