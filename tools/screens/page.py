"""A dashboard as an HTML page: panels in their positions, empty ones with their text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from tools.screens import charts
from tools.screens.answers import Series, Span, lines, rows, text
from tools.screens.units import shown

from prometheus_server import Prometheus

WIDTH, COLUMN, LINE, GAP, TITLE, HEAD = 1248, 52, 27, 6, 22, 66
ROW, ALERT = 20, 32
OF_ALERT = ("model_name", "engine", "slo", "reason", "instance")
"""Labels of an alert that are shown."""
CHARTS = {
    "timeseries": charts.lines,
    "heatmap": charts.heatmap,
    "state-timeline": charts.timeline,
}
"""Functions that draw the panels with an axis of time, by the type of the panel."""
MARKDOWN = MarkdownIt().enable("table")
STYLE = """
body { margin: 0; background: #f4f5f7; font: 11px 'DejaVu Sans', sans-serif; color: #24292e; }
h1 { position: absolute; left: 10px; top: 8px; margin: 0; font-size: 18px; }
.choice { position: absolute; left: 10px; top: 38px; color: #56606b; }
.choice b { background: #fff; border: 1px solid #d5d9de; padding: 2px 6px; margin-right: 10px; font-weight: normal; }
.row { position: absolute; font-size: 13px; font-weight: bold; padding: 6px 4px; }
.panel { position: absolute; background: #fff; border: 1px solid #dfe3e8; overflow: hidden; }
.panel h2 { font-size: 11px; margin: 0; padding: 4px 6px; height: 14px; white-space: nowrap; letter-spacing: -0.2px; }
.line { padding-left: 10px; height: 14px; white-space: nowrap; overflow: hidden; font-size: 9.5px; }
.line span { margin-right: 10px; } .line i { display: inline-block; width: 9px; height: 3px; margin: 0 4px 3px 0; }
svg { display: block; } svg polyline { fill: none; stroke-width: 1.3; } svg line { stroke: #e4e7eb; } svg text { font: 9.5px 'DejaVu Sans', sans-serif; fill: #56606b; }
.stats { display: flex; height: 100%; } .stats div { flex: 1; text-align: center; }
.stats b { display: block; white-space: nowrap; }
.stats small { color: #56606b; }
table { border-collapse: collapse; width: 100%; font-size: 11px; } tr { height: 20px; } td, th { text-align: left; padding: 0 8px; box-sizing: border-box; border-bottom: 1px solid #edf0f2; white-space: nowrap; max-width: 420px; overflow: hidden; text-overflow: ellipsis; }
.bar { display: flex; padding: 3px 10px; align-items: center; } .bar span { width: 90px; } .bar u { display: block; height: 12px; background: #3274d9; margin-right: 8px; }
.row small { font-weight: normal; color: #56606b; }
.alert { height: 26px; margin: 2px 8px 4px; padding-left: 6px; border-left: 4px solid; font-size: 9.5px; line-height: 13px; white-space: nowrap; overflow: hidden; }
.text { padding: 0 8px; } .text p { margin: 4px 0; } .text td { white-space: normal; max-width: none; padding: 3px 8px; }
.none { color: #56606b; padding: 18px 14px; text-align: center; }
"""


@dataclasses.dataclass
class Page:
    """A drawn dashboard.

    Attributes:
        empty: Titles of panels without data.
    """

    html: str
    height: int
    empty: list[str]


def page(server: Prometheus, board: dict[str, Any], span: Span) -> Page:
    """Draw a whole dashboard."""
    drawn: list[str] = []
    empty: list[str] = []
    bottom = 0
    for panel in board["panels"]:
        at = panel["gridPos"]
        left, top = 6 + at["x"] * COLUMN * (WIDTH - 12) // WIDTH, HEAD + at["y"] * LINE
        width, height = at["w"] * COLUMN * (WIDTH - 12) // WIDTH - GAP, at["h"] * LINE - GAP
        place = f'style="left:{left}px;top:{top}px;width:{width}px;height:{height}px"'
        bottom = max(bottom, top + height)
        if panel["type"] == "row":
            drawn.append(f"<div class=row {place}>{heading(panel)}</div>")
            continue
        if panel["type"] == "text":
            inside = f"<div class=text>{MARKDOWN.render(panel['options']['content'])}</div>"
        elif panel["type"] == "alertlist":
            inside = alerts(active(server, panel, span), height - TITLE)
        else:
            inside = body(server, panel, span, width, height - TITLE)
        if not inside:
            empty.append(panel["title"])
            inside = f"<div class=none>{escape(panel['fieldConfig']['defaults']['noValue'])}</div>"
        title = escape(text(panel["title"]))
        drawn.append(f"<div class=panel {place}><h2>{title}</h2>{inside}</div>")
    chosen = "".join(
        f"{escape(each['label'])} <b>{escape(str(each['current'].get('text', ['Prometheus'])).strip('[]' + chr(39)))}</b>"
        for each in board["templating"]["list"]
    )
    head = f"<h1>{escape(board['title'])}</h1><div class=choice>{chosen}</div>"
    html = f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{head}{''.join(drawn)}"
    return Page(html, bottom + 8, empty)


def heading(row: dict[str, Any]) -> str:
    """Return the heading of a row, with the number of panels if it is collapsed."""
    if not row["collapsed"]:
        return f"▾ {escape(row['title'])}"
    inside = len(row["panels"])
    return f"▸ {escape(row['title'])} <small>({inside} panel{'s' * (inside > 1)})</small>"


def body(server: Prometheus, panel: dict[str, Any], span: Span, width: int, height: int) -> str:
    """Return the content of a panel, or nothing if there is no data."""
    kind = panel["type"]
    if kind == "table":
        return table(panel, rows(server, panel, span), height)
    if kind == "heatmap":
        span = dataclasses.replace(span, step=span.step * 2)
    elif kind not in CHARTS:
        span = dataclasses.replace(span, start=span.end)
    found = lines(server, panel, span)
    if not found:
        return ""
    if kind in CHARTS:
        return CHARTS[kind](panel, found, span, width, height)
    if kind == "stat":
        return stat(panel, found, width, height)
    return bars(panel, found, width)


def stat(panel: dict[str, Any], found: Sequence[Series], width: int, height: int) -> str:
    """Return numbers side by side."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    each = width // len(found)
    made = []
    for series in found:
        value = shown(series.last, unit)
        size = min(26, int(each / (0.8 * max(len(value), 4))))
        color = threshold(panel, series.last)
        name = f"<small>{escape(series.name)}</small>" if len(found) > 1 else ""
        made.append(
            f'<div>{name}<b style="font-size:{size}px;color:{color}">{escape(value)}</b></div>'
        )
    return f'<div class=stats style="height:{height}px">{"".join(made)}</div>'


def threshold(panel: dict[str, Any], value: float) -> str:
    """Return the color of the highest threshold that ``value`` has reached."""
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return charts.THRESHOLDS[reached[-1]]


def table(panel: dict[str, Any], found: Sequence[dict[str, str | float]], height: int) -> str:
    """Return a table, and the number of rows that Grafana would scroll to."""
    if not found:
        return ""
    room = height // ROW - 1
    left_out = len(found) - room + 1 if len(found) > room else 0
    units = {
        each["matcher"]["options"]: found["value"]
        for each in panel["fieldConfig"]["overrides"]
        for found in each["properties"]
        if found["id"] == "unit"
    }
    head = "".join(f"<th>{escape(column)}</th>" for column in found[0])
    lines_ = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(shown(cell, units.get(column, 'short')) if isinstance(cell, float) else cell)}</td>"
            for column, cell in row.items()
        )
        + "</tr>"
        for row in found[: len(found) - left_out]
    )
    more = f"<tr><td>and {left_out} more</td></tr>" if left_out else ""
    return f"<table><tr>{head}</tr>{lines_}{more}</table>"


def active(server: Prometheus, panel: dict[str, Any], span: Span) -> list[dict[str, str]]:
    """Return the labels of the alerts that a panel names, the firing ones first."""
    query = f'ALERTS{{alertname=~".*{panel["options"]["alertName"]}.*"}}'
    found = [each["metric"] for each in server.get("query", query=query, time=span.end)["result"]]
    return sorted(found, key=lambda labels: (labels["alertstate"], labels["alertname"]))


def alerts(found: Sequence[dict[str, str]], height: int) -> str:
    """Return a line for each alert, and the number of alerts without space."""
    if not found:
        return "<div class=none>No alerts matching filters</div>"
    room = height // ALERT
    left_out = len(found) - room + 1 if len(found) > room else 0
    lines_ = ""
    for labels in found[: len(found) - left_out]:
        state = labels["alertstate"]
        color = charts.THRESHOLDS["red" if state == "firing" else "orange"]
        others = ", ".join(labels[name] for name in OF_ALERT if name in labels)
        lines_ += (
            f"<div class=alert style='border-color:{color}'>"
            f"<b>{escape(labels['alertname'])}</b> {state}<br>{escape(others)}</div>"
        )
    return lines_ + (f"<div class=line>and {left_out} more</div>" if left_out else "")


def bars(panel: dict[str, Any], found: Sequence[Series], width: int) -> str:
    """Return a bar for each series."""
    defaults = panel["fieldConfig"]["defaults"]
    most = defaults.get("max") or max(series.last for series in found) or 1.0
    return "".join(
        f"<div class=bar><span>{escape(series.name)}</span>"
        f'<u style="width:{max(1, round((width - 210) * min(series.last / most, 1)))}px"></u>'
        f"{escape(shown(series.last, defaults['unit']))}</div>"
        for series in found
    )
