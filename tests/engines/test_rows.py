"""Rows of all dialects: what each must have, and which prevent the start."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from sidestep.catalog.layout import exposed_names
from sidestep.catalog.layout_builder import compile_layout
from sidestep.catalog.row import Alias, Row, check
from sidestep.engines.dialect import Dialect
from sidestep.engines.dialects import DIALECTS
from sidestep.errors import CatalogueError

of_each_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


@of_each_dialect
def test_a_layout_has_the_rows_in_their_order(dialect: Dialect) -> None:
    """Hidden rows need the flag for legacy names."""
    shown = [assignment.row for assignment in compile_layout(dialect).assignments]
    everything = [a.row for a in compile_layout(dialect, legacy=True).assignments]

    assert everything == [*dialect.rows]
    assert shown == [row for row in dialect.rows if row.status != "hidden"]


@of_each_dialect
def test_help_is_a_sentence_of_one_line(dialect: Dialect) -> None:
    """A newline would be escaped; an empty HELP, or that of another family, says nothing."""
    for row in dialect.rows_for(legacy=True, common=True):
        assert row.help.endswith(".")
        assert "\n" not in row.help
    texts = Counter(row.help for row in dialect.rows if row.status == "live")
    assert [] == [text for text, count in texts.items() if count > 1]


@of_each_dialect
def test_no_two_families_of_a_page_share_a_name(dialect: Dialect) -> None:
    """A name may be that of the family, of a sample or of OpenMetrics' family of a counter."""
    rows = dialect.rows_for(legacy=True, common=True)
    names = Counter(name for row in rows for name in exposed_names(row.name, row.kind))

    assert [] == [name for name, count in names.items() if count > 1]


@of_each_dialect
def test_no_two_rows_share_a_slot(dialect: Dialect) -> None:
    """Every scalar, histogram and keyed slot belongs to one row and its aliases."""
    slots = [
        (assignment.storage, slot)
        for assignment in compile_layout(dialect, legacy=True, common=True).assignments
        if not isinstance(assignment.row.source, Alias)
        for slot in assignment.slots
    ]

    assert len(slots) == len(set(slots))


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
def test_an_invalid_row_prevents_the_start(change: dict[str, Any], what: str) -> None:
    """The error names the row and its mistake."""
    row = dataclasses.replace(BASE, **change)
    broken = dataclasses.replace(DIALECTS["vllm"], rows=(row,))

    with pytest.raises(CatalogueError, match=row.name) as caught:
        compile_layout(broken, legacy=True)

    assert what in str(caught.value)


def test_two_rows_of_one_name_are_refused() -> None:
    """A page must not have a family twice."""
    with pytest.raises(CatalogueError, match="two rows"):
        check((BASE, BASE))
