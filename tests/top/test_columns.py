"""The table's entries, order and widths, and sparklines."""

from __future__ import annotations

import math

import pytest

from sidestep_tools.top.columns import (
    Entry,
    entries,
    fit,
)
from sidestep_tools.top.history import sparkline
from sidestep_tools.top.report import TargetReport, report
from top_reports import URL, engine

LONG = "vllm-llama-7d9f6c7b9-x3k4p-in-a-long-namespace"


def listed(*targets: TargetReport) -> list[Entry]:
    """Return the entries of a report."""
    return entries(report(targets, 0.0))


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


def test_sparkline() -> None:
    """The newest value is at the right, zero is the lowest block and unknown is blank."""
    assert sparkline([0, 1, 2, 4, 8], 6) == [" ▁▁▂▄█"]
    assert sparkline([1, None, math.nan, math.inf, 1], 5) == ["█   █"]
    assert sparkline([9, 9, 0, 0], 2) == ["▁▁"]
    assert sparkline([], 3) == ["   "]
    assert sparkline([4, 8], 0) == [""]
    assert sparkline([0, 4, 6, 8], 4, height=2) == ["  ▄█", "▁███"]
