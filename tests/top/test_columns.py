"""The table's entries, order and widths, and sparklines."""

from __future__ import annotations

import math

import pytest

from sidestep_tools.top.columns import (
    COLUMNS,
    Entry,
    Order,
    entries,
    fit,
    level,
    matches,
    ordered,
)
from sidestep_tools.top.history import History, sparkline, totals
from sidestep_tools.top.report import TargetReport, report
from top_reports import DOWN, URL, engine

LONG = "vllm-llama-7d9f6c7b9-x3k4p-in-a-long-namespace"


def listed(*targets: TargetReport) -> list[Entry]:
    """Return the entries of a report."""
    return entries(report(targets, 0.0))


def test_entries_of_a_failed_target() -> None:
    """A failed target is an entry before its last engines, whose numbers do not count as current."""
    found = listed(
        TargetReport(url=URL, engines=[engine(1)]),
        TargetReport(url=DOWN, error="refused", engines=[engine(1)], age=3.0),
    )
    assert [(entry.url, entry.row is None, entry.error) for entry in found] == [
        (URL, False, None), (DOWN, True, "refused"), (DOWN, False, "refused"),
    ]  # fmt: skip
    assert len({entry.key for entry in found}) == 3
    assert totals(found).running == 11
    history = History()
    history.add(found)
    assert [samples[0].running for samples in history.engines.values()] == [11, None]


def test_totals() -> None:
    """Sums are of what is known, and the highest share and latency stand for all."""
    rows = [engine(1, running=None), engine(2, kv_cache_usage=0.9), engine(3, ttft=None)]
    total = totals(listed(TargetReport(url=URL, engines=rows)))
    assert (total.running, total.waiting, total.kv_cache, total.ttft) == (25, 6, 0.9, 0.2)
    assert totals([]).running is None


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.key)
def test_every_column_sorts(column, reverse) -> None:  # type: ignore[no-untyped-def]
    """Any column sorts engines of which some have no value, and keeps all of them."""
    unknown = {
        name: None
        for name in engine(0).__struct_fields__
        if name not in {"id", "engine", "model", "dialect", "up"}
    }
    rows = [engine(1), engine(2, **unknown), engine(3, kv_cache_usage=math.nan, model="")]
    found = listed(TargetReport(url=URL, engines=rows))
    assert sorted(ordered(found, Order(column.key, reverse))) == sorted(found)


def test_states_sort_by_severity() -> None:
    """The worst state comes first, and unknown last."""
    states = ["ok", None, "stalled", "slow", "unreachable"]
    rows = [engine(number, state=state) for number, state in enumerate(states)]
    found = ordered(listed(TargetReport(url=URL, engines=rows)), Order("state"))
    assert [entry.row.state for entry in found if entry.row] == [
        "stalled", "unreachable", "slow", "ok", None,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["a", LONG])
def test_fit(name: str) -> None:
    """Columns never take more than there is, and every cell has room for its title."""
    row = engine(1, engine=name, model=name)
    found = listed(TargetReport(url=URL, engines=[row]))
    for width in range(10, 260):
        columns = fit(width, found)
        assert sum(cells + 1 for _, cells in columns) - 1 <= width
        assert all(len(column.title) < cells for column, cells in columns)
        texts = [(column.text(row, cells), cells) for column, cells in columns if not column.named]
        assert all(len(text) <= cells for text, cells in texts)


@pytest.mark.parametrize(
    ("usage", "found"),
    [
        (None, None),
        (math.nan, None),
        (0.649, None),
        (0.65, "warning"),
        (0.849, "warning"),
        (0.85, "critical"),
    ],
)
def test_levels(usage: float | None, found: str | None) -> None:
    """The KV cache warns from 65 % and is critical from 85 %."""
    kv = next(column for column in COLUMNS if column.key == "kv")
    assert level(kv, engine(1, kv_cache_usage=usage)) == found


def test_matches() -> None:
    """A filter finds engines by any of their names, and failed targets by their reason."""
    entry, failed = listed(
        TargetReport(url=URL, engines=[engine(7, model="Qwen", state="idle")]),
        TargetReport(url=DOWN, error="refused"),
    )
    assert all(matches(entry, text) for text in ("", "POD-7", "qwen", "vllm", "idle", "10.0.0.1"))
    assert not matches(entry, "llama")
    assert matches(failed, "refused")


def test_sparkline() -> None:
    """The newest value is at the right, zero is the lowest block and unknown is blank."""
    assert sparkline([0, 1, 2, 4, 8], 6) == [" ▁▁▂▄█"]
    assert sparkline([1, None, math.nan, math.inf, 1], 5) == ["█   █"]
    assert sparkline([9, 9, 0, 0], 2) == ["▁▁"]
    assert sparkline([], 3) == ["   "]
    assert sparkline([4, 8], 0) == [""]
    assert sparkline([0, 4, 6, 8], 4, height=2) == ["  ▄█", "▁███"]
