"""SGLang's tables: every family of the engine, as the engine has it."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidestep.catalog import slo as objectives
from sidestep.catalog.buckets import DEFAULTS, SGLANG, checked
from sidestep.catalog.layout import exposed_names
from sidestep.catalog.layout_builder import compile_layout
from sidestep.catalog.model import Alias, Handler, Row, Sampled
from sidestep.engines import dialects
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import SglangStats, decode_item, encode_item
from sidestep.engines.sglang import legacy_rows
from sidestep.engines.sglang import rows as sglang
from sidestep.engines.sglang.wire import QueueCount, SchedulerStats
from sidestep.engines.vllm import own_rows
from sidestep.errors import WireError

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "sglang" / "metrics.json"
ROWS = {row.name: row for row in dialects.DIALECTS["sglang"].rows_for(legacy=True)}
LIVE = {name: row for name, row in ROWS.items() if row.status == "live"}
QUEUES = [row for row in LIVE.values() if row.omits_empty_labels]
RANK = ("engine_type", "model_name", "moe_ep_rank", "pp_rank", "tp_rank")

BY_HAND = {
    "sglang:encoder_dp_pending_requests": {"dp_rank", "model_name"},
    "sglang:failed_session_recoveries_total": set[str](),
}
"""Labels of families whose entry does not list them."""


def reference() -> list[dict[str, Any]]:
    """Every family of the engine's language models, as it was read off its source."""
    if not REFERENCE.exists():
        pytest.skip("the reference of the engine's families is not here")
    told = json.loads(REFERENCE.read_text())["metrics"]
    return [entry for entry in told if not entry["name"].startswith("sglang:diffusion_")]


def test_every_family_of_the_engine_has_a_row() -> None:
    """One row each, and none missing but those that nothing fills; nor is there any other but ours."""
    names = {entry["name"] for entry in reference()}
    ours = {
        own_rows.REFUSED.name,
        own_rows.SATURATION.name,
        objectives.SLO_REQUESTS,
        objectives.SLO_UNDECIDED,
    }

    assert dict(sglang.DEAD).keys() == names - LIVE.keys()
    assert ours == LIVE.keys() - names


def test_rows_say_what_the_engine_says() -> None:
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
            told = entry["labels"]
            told = ast.literal_eval(told) if isinstance(told, str) else told
            labels = {label for label in told if not label.startswith("[")}
        if labels != set(row.labels) - ({"priority"} if row.omits_empty_labels else set()):
            wrong.append((row.name, row.labels, labels))
        told = entry["buckets"]
        if isinstance(told, dict):
            bounds: tuple[float, ...] = sglang.ROUTING_KEY_BOUNDS
            told = told["gauge_histogram_gt_le_bounds"]
        else:
            bounds = row.bounds or DEFAULTS.get(row.buckets, ())
        if tuple(map(float, told or ())) != bounds:
            wrong.append((row.name, "bounds", bounds))

    assert [] == wrong


def test_every_name_that_has_gone_is_accounted_for() -> None:
    """Hidden until asked for, or named with the reason why not."""
    if not REFERENCE.exists():
        pytest.skip("the reference of the engine's families is not here")
    gone = {entry["name"] for entry in json.loads(REFERENCE.read_text())["removed_since_0_5_4"]}

    assert gone <= dict(legacy_rows.LOST).keys() | ROWS.keys()
    assert dict(legacy_rows.LOST).keys().isdisjoint(ROWS)


def test_dead_families_have_no_row() -> None:
    """They would show a 0 that means nothing."""
    assert dict(sglang.DEAD).keys().isdisjoint(ROWS)


def test_hidden_rows_show_a_live_one_again() -> None:
    """Same kind, labels and bounds: the children are the same ones."""
    hidden = [row for row in ROWS.values() if row.status == "hidden"]

    assert {"num_prefill_prealloc_queue_reqs", "time_per_output_token_seconds", "ttft_seconds"} == {
        row.name.removeprefix("sglang:") for row in hidden
    }
    for row in hidden:
        assert isinstance(row.source, Alias)
        shown = LIVE[row.source.name]
        assert _form(shown) == _form(row)
        assert row.exposed_help.startswith(f"DEPRECATED: use {shown.name}. ")


def _form(row: Row) -> tuple[object, ...]:
    return (
        row.kind, row.labels, row.shared, row.extra_labels, row.omits_empty_labels, row.buckets, row.bounds,
    )  # fmt: skip


def test_hidden_rows_are_shown_only_when_asked_for() -> None:
    """Without the switch none of them is in the plan."""
    names = {placed.row.name for placed in compile_layout(DIALECTS["sglang"]).assignments}
    all_names = {
        placed.row.name for placed in compile_layout(DIALECTS["sglang"], legacy=True).assignments
    }

    assert LIVE.keys() == names
    assert ROWS.keys() == all_names


def test_no_family_takes_a_name_of_another() -> None:
    """Neither as itself nor as a sample or as OpenMetrics' family of a counter."""
    names = Counter(name for row in ROWS.values() for name in exposed_names(row.name, row.kind))

    assert [] == [name for name, count in names.items() if count > 1]


