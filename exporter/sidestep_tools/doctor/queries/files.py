"""The queries of dashboards and rule files, with the dashboards' variables filled in.

Grafana, Perses and Prometheus each nest queries in their own ways, and provisioning wraps files in
others (a ConfigMap, an API answer, a list, an operator's object), so the reader looks for queries at
any depth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
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
_LABELS = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)(\s*)\(([^()]*\$[^()]*)\)")
_WINDOW = re.compile(rf"(?<=\[)\s*(?:{_V})\s*(?=[\]:])")
_LABEL_VALUES = re.compile(r"label_values\(\s*(.+?)\s*,\s*(\w+)\s*\)\s*", re.DOTALL)
_RESULT = re.compile(r"query_result\((.*)\)\s*", re.DOTALL)
BUILT_IN = {
    "__rate_interval": "5m",
    "__interval": "5m",
    "__interval_ms": "300000",
    "__range": "5m",
    "__range_s": "300",
    "__range_ms": "300000",
}
"""Values of Grafana's own variables."""
OTHER_LANGUAGES = (
    "loki",
    "tempo",
    "elasticsearch",
    "influxdb",
    "graphite",
    "cloudwatch",
    "pyroscope",
)
"""Kinds of data sources whose queries are not PromQL."""
FIXED = ("custom", "constant", "textbox", "interval")
"""Types of variables whose value is in the dashboard."""


ANYTHING = '=~".*"'
"""Takes the place of a condition with a variable."""


class FileError(Exception):
    """A file that cannot be read; the text is one line."""


class Query(NamedTuple):
    """One query.

    Attributes:
        place: Panel, variable or rule.
        text: PromQL without variables.
        may_be_empty: Whether no result is normal: of an alert, or of a variable with a target's label.
        record: The name that a recording rule gives to the result.
        is_guessed: Whether a variable's value is not in the file.
        is_alert: Whether it is the condition of an alert.
    """

    place: str
    text: str
    may_be_empty: bool = False
    record: str = ""
    is_guessed: bool = False
    is_alert: bool = False


def read(path: str) -> list[Any]:
    """Return the documents of a file.

    Raises:
        FileError: It cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            return _documents(file.read(MAX_BYTES + 1).decode())
    except OSError as error:
        raise FileError(error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise FileError("it is no text in UTF-8") from None
    except RecursionError:
        raise FileError("it is nested too deep") from None


def queries_of(documents: list[Any]) -> list[Query]:
    """Return all queries of a file's documents.

    Raises:
        FileError: There is none.
    """
    values = {name: value for each in documents for name, value in _values(each)}
    try:
        found = [query for each in documents for query in _queries(each, "", values)]
    except RecursionError:
        raise FileError("it is nested too deep") from None
    if not found:
        raise FileError("it has no PromQL query")
    return list(dict.fromkeys(found))


def fill(text: str, values: Mapping[str, str]) -> tuple[str, bool]:
    """Return ``text`` without variables, and whether a value is a guess.

    A matcher with a variable becomes one that every series fulfils, and so does a name with one.
    """
    is_guessed = False

    def value(found: re.Match[str]) -> str:
        nonlocal is_guessed
        name = next(filter(None, found.groups()))
        known = BUILT_IN.get(name) or values.get(name)
        is_guessed = is_guessed or known is None
        return "1" if known is None else known

    def named(found: re.Match[str]) -> str:
        filled = _VARIABLE.sub(value, found[0])
        return '{__name__=~".+"}' if is_guessed else filled

    text = _MATCHER.sub(ANYTHING, text)
    text = _WINDOW.sub(lambda found: value(_VARIABLE.search(found[0]) or found), text)
    text = _LABELS.sub(lambda found: f"{found[1]}{found[2]}({_label(found[3], values)})", text)
    text = _PART_OF_NAME.sub(named, text)
    return _VARIABLE.sub(value, text), is_guessed


def _label(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda v: values.get(next(filter(None, v.groups())), "job"), text)


def _documents(text: str) -> list[Any]:
    try:
        return [json.loads(text)]
    except ValueError:
        pass
    try:
        return list(read_documents(text))
    except ConfigError as error:
        raise FileError(str(error)) from None


def _values(node: object) -> Iterator[tuple[str, str]]:
    """Yield name and value of the variables whose value is in the dashboard."""
    for each in _dicts(node):
        name, current = each.get("name"), each.get("current")
        if each.get("type") in FIXED and isinstance(name, str) and isinstance(current, dict):
            value = current.get("value")
            if isinstance(value, str) and value and "$" not in value:
                yield name, value


def _dicts(node: object) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for value in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from _dicts(value)


def _queries(node: object, place: str, values: Mapping[str, str]) -> Iterator[Query]:
    if isinstance(node, list):
        for each in node:
            yield from _queries(each, place, values)
    if not isinstance(node, dict) or _is_other_language(node):
        return
    place = _place(node) or place
    for promql in _expressions(node):
        text, is_guessed = fill(promql, values)
        is_alert = "alert" in node
        may_be_empty = promql != node.get("expr") or is_alert
        record = str(node.get("record") or "")
        yield Query(place, text, may_be_empty, record, is_guessed, is_alert)
    for key, value in node.items():
        if not isinstance(value, str):
            yield from _queries(value, place, values)
        elif (key == "json" or key.endswith(".json")) and value.lstrip().startswith("{"):
            try:
                inner = json.loads(value)
            except ValueError:
                raise FileError(f"its {key} is no JSON") from None
            yield from _queries(inner, place, {**values, **dict(_values(inner))})


def _place(node: dict[str, Any]) -> str:
    display = node.get("display")
    named = display.get("name") if isinstance(display, dict) else None
    names = (named, *(node.get(key) for key in ("title", "alert", "record")))
    # Of a variable or an annotation.
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
    if not selector.endswith("}"):
        return f'{selector}{{{label}!=""}}'
    comma = "" if re.search(r"[{,]\s*\}$", selector) else ","
    return f'{selector[:-1]}{comma}{label}!=""}}'
