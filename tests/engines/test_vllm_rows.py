"""The tables: complete, exact, and refused where a row cannot work."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sidestep.catalog.buckets import DEFAULTS, one_two_five
from sidestep.catalog.layout_builder import compile_layout
from sidestep.catalog.model import Alias, Handler, Row, check
from sidestep.engines import dialects
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.vllm import rows as vllm
from sidestep.errors import CatalogueError

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "vllm" / "metrics.json"
ROWS = {row.name: row for row in dialects.DIALECTS["vllm"].rows_for(legacy=True)}

NOT_OURS = {
    "http": "the API server's own, not in the stream",
    "process": "of whatever process serves the page",
}
NO_ROW = {
    "vllm:tokens_total": "no release of the engine ever filled it",
    "vllm:request_params_best_of": "the parameter no longer exists; nothing to derive it from",
    "vllm:prompt_tokens_recomputed_total": "today's engine does not tell",
}
V0_NAMES = [
    "num_requests_running",
    "num_requests_swapped",
    "num_requests_waiting",
    "gpu_cache_usage_perc",
    "cpu_cache_usage_perc",
    "gpu_prefix_cache_hit_rate",
    "cpu_prefix_cache_hit_rate",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "time_in_queue_requests",
    "request_max_num_generation_tokens",
    "num_preemptions_total",
    "cache_config_info",
    "lora_requests_info",
    "iteration_tokens_total",
    "model_forward_time_milliseconds",
    "model_execute_time_milliseconds",
    "request_params_n",
    "request_params_max_tokens",
    "spec_decode_draft_acceptance_rate",
    "spec_decode_efficiency",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_emitted_tokens_total",
    "avg_prompt_throughput_toks_per_s",
    "avg_generation_throughput_toks_per_s",
]


def reference() -> list[dict[str, Any]]:
    """Every family of the engine, as it was read off its releases."""
    if not REFERENCE.exists():
        pytest.skip("the reference of the engine's families is not here")
    return [entry for entry in json.loads(REFERENCE.read_text()) if entry["group"] not in NOT_OURS]


def test_every_family_of_the_engine_has_a_row() -> None:
    """One row each, and none missing but those that nothing could feed."""
    missing = {entry["name"] for entry in reference()} - ROWS.keys()

    assert set(NO_ROW) == missing


def test_rows_say_what_the_engine_says() -> None:
    """Kind, label names and bucket bounds are the engine's."""
    wrong: list[tuple[object, ...]] = []
    for entry in reference():
        row = ROWS.get(entry["name"])
        if row is None or entry["name"] == "vllm:cache_config_info":
            continue
        bounds = row.bounds or DEFAULTS.get(row.buckets)
        if row.buckets == "request_tokens":
            bounds = one_two_five(2048)
        expected = tuple(map(float, entry["buckets"])) if entry["buckets"] else None
        if (row.kind, sorted(row.labels)) != (entry["type"], sorted(entry["labels"])):
            wrong.append((row.name, row.kind, row.labels))
        if expected is not None and bounds != expected:
            wrong.append((row.name, "bounds", bounds))

    assert [] == wrong


@pytest.mark.parametrize("name", V0_NAMES)
def test_every_name_of_the_old_engine_has_a_row(name: str) -> None:
    """Live under its name, or hidden until asked for."""
    assert f"vllm:{name}" in ROWS


def test_hidden_rows_say_what_to_use_instead() -> None:
    """HELP begins with DEPRECATED and names a row, an expression of rows, or both."""
    hidden = [row for row in ROWS.values() if row.status != "live"]

    assert hidden
    for row in hidden:
        assert row.exposed_help.startswith(f"DEPRECATED: use {row.successor}")
        assert any(name in row.successor for name in ROWS if name != row.name)


def test_hidden_rows_are_shown_only_when_asked_for() -> None:
    """Without the switch none of them is in the plan."""
    shown = {placed.row.status for placed in compile_layout(DIALECTS["vllm"]).assignments}

    assert "hidden" not in shown


def test_help_is_a_sentence_of_one_line() -> None:
    """A newline would be escaped, and an empty HELP helps nobody."""
    for row in ROWS.values():
        assert row.help.endswith(".")
        assert "\n" not in row.help


BASE = Row(name="vllm:x_total", kind="counter", source="iteration.prompt_tokens", help="X.")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"source": "iteration.no_such_field"}, "has no field no_such_field"),
        ({"source": "iteration.num_generation_tokens.deeper"}, "is no struct"),
        ({"source": "nowhere.x"}, "no item has a field nowhere"),
        ({"source": "scheduler[].num_running_reqs"}, "is no list of structs"),
        ({"source": "scheduler.running_lora_adapters"}, "has no label"),
        ({"source": "iteration.finished_requests[].e2e_latency"}, "needs a histogram"),
        ({"source": {"a": "iteration.prompt_tokens"}}, "one path for each value"),
        ({"source": Alias("vllm:other")}, "an alias of vllm:other"),
        ({"name": "vllm:x"}, "counters end in _total"),
        ({"name": "sidestep_x_total", "kind": "gauge"}, "counters end in _total"),
        ({"kind": "histogram"}, "a bucket family or bounds"),
        ({"labels": ("model_name", "engine")}, "sorted"),
        ({"closed": ("a",)}, "exactly one own label"),
        ({"status": "hidden"}, "names a successor"),
    ],
)
def test_a_row_that_cannot_work_stops_the_start(change: dict[str, Any], what: str) -> None:
    """The error names the row and what is wrong with it."""
    row = dataclasses.replace(BASE, **change)
    broken = dataclasses.replace(dialects.DIALECTS["vllm"], rows=(row,))

    with pytest.raises(CatalogueError, match=row.name) as caught:
        compile_layout(broken, legacy=True)

    assert what in str(caught.value)


def test_two_rows_of_one_name_are_refused() -> None:
    """A page must not show a family twice."""
    with pytest.raises(CatalogueError, match="two rows"):
        check((BASE, BASE))


def test_a_hook_without_a_function_is_refused() -> None:
    """A row that names one stops the start."""
    hooks = {row.source.name for row in ROWS.values() if isinstance(row.source, Handler)}
    layout = compile_layout(DIALECTS["vllm"])

    assert hooks == set(layout.handled)


def test_series_do_not_share_a_place() -> None:
    """Every scalar slot, histogram and keyed family belongs to one row."""
    layout = compile_layout(DIALECTS["vllm"], legacy=True)
    places = [
        (placed.storage, slot)
        for placed in layout.assignments
        if not isinstance(placed.row.source, Alias)
        for slot in placed.slots
    ]

    assert len(places) == len(set(places))


def test_the_engines_order_is_kept() -> None:
    """Rows stand in the order of the engine's own page."""
    names = [placed.row.name for placed in compile_layout(DIALECTS["vllm"]).assignments]

    assert names[: len(vllm.ROWS)] == [row.name for row in vllm.ROWS]


def test_every_dialect_has_structs_that_its_paths_begin_at() -> None:
    """A dialect without any could have no rows fed by plain fields."""
    assert all(dialect.structs for dialect in dialects.DIALECTS.values())
