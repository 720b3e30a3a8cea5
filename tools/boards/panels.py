"""Panels in Grafana's JSON, of the kinds that the dashboards use."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from tools.boards.queries import TARGET_LABELS

from sidestep.catalog.engine_pages import PAGES
from sidestep.engines.dialects import DIALECTS

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
QUANTILES = (0.5, 0.9, 0.95, 0.99)
NOW = ("bargauge", "stat", "table")
"""Kinds that show the present: over a range, Grafana would show the last value of what is gone."""
FAMILY = re.compile(
    r"(?<![\w:$\"])((?:vllm|sglang|llamacpp):\w+|(?:sidestep|trtllm|nv|process|DCGM)_\w+|up)(?=[{\[])"
)
NAMED = re.compile(r'__name__=~"([^"]+)"')

HISTOGRAMS = {
    row.name for dialect in DIALECTS.values() for row in dialect.rows if row.kind == "histogram"
}.union(*(page.names("histogram") for page in PAGES))
NO_TRAFFIC = {
    "type": "special",
    "options": {"match": "nan", "result": {"text": "no traffic", "color": "text", "index": 9}},
}
"""Text for NaN, such as a quantile without observations."""

Kind = Literal["timeseries", "stat", "heatmap", "table", "bargauge", "state-timeline"]


@dataclasses.dataclass(frozen=True)
class Query:
    """An expression and the legend of its series."""

    expr: str
    legend: str = ""


@dataclasses.dataclass(frozen=True)
class DrillDown:
    """A link from a value to another dashboard, which keeps the time range and the filters.

    Attributes:
        board: File of the other dashboard, without suffix.
        labels: Labels whose values become filters there; a table has the link in the column of the first.
    """

    title: str
    board: str
    labels: Sequence[str]

    def made(self, value: Callable[[str], str]) -> dict[str, Any]:
        """Return its JSON; ``value`` returns Grafana's name of the value of a label."""
        kept = [name for name in ("datasource", *TARGET_LABELS) if name not in self.labels]
        filters = [f"${{{name}:queryparam}}" for name in kept] + [
            f"var-{label}=${{{value(label)}:percentencode}}" for label in self.labels
        ]
        url = f"/d/{uid(self.board)}?{'&'.join(filters)}&${{__url_time_range}}"
        return {"title": self.title, "url": url, "targetBlank": False}


