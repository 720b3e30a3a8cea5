"""Rows of llama.cpp against the families that the real server has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_servers import left_out, pages
from sidestep.catalog.row import Sampled
from sidestep_adapters.llamacpp.rows import ROWS

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "llamacpp" / "metrics.json"
KINDS = {row.name: row.kind for row in ROWS if isinstance(row.source, Sampled)}
LEFT_OUT = left_out()
MAXIMUM = "llamacpp:n_tokens_max"
"""A maximum, which the server calls a counter."""


@pytest.mark.parametrize("name", ["load", "speculative", "embeddings"])
def test_every_family_of_a_page_has_a_row_or_a_reason(name: str) -> None:
    """Kinds are the server's, but for the one that it mistakes."""
    types = [line.split()[2:] for line in pages(name)[-1]["body"].splitlines() if "# TYPE" in line]

    assert types
    for family, kind in types:
        if family not in LEFT_OUT:
            assert KINDS[family] == ("gauge" if family == MAXIMUM else kind)


def test_every_family_of_any_release_has_a_row_or_a_reason() -> None:
    """The reference lists those of older builds too, with their labels."""
    if not REFERENCE.exists():
        pytest.skip("the reference of the server's families is not here")
    rows = {row.name: row for row in ROWS}
    families = json.loads(REFERENCE.read_text())["families"]

    assert families
    for family in families:
        name = family["name"]
        assert (name in rows) != (name in LEFT_OUT), name
        if name in rows:
            assert rows[name].own_labels == tuple(family["labels"])
