"""Rows of TensorRT-LLM against the families read from its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pages import parse
from sidestep.engines.trtllm.page_rows import PREFIX, ROWS, SHARED, UNMAPPED, UNPREFIXED
from trtllm_servers import made_page

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "trtllm" / "metrics.json"
BY_NAME = {row.name: row for row in ROWS}


def reference() -> list[dict[str, Any]]:
    """Return the families of the reference."""
    if not REFERENCE.exists():
        pytest.skip("the reference of the server's families is not here")
    found: list[dict[str, Any]] = json.loads(REFERENCE.read_text())["families"]
    return found


def test_every_family_has_a_row_or_a_reason() -> None:
    """Kind, labels and default bounds are the source's."""
    families = reference()

    assert families
    for family in families:
        name = family["name"]
        assert (name in BY_NAME) != (name in UNMAPPED), name
        if name in BY_NAME:
            row = BY_NAME[name]
            own = {label.removesuffix("?") for label in family["labels"]} - {*SHARED}
            assert (row.kind, set(row.own_labels)) == (family["kind"], own), name
            assert list(row.bounds) == family["buckets"], name


def test_no_row_is_made_up() -> None:
    """Each has a family in the reference."""
    assert BY_NAME.keys() <= {family["name"] for family in reference()}


def test_every_family_of_the_constructed_page_has_a_row() -> None:
    """The page that prometheus_client wrote has no family without one, and kinds agree."""
    for name, family in parse(made_page()).items():
        row = BY_NAME.get(name) or BY_NAME[f"{name}_total"]
        assert row.kind == family.kind


def test_old_names_have_rows() -> None:
    """The five families of 1.2 got the prefix later."""
    assert {f"{PREFIX}{name}" for name in UNPREFIXED} <= BY_NAME.keys()
    assert all(UNMAPPED.values())
