"""The rules and their promtool tests, as tests read them: expressions taken apart by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sidestep.catalog.model import Row
from sidestep.engines.dialects import DIALECTS
from sidestep.telemetry.rows import BY_NAME

ROOT = Path(__file__).parents[2]
RULE_FILES = sorted((ROOT / "deploy" / "rules").glob("*.yaml"))
RUNBOOKS = ROOT / "docs" / "runbooks"
TESTS = sorted((ROOT / "tests" / "rules").glob("*.yaml"))
SUFFIX = re.compile(r"_(bucket|sum|count)$")
NAME = re.compile(r"(?<![\w:])(?:vllm:|sglang:|nv_|sidestep_)[a-z0-9_]+(?![\w:])")
RECORDED = re.compile(r"(?<![\w:])[a-z_]+:[a-z0-9_]+:[a-z0-9_]+(?![\w:])")
"""A family of an engine has one colon at most."""
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


class Selector(NamedTuple):
    """A metric in an expression: by what function it is read, and which of its series."""

    name: str
    function: str
    matchers: tuple[tuple[str, str, str], ...]


@cache
def groups(name: str) -> list[dict[str, Any]]:
    """Of one of the rule files."""
    found: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy" / "rules" / name).read_text())[
        "groups"
    ]
    return found


def rules(name: str) -> list[dict[str, Any]]:
    """All of them, in order."""
    return [rule for group in groups(name) for rule in group["rules"]]


def recordings() -> list[dict[str, Any]]:
    """Recording rules."""
    return rules("recording.yaml")


def alerts() -> list[dict[str, Any]]:
    """Alerts; some names stand there more than once."""
    return rules("alerts.yaml")


@cache
def promtool_tests() -> list[dict[str, Any]]:
    """Of all files."""
    return [test for path in TESTS for test in yaml.safe_load(path.read_text())["tests"]]


def alert_tests() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Every look at an alert: its name, and what has to fire."""
    for test in promtool_tests():
        for look in test.get("alert_rule_test", ()):
            yield look["alertname"], look.get("exp_alerts", [])


def families() -> dict[str, tuple[str, frozenset[str], Row | None]]:
    """Kind and labels of every family that can be on a page, and its row where an engine has it."""
    found: dict[str, tuple[str, frozenset[str], Row | None]] = {
        name: (row.kind, frozenset(row.labels), None) for name, row in BY_NAME.items()
    }
    for dialect in ("vllm", "sglang", "stream", "triton"):
        for row in DIALECTS[dialect].rows_for():
            _, labels, _ = found.get(row.name, ("", frozenset[str](), None))
            found[row.name] = row.kind, labels | frozenset(row.labels), row
    return found


def selectors(expr: str) -> list[Selector]:
    """The engines' and the exporter's own metrics in an expression."""
    found = []
    for match in NAME.finditer(expr):
        rest = expr[match.end() :]
        braces = re.match(r"\{([^}]*)\}", rest)
        before = re.search(r"(\w+)\s*\(\s*$", expr[: match.start()])
        found.append(
            Selector(
                match[0],
                before[1] if before else "",
                tuple(MATCHER.findall(braces[1])) if braces else (),
            )
        )
    return found


def divisors(expr: str) -> list[str]:
    """What expressions divide by, without its outer parentheses."""
    bare = re.sub(r'"[^"]*"', lambda quoted: "_" * len(quoted[0]), expr)
    found = []
    for match in re.finditer(r"/\s*", bare):
        rest = bare[match.end() :]
        if not rest.startswith("("):
            found.append(re.split(r"\s", rest, maxsplit=1)[0])
            continue
        depth = 0
        for at, char in enumerate(rest):
            depth += (char == "(") - (char == ")")
            if not depth:
                found.append(rest[1:at].strip())
                break
    return found
