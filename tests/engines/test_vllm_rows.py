"""vLLM's rows: every family of the engine, with the engine's kind, labels and bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidestep.catalog.buckets import DEFAULTS, one_two_five
from sidestep.engines.dialects import DIALECTS

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "vllm" / "metrics.json"
ROWS = {row.name: row for row in DIALECTS["vllm"].rows_for(legacy=True)}

NOT_OURS = {
    "http": "the API server's own, not in the stream",
    "process": "of whatever process serves the page",
}
NO_ROW = {
    "vllm:tokens_total": "no release of the engine ever filled it",
    "vllm:request_params_best_of": "the parameter no longer exists; nothing to derive it from",
    "vllm:prompt_tokens_recomputed_total": "today's engine does not tell",
}


def reference() -> list[dict[str, Any]]:
    """Return every family of the engine, as read off its releases."""
    if not REFERENCE.exists():
        pytest.skip("the reference of the engine's families is not here")
    return [entry for entry in json.loads(REFERENCE.read_text()) if entry["group"] not in NOT_OURS]


def test_every_family_of_the_engine_has_a_row() -> None:
    """Only families that nothing could feed have none."""
    missing = {entry["name"] for entry in reference()} - ROWS.keys()

    assert set(NO_ROW) == missing


def test_rows_agree_with_the_engine() -> None:
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


def test_hidden_rows_name_a_successor() -> None:
    """HELP names a row, an expression of rows, or both."""
    hidden = [row for row in ROWS.values() if row.status != "live"]

    assert hidden
    for row in hidden:
        assert row.exposed_help.startswith(f"DEPRECATED: use {row.successor}")
        assert any(name in row.successor for name in ROWS if name != row.name)
