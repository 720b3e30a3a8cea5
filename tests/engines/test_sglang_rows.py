"""SGLang's rows: every family of the engine, with the engine's kind, labels and bounds."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from sidestep.catalog import slo as objectives
from sidestep.catalog.buckets import DEFAULTS
from sidestep.catalog.row import Handler, Sampled
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.engines.sglang import request_rows
from sidestep.engines.sglang import rows as sglang
from sidestep.engines.sglang.wire import QueueCount, SglangSchedulerStats, SglangStats
from sidestep.engines.shared_rows import (
    MAX_RUNNING_REQUESTS,
    REFUSED_OBSERVATIONS,
    backlog,
    lookups,
    saturation,
    step_limits,
    uncached_backlog,
)
from sidestep.errors import WireError

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "sglang" / "metrics.json"
ROWS = {row.name: row for row in DIALECTS["sglang"].rows_for(legacy=True)}
LIVE = {name: row for name, row in ROWS.items() if row.status == "live"}
SATURATION = {row.name for row in saturation()}
LOOKUPS = {row.name for row in lookups()}
LIMITS = {row.name for row in step_limits(Sampled(), Sampled())}
BACKLOG = {row.name for row in (*backlog(Sampled(), Sampled()), uncached_backlog(shared=()))}
RANK = ("engine_type", "model_name", "moe_ep_rank", "pp_rank", "tp_rank")

BY_HAND = {
    "sglang:encoder_dp_pending_requests": {"dp_rank", "model_name"},
    "sglang:failed_session_recoveries_total": set[str](),
}
"""Labels of families whose entry does not list them."""


def reference() -> list[dict[str, Any]]:
    """Return every family of the engine's language models, as read off its source."""
    if not REFERENCE.exists():
        pytest.skip("the reference of the engine's families is not here")
    reported = json.loads(REFERENCE.read_text())["metrics"]
    return [entry for entry in reported if not entry["name"].startswith("sglang:diffusion_")]


def test_every_family_of_the_engine_has_a_row() -> None:
    """Only families that nothing fills have none; the other rows are this project's own."""
    names = {entry["name"] for entry in reference()}
    ours = {
        REFUSED_OBSERVATIONS.name,
        MAX_RUNNING_REQUESTS,
        *SATURATION,
        *LOOKUPS,
        *LIMITS,
        *BACKLOG,
        objectives.SLO_REQUESTS,
        objectives.SLO_UNDECIDED,
        *(row.name for row in request_rows.REQUESTS),
    }

    assert dict(sglang.DEAD).keys() == names - LIVE.keys()
    assert ours == LIVE.keys() - names


def test_rows_agree_with_the_engine() -> None:
    """Kind, label names and bucket bounds are the engine's."""
    wrong: list[tuple[object, ...]] = []
    for entry in reference():
        row = LIVE.get(entry["name"])
        if row is None:
            continue
        kind = entry["type"].partition(" ")[0]
        if row.kind != kind:
            wrong.append((row.name, row.kind, kind))
        labels = BY_HAND.get(row.name)
        if labels is None:
            reported = entry["labels"]
            reported = ast.literal_eval(reported) if isinstance(reported, str) else reported
            labels = {label for label in reported if not label.startswith("[")}
        if labels != set(row.labels) - ({"priority"} if row.omits_empty_labels else set()):
            wrong.append((row.name, row.labels, labels))
        reported = entry["buckets"]
        if isinstance(reported, dict):
            bounds: tuple[float, ...] = sglang.ROUTING_KEY_BOUNDS
            reported = reported["gauge_histogram_gt_le_bounds"]
        else:
            bounds = row.bounds or DEFAULTS.get(row.buckets, ())
        if tuple(map(float, reported or ())) != bounds:
            wrong.append((row.name, "bounds", bounds))

    assert [] == wrong


def test_every_field_of_the_stats_has_its_row() -> None:
    """Every field is a row's path or read by a handler."""
    read = set[str]()
    stats = (row for row in LIVE.values() if row.name.startswith(("sglang:", MAX_RUNNING_REQUESTS)))
    for row in stats:
        if isinstance(row.source, str):
            read.add(row.source.removeprefix("stats."))
        elif isinstance(row.source, Handler):
            read.add(row.source.name.partition(":")[2])

    assert set(SglangSchedulerStats.__struct_fields__) == read
    for row in LIVE.values():
        if isinstance(row.source, str | Handler) and row.name.startswith("sglang:"):
            assert set(RANK) == set(row.shared)


@pytest.mark.parametrize(
    "stats",
    [
        SglangSchedulerStats(fwd_occupancy=float("nan")),
        SglangSchedulerStats(gen_throughput=float("inf")),
        SglangSchedulerStats(num_grammar_queue_reqs=-1),
        SglangSchedulerStats(num_queue_reqs=QueueCount(-1)),
        SglangSchedulerStats(num_queue_reqs=QueueCount(1, {str(n): 1 for n in range(129)})),
        SglangSchedulerStats(routing_key_all_req_counts=[1] * 4097),
    ],
)
def test_stats_out_of_bounds_are_refused(stats: SglangSchedulerStats) -> None:
    """Numbers must be finite and lists bounded."""
    with pytest.raises(WireError):
        DIALECTS.decode(encode_item(SglangStats(0, 1.0, 2.0, stats)))
