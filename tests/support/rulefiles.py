"""Readers of the rule files, of their promtool tests and of their PromQL expressions."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sidestep.catalog.row import Row
from sidestep.engines.dialects import DIALECTS
from sidestep.telemetry.rows import BY_NAME
from trtllm_page import made_families

ROOT = Path(__file__).parents[2]
RULE_FILES = sorted((ROOT / "deploy" / "rules").glob("*.yaml"))
RUNBOOKS = ROOT / "docs" / "runbooks"
TESTS = sorted((ROOT / "tests" / "rules").glob("*.yaml"))
SUFFIX = re.compile(r"_(bucket|sum|count)$")
NAME = re.compile(r"(?<![\w:])(?:vllm:|sglang:|llamacpp:|trtllm_|nv_|sidestep_)[a-z0-9_]+(?![\w:])")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


class Selector(NamedTuple):
    """A selector in an expression, with the function that is applied to it."""

    name: str
    function: str
    matchers: tuple[tuple[str, str, str], ...]


@cache
def groups(name: str) -> list[dict[str, Any]]:
    """Return the groups of a rule file."""
    found: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy" / "rules" / name).read_text())[
        "groups"
    ]
    return found


def rules(name: str) -> list[dict[str, Any]]:
    """Return all rules of a file, in order."""
    return [rule for group in groups(name) for rule in group["rules"]]


def recordings() -> list[dict[str, Any]]:
    """Return the recording rules."""
    return rules("recording.yaml")


def alerts() -> list[dict[str, Any]]:
    """Return the alerting rules; several may have one name."""
    return rules("alerts.yaml")


RULES = [rule for path in RULE_FILES for rule in rules(path.name)]
WORDS = [
    {
        *re.findall(r"[\w:]+", re.sub(r'"[^"]*"', "", rule["expr"])),
        # Their templates have queries.
        *re.findall(r"[\w:]+", " ".join(rule.get("annotations", {}).values())),
    }
    for rule in RULES
]
"""Names of series, functions and labels in each rule, and the words of its annotations."""


class PromtoolTest(NamedTuple):
    """One test of a file for ``promtool test rules``.

    Attributes:
        id: The name of the file, and the number of the test in it.
        text: A file with this test alone.
        test: The same as data.
    """

    id: str
    text: str
    test: dict[str, Any]


@cache
def promtool_tests() -> list[PromtoolTest]:
    """Return the tests of all files."""
    found = []
    for path in TESTS:
        head, *tests = re.split(r"^(?=  - name: )", path.read_text(), flags=re.MULTILINE)
        for number, text in enumerate(tests):
            (test,) = yaml.safe_load(text)
            found.append(PromtoolTest(f"{path.stem}-{number}", head + text, test))
    return found


def rules_of(test: dict[str, Any]) -> list[int]:
    """Return the places in ``RULES`` of the rules on which the results of a test of promtool depend."""
    looks = test.get("promql_expr_test", ())
    asked = " ".join([look["expr"] for look in looks])
    wanted = {*re.findall(r"[\w:]+", asked)}
    wanted |= {look["alertname"] for look in test.get("alert_rule_test", ())}
    found: set[int] = set()
    before = -1
    while before < len(found):
        before = len(found)
        for place, rule in enumerate(RULES):
            if rule.get("record", rule.get("alert")) in wanted:
                found.add(place)
                wanted |= WORDS[place]
    return sorted(found)


def write_rules(directory: Path, places: Collection[int]) -> None:
    """Write the rule files with these rules alone."""
    numbers = itertools.count()
    for path in RULE_FILES:
        kept = [
            {**group, "rules": [rule for rule in group["rules"] if next(numbers) in places]}
            for group in groups(path.name)
        ]
        directory.joinpath(path.name).write_text(json.dumps({"groups": kept}))


def alert_tests() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name and the expected alerts of every alert test."""
    for each in promtool_tests():
        for look in each.test.get("alert_rule_test", ()):
            yield look["alertname"], look.get("exp_alerts", [])


def families() -> dict[str, tuple[str, frozenset[str], Row | None]]:
    """Return type, labels and row, if an engine has one, of every family that a page can have."""
    found: dict[str, tuple[str, frozenset[str], Row | None]] = {
        name: (row.kind, frozenset(row.labels), None) for name, row in BY_NAME.items()
    }
    for dialect in DIALECTS.values():
        for row in dialect.rows_for():
            _, labels, _ = found.get(row.name, ("", frozenset[str](), None))
            found[row.name] = row.kind, labels | frozenset(row.labels), row
    return found | {name: (each[0], each[1], None) for name, each in made_families().items()}


def selectors(expr: str) -> list[Selector]:
    """Return the selectors of engines' and the exporter's metrics in an expression."""
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


def label_lists(keyword: str, expr: str) -> list[set[str]]:
    """Return the labels of every ``keyword (...)`` in an expression: by, without, on or ignoring."""
    found = re.findall(rf"\b{keyword} \(([^)]*)\)", expr)
    return [set(re.findall(r"\w+", labels)) for labels in found]
