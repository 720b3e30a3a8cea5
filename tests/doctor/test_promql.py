"""`sidestep doctor --rules`: it refuses the queries that promtool refuses, and no others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from boards import DASHBOARDS
from command_line import one_line
from promtool import PROMTOOLS, run
from rulefiles import RULE_FILES
from sidestep_tools.doctor.queries import rule_files
from sidestep_tools.doctor.queries.files import queries_of, read
from sidestep_tools.doctor.queries.promql import PromqlError, parse

DATA = Path(__file__).parents[1] / "data"
ACCEPTED = (DATA / "promql_accepted.txt").read_text().splitlines()
REFUSED = (DATA / "promql_refused.txt").read_text().splitlines()
OURS = [
    *(
        rule["expr"]
        for path in RULE_FILES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ),
    *(query.text for path in DASHBOARDS for query in queries_of(read(str(path)))),
]
"""Queries of our rules and dashboards."""
ACCEPTED_ALL_THE_SAME = (
    # The library has Rust's regular expressions, and Prometheus has RE2.
    r'a{b=~"a{1001}"}',
    'a{b=~"x**"}',
    'a{b=~"x{2}{3}"}',
    'a{b=~"(x{500}){500}"}',
    'a{b=~"[a--b]"}',
    'a{b=~"(?x) a b"}',
    'a{b=~"(?u)x"}',
    'a{b=~"(?R)x"}',
    r'a{b=~"\\u0041"}',
    r'a{b=~"\\p{Alphabetic}"}',
)
REFUSED_ALL_THE_SAME = (
    r'a{b=~"\\Qa.b\\E"}',
    'a{b=~"[[]"}',
    'a{b=~"(?P<n>x)(?P<n>y)"}',
    # Prometheus 2 refuses these as well.
    "rate(x[5 m])",
    "1_000",
)


def mistakes(query: str) -> list[str]:
    """Return what doctor says about a rule file whose only rule has the query."""
    rules = [{"record": "a", "expr": query}]
    return list(rule_files.mistakes({"groups": [{"name": "g", "rules": rules}]}))


@pytest.mark.parametrize("query", [*ACCEPTED, *ACCEPTED_ALL_THE_SAME])
def test_queries_that_prometheus_accepts(query: str) -> None:
    """Nothing is wrong with them."""
    assert mistakes(query) == []


@pytest.mark.parametrize("query", [*REFUSED, *REFUSED_ALL_THE_SAME])
def test_queries_that_prometheus_refuses(query: str) -> None:
    """Each is an error of one line, which names the rule."""
    (text,) = mistakes(query)
    assert text.endswith(" (rule 1 of group g)")
    assert "\n" not in text


@pytest.mark.skipif(PROMTOOLS["3"] is None, reason="there is no promtool 3 (make tools)")
def test_promtool_agrees(tmp_path: Path) -> None:
    """It refuses the same queries, but for those that are listed with a reason."""
    accepted = [*ACCEPTED, *REFUSED_ALL_THE_SAME, *OURS]
    refused = [*REFUSED, *ACCEPTED_ALL_THE_SAME]
    rules = [{"record": f"c{n}", "expr": query} for n, query in enumerate([*accepted, *refused])]
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    done = run("check", "rules", "--lint=none", path, binary=PROMTOOLS["3"])
    named = {int(each) for each in re.findall(r'rule \d+, "c(\d+)"', done.stdout + done.stderr)}

    assert [query for n, query in enumerate(accepted) if n in named] == []
    assert [query for n, query in enumerate(refused, len(accepted)) if n not in named] == []


@pytest.mark.parametrize("query", ["(" * 10_000, "abs(" * 5_000, "+".join("x" * 10_000)])
def test_a_deep_query(query: str) -> None:
    """It is refused, and does not overflow a stack."""
    with pytest.raises(PromqlError, match="it has more than 250 operators"):
        parse(query)


def test_signs_in_texts_are_no_operators() -> None:
    """A long pattern is no deep query."""
    parse(f'x{{a=~"{"(a|b)+" * 300}"}}')


def test_without_the_library(tmp_path: Path) -> None:
    """One line says what to install, where there are queries to check."""
    script = (
        "import sys; sys.modules['promql_parser'] = None; from sidestep.app.cli import main; main()"
    )
    rules, empty = tmp_path / "rules.yaml", tmp_path / "pod.yaml"
    rules.write_text('groups: [{name: g, rules: [{record: a, expr: "x"}]}]')
    empty.write_text("kind: Pod")
    for option, path, status in (("--rules", rules, 2), ("--manifest", empty, 0)):
        done = subprocess.run(
            [sys.executable, "-c", script, "doctor", option, str(path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status
        if status:
            one_line(done, 2, "queries need promql-parser, which is not here: pip install")
