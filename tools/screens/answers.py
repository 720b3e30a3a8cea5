"""Prometheus' answers to the queries of a dashboard's panels."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from boards import filled
from prometheus_server import Prometheus

WINDOW = "15s"
"""Value of ``$__rate_interval`` unless a span has another."""
VARIABLES = {"__rate_interval": WINDOW, "ttft": "1.0", "itl": "0.1", "e2e": "10.0"}


@dataclasses.dataclass
class Series:
    """A line: its legend, and its values by time without NaN."""

    name: str
    labels: dict[str, str]
    values: dict[float, float]

    @property
    def last(self) -> float:
        """Latest value."""
        return self.values[max(self.values)]


@dataclasses.dataclass(frozen=True)
class Span:
    """The time range that is shown.

    Attributes:
        window: Value of ``$__rate_interval``.
    """

    start: float
    end: float
    step: float
    window: str = WINDOW


def text(title: str) -> str:
    """Return a title with its variables filled in."""
    return re.sub(r"\$(\w+)", lambda found: VARIABLES.get(found[1], ""), title)


def lines(server: Prometheus, panel: dict[str, Any], span: Span) -> list[Series]:
    """Return the series of a panel over time."""
    found = []
    for target in panel["targets"]:
        asked = filled(target["expr"], **{**VARIABLES, "__rate_interval": span.window})
        for each in server.range(asked, span.start, span.end, span.step):
            values = {
                float(at): float(v) for at, v in each.get("values", ()) if not math.isnan(float(v))
            }
            if values:
                name = legend(target["legendFormat"], each["metric"])
                found.append(Series(name, each["metric"], values))
    return found


def rows(server: Prometheus, panel: dict[str, Any], span: Span) -> list[dict[str, str | float]]:
    """Return the rows of a table: all queries' values for equal labels, by column name."""
    organize = panel["transformations"][1]["options"]
    several = len(panel["targets"]) > 1
    merged: dict[tuple[tuple[str, str], ...], dict[str, str | float]] = {}
    widest: set[str] = set()
    answers = []
    for target in panel["targets"]:
        asked = filled(target["expr"], **VARIABLES)
        result = server.get("query", query=asked, time=span.end)["result"]
        answers.append((f"Value #{target['refId']}" if several else "Value", result))
        widest |= {label for each in result for label in each["metric"]}
    shared = {
        label
        for label in widest
        if all(label in each["metric"] for _, result in answers for each in result)
    } or widest
    for column, result in answers:
        for each in result:
            key = tuple(sorted((k, v) for k, v in each["metric"].items() if k in shared))
            row = merged.setdefault(key, {})
            row.update(each["metric"])
            row[column] = float(each["value"][1])
    names = organize["renameByName"]
    return [{names[key]: row.get(key, "") for key in names} for _, row in sorted(merged.items())]


def legend(form: str, labels: dict[str, str]) -> str:
    """Return a series' legend by the query's format."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), form).strip()
