"""What the panels of a dashboard get from Prometheus."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from boards import filled
from prometheus_server import Prometheus

WINDOW = "15s"
"""Here in place of ``$__rate_interval``."""
VARIABLES = {"__rate_interval": WINDOW, "ttft": "1.0", "itl": "0.1", "e2e": "10.0"}


@dataclasses.dataclass
class Series:
    """One line: what it is called, and values by time; those that are no number are left out."""

    name: str
    labels: dict[str, str]
    values: dict[float, float]

    @property
    def last(self) -> float:
        """The newest."""
        return self.values[max(self.values)]


@dataclasses.dataclass(frozen=True)
class Span:
    """The time that is shown."""

    start: float
    end: float
    step: float


def text(title: str) -> str:
    """A title, its variables filled in."""
    return re.sub(r"\$(\w+)", lambda found: VARIABLES.get(found[1], ""), title)


def lines(server: Prometheus, panel: dict[str, Any], span: Span) -> list[Series]:
    """Of a panel over time."""
    found = []
    for target in panel["targets"]:
        asked = filled(target["expr"], **VARIABLES)
        for each in server.range(asked, span.start, span.end, span.step):
            values = {
                float(at): float(v) for at, v in each.get("values", ()) if not math.isnan(float(v))
            }
            if values:
                name = legend(target["legendFormat"], each["metric"])
                found.append(Series(name, each["metric"], values))
    return found


def rows(server: Prometheus, panel: dict[str, Any], span: Span) -> list[dict[str, str | float]]:
    """Of a table: what all queries have for the same labels, under the names of the columns."""
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
    """A series' name, by the form that the query gives."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), form).strip()
