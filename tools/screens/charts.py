"""Charts as SVG: lines, areas, and heatmaps of buckets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

from tools.screens.answers import Series, Span
from tools.screens.units import shown, ticks

COLORS = (
    "#3274d9", "#56a64b", "#e0b400", "#e02f44", "#a352cc", "#ff780a", "#1f9e9e", "#8f3bb8",
    "#37872d", "#8ab8ff", "#c4162a", "#7c6f00", "#ff9ecb", "#5794f2", "#96d98d", "#705da0",
)  # fmt: skip
THRESHOLDS = {"text": "#24292e", "green": "#2b8a3e", "orange": "#e8890c", "red": "#d6293e"}
"""Colors of thresholds."""
STATE_ROW, LEGEND = 15, 14
BOTTOM, TOP = 16, 6
LETTER = 5.7
"""Approximate width of a character."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """A chart area: positions of times and values within margins for labels."""

    span: Span
    left: float
    right: float
    height: float

    def x(self, at: float) -> float:
        """Return the position of a time."""
        share = (at - self.span.start) / (self.span.end - self.span.start)
        return self.left + (self.right - self.left) * share

    def y(self, share: float) -> float:
        """Return the position of a share of the height, from below."""
        return TOP + self.height * (1 - share)

    def label(self, share: float, name: str) -> str:
        """Return a text left of the chart."""
        y = self.y(share) + 3
        return f'<text x="{self.left - 5}" y="{y:.1f}" text-anchor="end">{escape(name)}</text>'

    def clock(self) -> str:
        """Return times of day below the chart, every half minute."""
        first = math.ceil(self.span.start / 30) * 30
        return "".join(
            f'<text x="{self.x(at):.1f}" y="{TOP + self.height + 12:.1f}" text-anchor="middle">'
            f"{datetime.fromtimestamp(at, timezone.utc):%H:%M:%S}</text>"
            for at in range(first, int(self.span.end) + 1, 30)
            if self.left + 20 < self.x(at) < self.right - 18
        )


def frame(span: Span, names: Sequence[str], width: int, height: float) -> Frame:
    """Return a chart area with space for the longest of ``names``."""
    return Frame(span, 14 + LETTER * max(map(len, names)), width - 8, height - BOTTOM - TOP)


def lines(
    panel: dict[str, Any], found: Sequence[Series], span: Span, width: int, height: int
) -> str:
    """Return a time series panel: axis, lines or stacked areas, and a legend."""
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    colors = colored(panel, found)
    below = legend(found, colors, width)
    stacks = stack(found) if stacked else [(each.values, {}) for each in found]
    most = max((value for top, _ in stacks for value in top.values()), default=0.0)
    edge = defaults.get("max", max(most, defaults["custom"].get("axisSoftMax", 0.0)))
    marks = ticks(edge, defaults["unit"])
    names = [shown(mark, defaults["unit"]) for mark in marks]
    at = frame(span, names, width, height - 14 * below.count("<div class=line>"))
    drawn = [at.clock()]
    for mark, name in zip(marks, names, strict=True):
        y = at.y(mark / marks[-1])
        drawn.append(f'<line x1="{at.left}" x2="{at.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(at.label(mark / marks[-1], name))
    drawn += limits(panel, at, marks[-1])
    for number, (top, bottom) in reversed(list(enumerate(stacks))):
        color = colors[number]
        for part in parts(top, span.step):
            points = [f"{at.x(time):.1f},{at.y(top[time] / marks[-1]):.1f}" for time in part]
            if len(part) == 1:
                x, _, high = points[0].partition(",")
                drawn.append(f'<circle cx="{x}" cy="{high}" r="1.5" fill="{color}"/>')
                continue
            if stacked:
                floor = [
                    f"{at.x(time):.1f},{at.y(bottom.get(time, 0) / marks[-1]):.1f}"
                    for time in reversed(part)
                ]
                area = " ".join([*points, *floor])
                drawn.append(f'<polygon points="{area}" fill="{color}" opacity="0.25"/>')
            drawn.append(f'<polyline points="{" ".join(points)}" stroke="{color}"/>')
    return f'<svg width="{width}" height="{TOP + at.height + BOTTOM}">{"".join(drawn)}</svg>{below}'


def timeline(
    panel: dict[str, Any], found: Sequence[Series], span: Span, width: int, height: int
) -> str:
    """Return a bar of states over time for each series, and the number of series without space."""
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    states = {float(value): each for value, each in mapping["options"].items()}
    there = (height - LEGEND - BOTTOM - TOP) // STATE_ROW
    shown_rows = found if len(found) <= there else found[: there - 1]
    names = [each.name if len(each.name) <= 44 else f"{each.name[:42]}…" for each in shown_rows]
    if len(found) > len(shown_rows):
        names.append(f"and {len(found) - len(shown_rows)} more")
    at = frame(span, names, width, BOTTOM + TOP + STATE_ROW * len(names))
    drawn = [at.clock()]
    for number, name in enumerate(names):
        drawn.append(at.label(1 - (number + 0.5) / len(names), name))
    for number, each in enumerate(shown_rows):
        y = TOP + STATE_ROW * number + 1
        for value in sorted(set(each.values.values())):
            color = states[value]["color"]
            times = {time: value for time, found_ in each.values.items() if found_ == value}
            for part in parts(times, span.step):
                left, right = at.x(part[0]), min(at.x(part[-1] + span.step), at.right)
                drawn.append(
                    f'<rect x="{left:.1f}" y="{y}" width="{right - left:.1f}"'
                    f' height="{STATE_ROW - 2}" fill="{color}"/>'
                )
    colors = {each["text"]: each["color"] for each in states.values()}
    below = "".join(
        f'<span><i style="background:{color}"></i>{escape(name)}</span>'
        for name, color in colors.items()
    )
    svg = f'<svg width="{width}" height="{TOP + at.height + BOTTOM}">{"".join(drawn)}</svg>'
    return f"{svg}<div class=line>{below}</div>"


def limits(panel: dict[str, Any], at: Frame, most: float) -> list[str]:
    """Return lines at the thresholds of a panel, if it shows them."""
    defaults = panel["fieldConfig"]["defaults"]
    if "thresholdsStyle" not in defaults["custom"]:
        return []
    return [
        f'<polyline points="{at.left},{at.y(step["value"] / most):.1f} {at.right},{at.y(step["value"] / most):.1f}"'
        f' stroke="{THRESHOLDS[step["color"]]}" stroke-dasharray="6 4"/>'
        for step in defaults["thresholds"]["steps"]
        if step["value"] is not None
    ]


def stack(found: Sequence[Series]) -> list[tuple[dict[float, float], dict[float, float]]]:
    """Return upper and lower edges of stacked series."""
    made = []
    under: dict[float, float] = {}
    for each in found:
        top = {at: under.get(at, 0.0) + value for at, value in each.values.items()}
        made.append((top, dict(under)))
        under |= top
    return made


def parts(values: dict[float, float], step: float) -> list[list[float]]:
    """Return runs of times without a gap."""
    made: list[list[float]] = []
    for at in sorted(values):
        if made and at - made[-1][-1] < 1.5 * step:
            made[-1].append(at)
        else:
            made.append([at])
    return made


def colored(panel: dict[str, Any], found: Sequence[Series]) -> list[str]:
    """Return the color of each series: that of its name, or the next one."""
    fixed = {
        override["matcher"]["options"]: each["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
        for each in override["properties"]
        if each["id"] == "color"
    }
    return [fixed.get(each.name, COLORS[number % len(COLORS)]) for number, each in enumerate(found)]


def legend(found: Sequence[Series], colors: Sequence[str], width: int) -> str:
    """Return names and colors in up to three lines, series that are always 0 last."""
    made: list[str] = []
    room = 0.0
    order = sorted(range(len(found)), key=lambda number: not any(found[number].values.values()))
    for shown_before, number in enumerate(order):
        each = found[number]
        name = each.name or "value"
        name = name if len(name) <= 44 else f"{name[:42]}…"
        needed = 5.6 * len(name) + 22
        if needed > room:
            if len(made) == 3:
                made[-1] += f"<span>and {len(found) - shown_before} more</span>"
                break
            made.append("")
            room = width - 70.0
        room -= needed
        color = colors[number]
        made[-1] += f'<span><i style="background:{color}"></i>{escape(name)}</span>'
    return "".join(f"<div class=line>{line}</div>" for line in made)


def heatmap(
    panel: dict[str, Any], found: Sequence[Series], span: Span, width: int, height: int
) -> str:
    """Return cells of time and bucket, darker with more observations."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    cumulative = sorted(found, key=lambda each: float(each.labels["le"]))
    counts: list[tuple[float, dict[float, float]]] = []
    under: dict[float, float] = {}
    for each in cumulative:
        own = {at: max(0.0, v - under.get(at, 0.0)) for at, v in each.values.items()}
        counts.append((float(each.labels["le"]), own))
        under = each.values
    there = [n for n, (_, own) in enumerate(counts) if any(value > 1e-9 for value in own.values())]
    if not there:
        return ""
    counts = counts[max(there[0] - 1, 0) : there[-1] + 2]
    most = max(value for _, own in counts for value in own.values())
    names = ["Inf" if math.isinf(bound) else shown(bound, unit) for bound, _ in counts]
    at = frame(span, names, width, height)
    high = 1 / len(counts)
    wide = (at.right - at.left) * span.step / (span.end - span.start)
    skip = math.ceil(13 / (at.height * high))
    drawn = [at.clock()]
    drawn += [at.label((n + 0.5) * high, name) for n, name in enumerate(names) if n % skip == 0]
    for number, (_, own) in enumerate(counts):
        y, tall = at.y((number + 1) * high), max(at.height * high - 0.5, 1)
        drawn += [
            f'<rect x="{at.x(time) - wide:.1f}" y="{y:.1f}" width="{wide - 0.5:.1f}"'
            f' height="{tall:.1f}" fill="{shade((value / most) ** 0.5)}"/>'
            for time, value in own.items()
            if value > 1e-9 and time > span.start
        ]
    return f'<svg width="{width}" height="{height}">{"".join(drawn)}</svg>'


def shade(share: float) -> str:
    """Return a blue from light to dark, in few steps, so that pictures stay small."""
    share = math.ceil(share * 12) / 12
    low, high = (214, 230, 244), (8, 48, 107)
    return "#" + "".join(
        f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True)
    )
