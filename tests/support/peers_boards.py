"""Dashboards of other projects, and their queries with variables filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[3] / "shared" / "reference" / "dashboards"
"""Folder outside the project; tests skip where it is absent."""
BOARDS = {
    path.relative_to(FOLDER).as_posix(): path
    for path in sorted(FOLDER.glob("*/*"))
    if path.suffix in (".json", ".yaml")
}
VARIABLE = r"(?:\$\{[^}]*\}|\$\w+|\[\[[^\]]*\]\])"
WINDOW = re.compile(r"\$\{?__(?:rate_interval|range|interval)\}?")
WORDS = re.compile(
    r"\"(?:\\.|[^\"\\])*\"|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)|\[[^\]]*\]"
)
NAME = re.compile(r"(?<![\w:$.])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])")
KEYWORDS = frozenset(
    [
        "by",
        "without",
        "on",
        "ignoring",
        "group_left",
        "group_right",
        "and",
        "or",
        "unless",
        "bool",
        "offset",
        "vector",
        "inf",
        "nan",
    ]
)


def queries(path: Path) -> list[str]:
    """Return every expression of a Grafana or Perses file, with variables filled in."""
    text = path.read_text()
    documents = [json.loads(text)] if path.suffix == ".json" else list(yaml.safe_load_all(text))
    return [filled(expr) for document in documents for expr in _expressions(document)]


def filled(expr: str) -> str:
    """Fill in variables: a label matches everything, a quantile is the 95th percentile."""
    expr = WINDOW.sub("5m", expr)
    expr = re.sub(rf'(=~|!~|!=|=)\s*"[^"]*{VARIABLE}[^"]*"', '=~".*"', expr)
    expr = re.sub(rf"(?<=\[){VARIABLE}(?=\])", "5m", expr)
    return re.sub(VARIABLE, "0.95", expr)


def metrics(expr: str) -> set[str]:
    """Return the names of the samples that ``expr`` selects."""
    named = re.findall(r'__name__\s*=\s*"([^"]+)"', expr)
    plain = re.sub(r"\{[^{}]*\}", "", WORDS.sub("", expr))
    return {*named, *(set(NAME.findall(plain)) - KEYWORDS)}


def _expressions(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        source = node.get("datasource")
        kind = source.get("type", "") if isinstance(source, dict) else ""
        for key, value in node.items():
            if key == "expr" and isinstance(value, str) and "loki" not in kind and value:
                yield value
            elif key == "plugin" and value.get("kind") == "PrometheusTimeSeriesQuery":
                yield value["spec"]["query"]
            elif isinstance(value, str) and key.endswith(".json"):
                yield from _expressions(json.loads(value))
            else:
                yield from _expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from _expressions(value)
