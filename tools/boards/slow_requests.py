"""The dashboard of single requests, from the lines of ``--requests.log`` in Loki.

Its queries have ``| json`` and comparisons of the record's fields, which every release of Loki reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tools.boards.dashboard import Dashboard, Row

SOURCE = {"type": "loki", "uid": "${datasource}"}
LINES = 1000
"""Newest lines that a table reads."""
EMPTY = "No such request; the exporter writes records with --requests.log, and an agent ships them."
MATCHED = ("model", "engine", "adapter", "tenant")
"""Fields of a record by which the variables of the same names select requests."""
COLUMNS = {
    "time": "Ended",
    "id": "Request",
    "tenant": "Tenant",
    "model": "Model",
    "adapter": "Adapter",
    "engine": "Engine",
    "reason": "End",
    "e2e_seconds": "End to end",
    "ttft_seconds": "TTFT",
    "queue_seconds": "Queue",
    "prefill_seconds": "Prefill",
    "decode_seconds": "Decode",
    "max_itl_seconds": "Longest ITL",
    "preempted_seconds": "Preempted",
    "prompt_tokens": "Prompt tokens",
    "cached_tokens": "Cached",
    "output_tokens": "Output tokens",
    "trace_id": "Trace",
    "key": "Key",
}
"""Columns of a table, by field of a record."""


def records(*conditions: str) -> str:
    """Return the query of the selected records that meet all conditions."""
    matched = [f'{name}=~"${name}"' for name in MATCHED]
    return " | ".join(["$stream", "json", '__error__=""', *matched, *conditions])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
    """A table of requests, the slowest first.

    Attributes:
        by: Field by which it is sorted.
    """

    title: str
    says: str
    query: str
    by: str
    width: int = 24
    height: int = 11

    def made(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Return its JSON at a position."""
        names = list(COLUMNS)
        seconds = {"matcher": {"id": "byRegexp", "options": _one_of("_seconds")}}
        organized = {
            "indexByName": {name: at for at, name in enumerate(names)},
            "includeByName": dict.fromkeys(names, True),
            "renameByName": COLUMNS,
        }
        return {
            **_panel(self, "table", number, x, y),
            "fieldConfig": {
                "defaults": {"noValue": EMPTY},
                "overrides": [{**seconds, "properties": [{"id": "unit", "value": "s"}]}],
            },
            "options": {"cellHeight": "sm", "footer": {"show": False}, "showHeader": True},
            "targets": [
                {
                    "refId": "A",
                    "datasource": SOURCE,
                    "expr": self.query,
                    "queryType": "range",
                    "maxLines": LINES,
                }
            ],
            "transformations": [
                {
                    "id": "extractFields",
                    "options": {"source": "Line", "format": "json", "replace": True},
                },
                {"id": "organize", "options": organized},
                {"id": "sortBy", "options": {"sort": [{"field": COLUMNS[self.by], "desc": True}]}},
            ],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """A time series of numbers from records.

    Attributes:
        queries: Expressions, by the legend of their series.
    """

    title: str
    says: str
    queries: Mapping[str, str]
    unit: str
    width: int = 12
    height: int = 8

    def made(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Return its JSON at a position."""
        return {
            **_panel(self, "timeseries", number, x, y),
            "fieldConfig": {
                "defaults": {"unit": self.unit, "min": 0, "noValue": EMPTY},
                "overrides": [],
            },
            "options": {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
            "targets": [
                {
                    "refId": chr(ord("A") + at),
                    "datasource": SOURCE,
                    "expr": expr,
                    "queryType": "range",
                    "legendFormat": legend,
                }
                for at, (legend, expr) in enumerate(self.queries.items())
            ],
        }


@dataclasses.dataclass(frozen=True)
class Typed:
    """A variable whose value the reader types."""

    name: str
    label: str
    default: str

    def made(self) -> dict[str, Any]:
        """Return its JSON."""
        return {
            "name": self.name,
            "label": self.label,
            "type": "textbox",
            "query": self.default,
            "current": {"selected": True, "text": self.default, "value": self.default},
        }


def _panel(panel: Requests | Series, kind: str, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
    }


def _one_of(suffix: str) -> str:
    shown = "|".join(title for name, title in COLUMNS.items() if name.endswith(suffix))
    return f"/^({shown})$/"


def _table(title: str, says: str, by: str, *conditions: str) -> Requests:
    last = f" If there are more than {LINES}, it has the newest: raise the limit, or choose a shorter time."
    return Requests(title=title, says=says + last, query=records(*conditions), by=by)


def _quantile(field: str) -> str:
    unwrapped = f'{records()} | unwrap {field} | __error__=""'
    return f"quantile_over_time(0.99, {unwrapped} [$__auto]) by (model)"


TABLES: Sequence[Requests] = (
    _table(
        "Slowest requests",
        "Requests that took longer than the limit, the slowest first, with the seconds of each stage.",
        "e2e_seconds",
        "e2e_seconds > $e2e",
    ),
    _table(
        "Slowest first tokens",
        "Requests whose first token came later than the limit.",
        "ttft_seconds",
        "ttft_seconds > $ttft",
    ),
    _table(
        "Longest gaps between tokens",
        "Requests that waited longer than the limit between two outputs, as after a preemption.",
        "max_itl_seconds",
        "max_itl_seconds > $itl",
    ),
    _table(
        "Failed requests",
        "Requests that were aborted, refused, given up or failed.",
        "time",
        'reason=~"abort|error|refused|engine_died|expired"',
    ),
)
OVERVIEW: Sequence[Series] = (
    Series(
        title="Requests by end",
        says="Requests that ended per second, by reason, as far as they have records.",
        queries={"{{reason}}": f"sum by (reason) (rate({records()} [$__auto]))"},
        unit="reqps",
    ),
    Series(
        title="99th percentile",
        says="End-to-end latency, TTFT and time in the queue that 1 % of the requests exceed.",
        queries={
            f"{title} {{{{model}}}}": _quantile(field)
            for title, field in (
                ("end to end", "e2e_seconds"),
                ("TTFT", "ttft_seconds"),
                ("queue", "queue_seconds"),
            )
        },
        unit="s",
    ),
)

BOARD = Dashboard(
    file="slow-requests",
    title="Slowest requests",
    says="Single requests from the lines of --requests.log: what was slow, where, and what failed.",
    tags=["llm", "loki"],
    source="loki",
    variables=[
        Typed("stream", "Stream", '{job="sidestep-requests"}'),
        *(Typed(name, name.capitalize(), ".*") for name in MATCHED),
        Typed("e2e", "End to end over, s", "10"),
        Typed("ttft", "TTFT over, s", "2"),
        Typed("itl", "ITL over, s", "1"),
    ],
    rows=[
        Row("Overview", OVERVIEW),
        *(Row(table.title, [table]) for table in TABLES),
    ],
)
