"""Panels that many dashboards have: a number at the top, latencies over time, where they fall."""

from __future__ import annotations

from tools.boards.panels import QUANTILES, Panel, Query
from tools.boards.queries import Histogram

SATURATED = (0.8, 1.0)
"""Of the saturation: what autoscalers hold it at (docs/autoscaling.md), and where queues grow."""


def tile(
    title: str,
    says: str,
    empty: str,
    *queries: Query | str,
    unit: str = "short",
    width: int = 3,
    most: float | None = None,
    limits: tuple[float, float] | None = None,
) -> Panel:
    """One number, or one of each query, and how it went."""
    return Panel(
        title=title,
        says=says,
        empty=empty,
        queries=[Query(each, title) if isinstance(each, str) else each for each in queries],
        unit=unit,
        kind="stat",
        width=width,
        height=4,
        most=most,
        limits=limits,
    )


def lines(
    title: str,
    says: str,
    empty: str,
    *queries: Query,
    unit: str = "short",
    width: int = 8,
    most: float | None = None,
    limits: tuple[float, float] | None = None,
    stacked: bool = False,
) -> Panel:
    """Values over time."""
    return Panel(
        title=title,
        says=says,
        empty=empty,
        queries=queries,
        unit=unit,
        width=width,
        most=most,
        limits=limits,
        stacked=stacked,
    )


def quantiles(
    title: str, says: str, empty: str, histogram: Histogram, unit: str = "s", *, width: int = 8
) -> Panel:
    """Quantiles and the mean over time."""
    found = [Query(histogram.quantile(share), f"p{share * 100:g}") for share in QUANTILES]
    mean = Query(histogram.mean(), "mean")
    return lines(title, says, empty, *found, mean, unit=unit, width=width)


def heat(
    title: str, says: str, empty: str, histogram: Histogram, unit: str = "s", *, width: int = 8
) -> Panel:
    """How many observations fell where, over time."""
    return Panel(
        title=title,
        says=says,
        empty=empty,
        queries=[Query(histogram.heat(), "{{le}}")],
        unit=unit,
        kind="heatmap",
        width=width,
    )
