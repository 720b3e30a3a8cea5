"""A dashboard: rows of panels, variables and links."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tools.boards.panels import SOURCE, uid

TAG = "sidestep"
COLUMNS = 24
PLUGINS = {
    "prometheus": "Prometheus",
    "loki": "Loki",
    "alertlist": "Alert list",
    "bargauge": "Bar gauge",
    "heatmap": "Heatmap",
    "stat": "Stat",
    "state-timeline": "State timeline",
    "table": "Table",
    "text": "Text",
    "timeseries": "Time series",
}
"""Names of plugins, all of which Grafana has built in."""


@dataclasses.dataclass(frozen=True)
class Variable:
    """A filter by the values of a label of sidestep's series.

    Attributes:
        source: Selector of sidestep's series; others may have a label of that name, too.
        every: Pattern for *All*, which is faster than a list; without one, all values are listed.
    """

    name: str
    label: str
    source: str
    every: str | None = ".*"

    def made(self) -> dict[str, Any]:
        """Return its JSON."""
        query = f"label_values({self.source}, {self.name})"
        return {
            "name": self.name,
            "label": self.label,
            "type": "query",
            "datasource": SOURCE,
            "definition": query,
            "query": {"query": query, "refId": self.name},
            "refresh": 2,
            "sort": 1,
            "includeAll": True,
            "multi": True,
            **({"allValue": self.every} if self.every else {}),
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


@dataclasses.dataclass(frozen=True)
class Bound:
    """A choice of one bucket bound, such as the limit of an objective."""

    name: str
    label: str
    source: str
    default: str

    def made(self) -> dict[str, Any]:
        """Return its JSON."""
        query = f"label_values({self.source}, le)"
        return {
            "name": self.name,
            "label": self.label,
            "type": "query",
            "datasource": SOURCE,
            "definition": query,
            "query": {"query": query, "refId": self.name},
            "regex": "/^[0-9.e+-]+$/",
            "refresh": 2,
            "sort": 3,
            "includeAll": False,
            "multi": False,
            "current": {"selected": True, "text": self.default, "value": self.default},
        }


OWN = '__name__=~"sidestep_build_info|sidestep_engine_up"'
"""Exporters, and their engines, which can have labels of their own."""
CLUSTER = Variable("cluster", "Cluster", f"{{{OWN}}}")
NAMESPACE = Variable("namespace", "Namespace", f'{{{OWN},cluster=~"$cluster"}}')
POD = Variable("pod", "Pod", f'{{{OWN},cluster=~"$cluster",namespace=~"$namespace"}}')
JOB = Variable("job", "Job", "sidestep_build_info", None)
"""*All* lists only exporters, because ``up`` and ``process_*`` belong to other targets, too."""
INSTANCE = Variable("instance", "Instance", 'sidestep_build_info{job=~"$job"}', ".+")
TARGET = (CLUSTER, NAMESPACE, POD, JOB, INSTANCE)
"""Variables of every dashboard: Prometheus gives the last two labels to every series."""


class Element(Protocol):
    """A variable that is typed in, or any other part of a dashboard without a position."""

    def made(self) -> dict[str, Any]:
        """Return its JSON."""


class Placed(Protocol):
    """A panel of any kind."""

    @property
    def width(self) -> int:
        """Columns that it takes."""

    @property
    def height(self) -> int:
        """Lines that it takes."""

    def made(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Return its JSON at a position."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Panels under a heading, from left to right in as many lines as necessary.

    Attributes:
        collapsed: Show the heading only, and query nothing, until the row is opened.
    """

    title: str
    panels: Sequence[Placed]
    collapsed: bool = False


@dataclasses.dataclass(frozen=True)
class Annotation:
    """Events that all panels mark on their axis of time, while the expression is above 0."""

    title: str
    expr: str
    text: str
    color: str

    def made(self) -> dict[str, Any]:
        """Return its JSON."""
        return {
            "name": self.title,
            "datasource": SOURCE,
            "enable": True,
            # Grafana 10 and 11 read the first, later versions the second.
            "expr": self.expr,
            "target": {"expr": self.expr, "refId": "Anno"},
            "iconColor": self.color,
            "tagKeys": "",
            "textFormat": self.text,
            "titleFormat": self.title,
            "useValueForTime": False,
        }


@dataclasses.dataclass(frozen=True)
class Dashboard:
    """A file of ``grafana/``.

    Attributes:
        next: Titles of links to dashboards with more detail, by file without suffix.
        source: Kind of its data source.
    """

    file: str
    title: str
    says: str
    tags: Sequence[str]
    variables: Sequence[Element]
    rows: Sequence[Row]
    next: Mapping[str, str] = dataclasses.field(default_factory=dict)
    annotations: Sequence[Annotation] = ()
    source: str = "prometheus"

    def made(self) -> dict[str, Any]:
        """Return its JSON, without an id, so that every Grafana imports it as new."""
        panels = self._panels()
        return {
            "__inputs": [],
            "__elements": {},
            "__requires": self._required(panels),
            "id": None,
            "uid": uid(self.file),
            "title": f"{TAG} / {self.title}",
            "description": self.says,
            "tags": [TAG, *self.tags],
            "schemaVersion": 39,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "annotations": {"list": [each.made() for each in self.annotations]},
            "links": [
                *(
                    _link("link", title, url=f"/d/{uid(file)}", icon="dashboard")
                    for file, title in self.next.items()
                ),
                _link("dashboards", TAG, tags=[TAG], asDropdown=True, icon="external link"),
            ],
            "templating": {
                "list": [_datasource(self.source), *(each.made() for each in self.variables)]
            },
            "panels": panels,
        }

    def _required(self, panels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what grafana.com lists as necessary: Grafana, the data source, and kinds of panels."""
        inside = [each for panel in panels for each in (panel, *panel.get("panels", ()))]
        kinds = sorted({each["type"] for each in inside} - {"row"})
        plugins = [("datasource", self.source, "1.0.0"), *(("panel", kind, "") for kind in kinds)]
        return [
            {"type": "grafana", "id": "grafana", "name": "Grafana", "version": "10.0.0"},
            *(
                {"type": kind, "id": plugin, "name": PLUGINS[plugin], "version": version}
                for kind, plugin, version in plugins
            ),
        ]

    def _panels(self) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        y = number = 0
        for row in self.rows:
            number += 1
            heading = _heading(row, number, y)
            made.append(heading)
            inside = heading["panels"] if row.collapsed else made
            y += 1
            bottom = y
            x = line = 0
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, y, line = 0, y + line, 0
                number += 1
                inside.append(panel.made(number, x, y))
                x, line = x + panel.width, max(line, panel.height)
            y = bottom if row.collapsed else y + line
        return made


def _link(kind: str, title: str, **given: object) -> dict[str, Any]:
    return {
        "type": kind,
        "title": title,
        "tags": [],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "tooltip": "",
        "url": "",
        **given,
    }


def _datasource(kind: str) -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": kind,
        "includeAll": False,
        "multi": False,
        "current": {},
    }


def _heading(row: Row, number: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "row",
        "title": row.title,
        "collapsed": row.collapsed,
        "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
        "panels": [],
    }
