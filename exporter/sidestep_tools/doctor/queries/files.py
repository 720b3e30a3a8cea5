"""The queries of dashboards and rule files, with the dashboards' variables filled in.

Grafana, Perses and Prometheus each nest queries in their own ways, and provisioning wraps files in
others (a ConfigMap, an API answer, a list, an operator's object), so the reader looks for queries at
any depth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sidestep.config.yaml_reader import MAX_BYTES, read_documents
from sidestep.errors import ConfigError

_VARIABLE = re.compile(r"\$\{(\w+)[^}]*\}|\$([a-zA-Z_]\w*)|\[\[(\w+)[^\]]*\]\]")
_V = r"\$\{\w+[^}]*\}|\$[a-zA-Z_]\w*\b|\[\[\w+[^\]]*\]\]"
_MATCHER = re.compile(
    rf"""(?:=~|!~|!=|=)\s*("(?:\\.|[^"\\])*?(?:{_V})(?:\\.|[^"\\])*"|'[^']*(?:{_V})[^']*')"""
)
_PART_OF_NAME = re.compile(rf"[\w:]+(?:{_V})[\w:]*|(?:{_V})[\w:]+")
_LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)")
_WINDOW = re.compile(rf"(?<=\[)\s*(?:{_V})\s*(?=[\]:])")
_LABEL_VALUES = re.compile(r"label_values\(\s*(.+?)\s*,\s*(\w+)\s*\)\s*", re.DOTALL)
_RESULT = re.compile(r"query_result\((.*)\)\s*", re.DOTALL)
DURATIONS = ("__rate_interval", "__interval", "__range")
"""Grafana's own variables whose value is a duration."""
OTHER_LANGUAGES = (
    "loki", "tempo", "elasticsearch", "influxdb", "graphite", "cloudwatch", "pyroscope",
)  # fmt: skip
"""Kinds of data sources whose queries are not PromQL."""


class FileError(Exception):
    """A file that cannot be read; the text is one line."""


class Query(NamedTuple):
    """One query.

    Attributes:
        place: Panel, variable or rule.
        may_be_empty: Whether no result is normal, as for an alert's condition.
        record: The name that a recording rule gives to the result.
        is_guessed: Whether it had a variable whose value is not known.
    """

    place: str
    text: str
    may_be_empty: bool = False
    record: str = ""
    is_guessed: bool = False
    is_alert: bool = False


def read(path: str) -> list[Any]:
    """Return the documents of a file."""
    try:
        with Path(path).open("rb") as file:
            return _documents(file.read(MAX_BYTES + 1).decode())
    except OSError as error:
        raise FileError(error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise FileError("it is no text in UTF-8") from None


def queries_of(documents: list[Any]) -> list[Query]:
    """Return all queries of a file's documents."""
    found = [query for each in documents for query in _queries(each, "")]
    if not found:
        raise FileError("it has no PromQL query")
    return list(dict.fromkeys(found))


def _fill(text: str) -> tuple[str, bool]:
    """Return a query without variables, and whether the value of one is not known.

    A matcher or a name with a variable becomes one that every series fulfils.
    """
    text = _MATCHER.sub('=~".*"', text)
    is_guessed = any(not _name(found).startswith("__") for found in _VARIABLE.finditer(text))
    text = _WINDOW.sub("5m", text)
    text = _LABELS.sub(lambda found: _VARIABLE.sub("job", found[0]), text)
    text = _PART_OF_NAME.sub('{__name__=~".+"}', text)
    return _VARIABLE.sub(lambda found: "5m" if _name(found) in DURATIONS else "1", text), is_guessed


def _name(variable: re.Match[str]) -> str:
    return str(next(filter(None, variable.groups())))


def _documents(text: str) -> list[Any]:
    try:
        return [json.loads(text)]
    except ValueError:
        pass
    try:
        return list(read_documents(text))
    except ConfigError as error:
        raise FileError(str(error)) from None


def _queries(node: object, place: str) -> Iterator[Query]:
    if isinstance(node, list):
        for each in node:
            yield from _queries(each, place)
    if not isinstance(node, dict) or _is_other_language(node):
        return
    place = _place(node) or place
    for promql in _expressions(node):
        text, is_guessed = _fill(promql)
        is_alert = "alert" in node
        may_be_empty = promql != node.get("expr") or is_alert
        record = str(node.get("record") or "")
        yield Query(place, text, may_be_empty, record, is_guessed, is_alert)
    for key, value in node.items():
        if not isinstance(value, str):
            yield from _queries(value, place)
        elif (key == "json" or key.endswith(".json")) and value.lstrip().startswith("{"):
            try:
                inner = json.loads(value)
            except ValueError:
                raise FileError(f"its {key} is no JSON") from None
            yield from _queries(inner, place)


def _place(node: dict[str, Any]) -> str:
    display = node.get("display")
    named = display.get("name") if isinstance(display, dict) else None
    names = (named, *(node.get(key) for key in ("title", "alert", "record")))
    # The name of a variable or an annotation.
    names = (*names, node.get("name") if "query" in node or "expr" in node else None)
    return next((name for name in names if isinstance(name, str) and name), "")


def _is_other_language(node: dict[str, Any]) -> bool:
    source = node.get("datasource")
    kinds = (source.get("type") if isinstance(source, dict) else source, node.get("group"))
    return any(isinstance(kind, str) and kind.lower() in OTHER_LANGUAGES for kind in kinds)


def _expressions(node: dict[str, Any]) -> Iterator[str]:
    """Yield the PromQL of an object itself: a panel's query, a rule, a variable."""
    if isinstance(node.get("expr"), str) and node["expr"].strip():
        yield node["expr"]
    for key in ("query", "definition", "__legacyStringValue"):
        value = node.get(key)
        if not isinstance(value, str):
            continue
        if found := _LABEL_VALUES.fullmatch(value):
            yield _with_label(*found.groups())
        elif found := _RESULT.fullmatch(value):
            yield found[1]
    spec = node.get("spec")
    if isinstance(spec, dict) and str(node.get("kind")).startswith("Prometheus"):  # Perses
        if isinstance(spec.get("query"), str):
            yield spec["query"]
        for each in spec.get("matchers") or ():
            yield _with_label(str(each), str(spec.get("labelName")))


def _with_label(selector: str, label: str) -> str:
    """Return the selector of those series that have a label."""
    name, _, rest = selector.partition("{")
    return f'{name}{{{label}!="",{rest or "}"}'