def test_rows_bring_the_labels_of_their_engines() -> None:
    """Each row has all that its kind of engine brings; no kind's labels are another row's own."""
    layout = compile_layout(DIALECTS["sglang"])
    kinds = {row.shared for row in ROWS.values() if row is not own_rows.REFUSED}

    for row in ROWS.values():
        assert set(row.shared) <= set(row.labels)
        assert row.extra_labels == (row.shared == ("engine_type", "model_name"))
    assert layout.own_labels.isdisjoint(label for shared in kinds for label in shared)
    assert len(kinds) == 6
    # An optional one of a scheduler's.
    assert "dp_rank" not in layout.own_labels


def test_every_field_of_the_stats_has_its_row() -> None:
    """As a path, or through a function of its kind."""
    read = set[str]()
    for row in (row for row in LIVE.values() if row.name.startswith("sglang:")):
        if isinstance(row.source, str):
            read.add(row.source.removeprefix("stats."))
        elif isinstance(row.source, Handler):
            read.add(row.source.name.partition(":")[2])

    assert set(SchedulerStats.__struct_fields__) == read
    for row in LIVE.values():
        if isinstance(row.source, str | Handler) and row.name.startswith("sglang:"):
            assert set(RANK) == set(row.shared)


def test_queues_are_gauges_by_priority() -> None:
    """Seven of them; without priorities the label is not there."""
    assert len(QUEUES) == 7
    for row in QUEUES:
        assert Handler(f"queue:{row.name.removeprefix('sglang:')}") == row.source
        assert ("priority",) == row.own_labels


def test_options_hide_their_gauges() -> None:
    """Their fields are sent with all others, whatever is on."""
    gated = {name.removeprefix("sglang:") for name in compile_layout(DIALECTS["sglang"]).gated}

    assert gated == {
        "lora_pool_slots_used",
        "lora_pool_slots_total",
        "lora_pool_utilization",
        "hicache_host_used_tokens",
        "hicache_host_total_tokens",
        "hicache_host_mamba_used_states",
        "hicache_host_mamba_total_states",
        "num_streaming_sessions",
        "streaming_session_held_tokens",
    }


def test_refused_observations_are_one_family_of_all_dialects() -> None:
    """The very same row: the page has it once."""
    rows = [
        next(row for row in dialect.rows if row.name == own_rows.REFUSED.name)
        for dialect in dialects.DIALECTS.values()
        if not dialect.has_own_namespace
    ]

    assert all(row is own_rows.REFUSED for row in rows)


def test_bucket_families_are_rows_and_can_be_set() -> None:
    """Each is some row's, and what an operator may write instead."""
    assert {row.buckets for row in LIVE.values()} - {""} == SGLANG.keys()
    for family, bounds in SGLANG.items():
        assert bounds == checked(family, bounds) == DEFAULTS[family]


def test_help_is_a_sentence_of_one_line() -> None:
    """A newline would be escaped, and an empty HELP helps nobody."""
    for row in ROWS.values():
        assert row.help.endswith(".")
        assert "\n" not in row.help
    texts = Counter(row.help for row in LIVE.values())
    assert [] == [text for text, count in texts.items() if count > 1]


def test_what_is_not_of_the_stats_describes_itself() -> None:
    """One way for each of the engine's families; ours is computed."""
    for row in LIVE.values():
        if row is not sglang.SATURATION:
            assert isinstance(row.source, Sampled | Handler | str)


def test_stats_travel_as_they_are() -> None:
    """What the engine did not say stays unsaid."""
    stats = SchedulerStats(
        num_running_reqs=QueueCount(3, {"0": 1, "7": 2}),
        gen_throughput=17.5,
        num_used_tokens=-6,
        routing_key_all_req_counts=[1, 2],
    )
    item = SglangStats(0, 1.0, 2.0, stats)

    decoded = decode_item(encode_item(item))

    assert item == decoded
    assert stats.fwd_occupancy is None


@pytest.mark.parametrize(
    "stats",
    [
        SchedulerStats(fwd_occupancy=float("nan")),
        SchedulerStats(gen_throughput=float("inf")),
        SchedulerStats(num_grammar_queue_reqs=-1),
        SchedulerStats(num_queue_reqs=QueueCount(-1)),
        SchedulerStats(num_queue_reqs=QueueCount(1, {str(n): 1 for n in range(129)})),
        SchedulerStats(routing_key_all_req_counts=[1] * 4097),
    ],
)
def test_stats_out_of_bounds_are_refused(stats: SchedulerStats) -> None:
    """No number that a page could not show, and no more than one engine has."""
    with pytest.raises(WireError):
        decode_item(encode_item(SglangStats(0, 1.0, 2.0, stats)))


def test_an_older_engine_says_less() -> None:
    """Fields at the end, which it does not know, are absent."""
    raw = msgspec.msgpack.encode(["gs", 0, 1.0, 2.0, [[2], None, 1]])

    item = decode_item(raw)

    assert isinstance(item, SglangStats)
    assert QueueCount(2) == item.stats.num_running_reqs
    assert item.stats.num_queue_reqs is None
    assert item.stats.routing_key_all_req_counts is None