@dataclasses.dataclass(frozen=True)
class LivePage:
    """A link from a series or a row to the live page of its exporter."""

    labels: Sequence[str] = ("instance",)

    def made(self, value: Callable[[str], str]) -> dict[str, Any]:
        """Return its JSON; ``value`` returns Grafana's name of the value of a label."""
        url = f"http://${{{value('instance')}}}/"
        return {"title": "Live page of the exporter", "url": url, "targetBlank": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel: its queries and how to show them.

    Attributes:
        says: Meaning of the numbers; the families' names are appended.
        empty: Reason for no data, and what enables the metrics.
        unit: Unit in Grafana's notation.
        most: End of the scale.
        limits: Values from which it is orange, and red; lines in time series.
        stacked: Series are parts of a whole.
        columns: Names of a table's columns by label, then by query; others are hidden.
        units: Units of a table's columns.
        states: Texts of a state timeline's values, from 1, and their colors.
        colors: Colors of series by their legend; those of other panels with the same series.
        links: Other dashboards with more about a series or a row, or the live page.
    """

    title: str
    says: str
    empty: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    most: float | None = None
    limits: tuple[float, float] | None = None
    stacked: bool = False
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    units: Mapping[str, str] = dataclasses.field(default_factory=dict)
    states: Mapping[str, str] = dataclasses.field(default_factory=dict)
    colors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    links: Sequence[DrillDown | LivePage] = ()

    def made(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Return its JSON at a position."""
        panel: dict[str, Any] = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": f"{self.says}\n\n{_named(families(q.expr for q in self.queries))}",
            "datasource": SOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self._defaults(), "overrides": self._overrides()},
            "options": getattr(self, f"_{self.kind.replace('-', '_')}")(),
            "targets": [self._target(*each) for each in enumerate(self.queries)],
        }
        if self.kind == "table":
            panel["transformations"] = self._joined()
        return panel

    def _target(self, number: int, query: Query) -> dict[str, Any]:
        target: dict[str, Any] = {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "range": self.kind not in NOW,
            "instant": self.kind in NOW,
        }
        if self.kind in ("heatmap", "table"):
            target["format"] = self.kind
        return target

    def _defaults(self) -> dict[str, Any]:
        # Without limits nothing says whether a number is good, so it has no color.
        base = "green" if self.limits else "blue" if self.kind == "bargauge" else "text"
        steps: list[dict[str, Any]] = [{"color": base, "value": None}]
        if self.limits:
            steps += [
                {"color": color, "value": value}
                for color, value in zip(("orange", "red"), self.limits, strict=True)
            ]
        defaults: dict[str, Any] = {
            "unit": self.unit,
            "noValue": self.empty,
            "thresholds": {"mode": "absolute", "steps": steps},
        }
        if self.kind != "table":
            defaults["min"] = 0
            if self.links:
                defaults["links"] = [link.made("__field.labels.{}".format) for link in self.links]
        if self.most is not None:
            defaults["max"] = self.most
        defaults["mappings"] = [self._named_states() if self.states else NO_TRAFFIC]
        if self.kind == "timeseries":
            mode = "normal" if self.stacked else "none"
            defaults["color"] = {"mode": "palette-classic"}
            defaults["custom"] = {
                "drawStyle": "line",
                "fillOpacity": 25 if self.stacked else 8,
                "lineWidth": 1,
                "showPoints": "auto",
                "spanNulls": False,
                "stacking": {"group": "A", "mode": mode},
            }
            if self.limits:
                # The axis includes the limit, and higher values.
                defaults["custom"] |= {
                    "axisSoftMax": self.limits[-1],
                    "thresholdsStyle": {"mode": "dashed"},
                }
        elif self.kind != "heatmap":
            defaults["color"] = {"mode": "thresholds"}
        if self.kind == "state-timeline":
            defaults["custom"] = {"fillOpacity": 80, "lineWidth": 0, "spanNulls": False}
        return defaults

    def _named_states(self) -> dict[str, Any]:
        return {
            "type": "value",
            "options": {
                str(number): {"text": name, "color": color, "index": number}
                for number, (name, color) in enumerate(self.states.items(), start=1)
            },
        }

    def _overrides(self) -> list[dict[str, Any]]:
        found = [_override(column, "unit", unit) for column, unit in self.units.items()]
        found += [
            _override(name, "color", {"mode": "fixed", "fixedColor": color})
            for name, color in self.colors.items()
        ]
        if self.kind == "table":
            by_column: dict[str, list[dict[str, Any]]] = {}
            for link in self.links:
                made = link.made(lambda label: f"__data.fields.{self.columns[label]}")
                by_column.setdefault(self.columns[link.labels[0]], []).append(made)
            found += [_override(column, "links", made) for column, made in by_column.items()]
        return found

    def _timeseries(self) -> dict[str, Any]:
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }

    def _stat(self) -> dict[str, Any]:
        return {
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "value_and_name" if self._is_named() else "auto",
        }

    def _is_named(self) -> bool:
        """Return whether there are several numbers, which need names."""
        return len(self.queries) > 1 or "{{" in self.queries[0].legend

    def _heatmap(self) -> dict[str, Any]:
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {
                "mode": "scheme",
                "scheme": "Blues",
                "scale": "exponential",
                "exponent": 0.5,
                "steps": 64,
                "reverse": True,
            },
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": True},
            "yAxis": {"axisPlacement": "left", "unit": self.unit},
        }

    def _table(self) -> dict[str, Any]:
        return {"cellHeight": "sm", "footer": {"show": False}, "showHeader": True}

    def _bargauge(self) -> dict[str, Any]:
        return {
            "displayMode": "basic",
            "minVizHeight": 10,
            "orientation": "horizontal",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "showUnfilled": True,
            "valueMode": "text",
        }

    def _state_timeline(self) -> dict[str, Any]:
        return {
            "alignValue": "left",
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "mergeValues": True,
            "perPage": 20,
            "rowHeight": 0.9,
            "showValue": "auto",
            "tooltip": {"mode": "single", "sort": "none"},
        }

    def _joined(self) -> list[dict[str, Any]]:
        """Return transformations that join the queries' rows with equal labels, in the given order of columns."""
        names = list(self.columns)
        organized = {
            "renameByName": dict(self.columns),
            "indexByName": {name: at for at, name in enumerate(names)},
            "includeByName": dict.fromkeys(names, True),
        }
        return [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, **organized}},
        ]


def uid(board: str) -> str:
    """Return the uid of the dashboard in a file."""
    return f"sidestep-{board}"


def _override(column: str, name: str, value: object) -> dict[str, Any]:
    return {
        "matcher": {"id": "byName", "options": column},
        "properties": [{"id": name, "value": value}],
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A panel with a text in Markdown."""

    title: str
    says: str
    text: str
    width: int = 24
    height: int = 8

    def made(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Return its JSON at a position."""
        return {
            "id": number,
            "type": "text",
            "title": self.title,
            "description": self.says,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "options": {"mode": "markdown", "content": self.text},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlertList:
    """A panel of alerts that are firing or pending.

    Attributes:
        named: Part of the alerts' names.
    """

    title: str
    says: str
    named: str
    width: int = 8
    height: int = 8

    def made(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Return its JSON at a position."""
        return {
            "id": number,
            "type": "alertlist",
            "title": self.title,
            "description": self.says,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "options": {
                "alertInstanceLabelFilter": "",
                "alertName": self.named,
                "dashboardAlerts": False,
                "groupBy": [],
                "groupMode": "default",
                "maxItems": 20,
                "showInstances": True,
                "sortOrder": 3,
                "stateFilter": {
                    "error": True,
                    "firing": True,
                    "noData": False,
                    "normal": False,
                    "pending": True,
                },
                "viewMode": "list",
            },
        }


def families(exprs: Iterable[str]) -> list[str]:
    """Return the names of the families in expressions, in order."""
    found: dict[str, None] = {}
    for expr in exprs:
        several = (name for names in NAMED.findall(expr) for name in names.split("|"))
        for name in (*FAMILY.findall(expr), *several):
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            found.setdefault(family if family in HISTOGRAMS else name)
    return list(found)


def _named(names: Sequence[str]) -> str:
    return f"Metric{'s' if len(names) > 1 else ''}: {', '.join(f'`{name}`' for name in names)}"
