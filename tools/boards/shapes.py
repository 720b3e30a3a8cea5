"""Panels that many dashboards share: tiles, lines, quantiles and heatmaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tools.boards.panels import QUANTILES, DrillDown, LivePage, Panel, Query
from tools.boards.queries import Histogram

TOKENS = "count:tokens/s"
"""Grafana's unit of token rates."""
SATURATED = (0.8, 1.0)
"""Limits of saturation: the autoscalers' target (docs/autoscaling.md), and where queues grow."""


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
    """Return a panel of present numbers, one per query."""
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
    colors: Mapping[str, str] = MappingProxyType({}),
    links: Sequence[DrillDown | LivePage] = (),
) -> Panel:
    """Return a panel of values over time."""
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
        colors=colors,
        links=links,
    )


def quantiles(
    title: str, says: str, empty: str, histogram: Histogram, unit: str = "s", *, width: int = 8
) -> Panel:
    """Return a panel of quantiles and the mean over time."""
    found = [Query(histogram.quantile(share), f"p{share * 100:g}") for share in QUANTILES]
    mean = Query(histogram.mean(), "mean")
    return lines(title, says, empty, *found, mean, unit=unit, width=width)


def heat(
    title: str, says: str, empty: str, histogram: Histogram, unit: str = "s", *, width: int = 8
) -> Panel:
    """Return a heatmap of observations over time."""
    return Panel(
        title=title,
        says=says,
        empty=empty,
        queries=[Query(histogram.heat(), "{{le}}")],
        unit=unit,
        kind="heatmap",
        width=width,
    )
