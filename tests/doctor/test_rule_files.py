"""`sidestep doctor --rules`: it calls no file well that promtool refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from promtool import PROMTOOLS, run
from rulefiles import RULE_FILES
from sidestep.app.cli import cli

GROUP = "groups:\n- name: a\n  rules:\n"
EXPR = "expr: vllm:num_requests_running"
RULE = f"{GROUP}  - record: a\n    {EXPR}"
ALERT = f"{GROUP}  - alert: a\n    {EXPR}"
REFUSED = {
    "record and alert": f"{RULE}\n    alert: b",
    "neither": f"{GROUP}  - {EXPR}",
    "no expr": f"{RULE}\n  - record: b",
    "an unknown field of a rule": f"{RULE}\n    forr: 5m",
    "an unknown field of a group": f"{RULE}\n  intervall: 5m",
    "an unknown field": f"group: []\n{RULE}",
    "no groups": f"rules:\n- record: a\n  {EXPR}",
    "groups as a mapping": f"groups:\n  name: a\n  rules:\n  - record: a\n    {EXPR}",
    "no name": f"groups:\n- rules:\n  - record: a\n    {EXPR}",
    "two groups of one name": f"{RULE}\n- name: a",
    "a duplicate key": f"{RULE}\n    record: b",
    "a duration with words": f"{ALERT}\n    for: 5 minutes",
    "a duration in another order": f"{ALERT}\n    for: 5m1h",
    "a duration without a unit": f"{ALERT}\n    for: 5",
    "another duration": f"{ALERT}\n    keep_firing_for: 5x",
    "an interval": f"{RULE}\n  interval: often",
    "a limit": f"{RULE}\n  limit: x",
    "a recording with for": f"{RULE}\n    for: 5m",
    "a recording with annotations": f"{RULE}\n    annotations: {{a: b}}",
    "a label of the name": f"{RULE}\n    labels: {{__name__: b}}",
    "a list as a label": f"{ALERT}\n    labels: {{a: [b]}}",
    "a template without its end": f"{ALERT}\n    annotations: {{a: '{{{{ $value'}}",
    "a function of no template": f"{ALERT}\n    annotations: {{a: '{{{{ $value | nothing }}}}'}}",
    "syntax": f"{RULE} +",
    "types": f"{RULE.replace('expr: ', 'expr: rate(')})",
    "functions": f"{RULE.replace('expr: ', 'expr: nothing(')})",
}
ACCEPTED = {
    "durations": f"{ALERT}\n    for: 1h5m\n    keep_firing_for: 0\n  interval: 30s\n  query_offset: 1m",
    "numbers as labels": f"{ALERT}\n    labels: {{a: 5, b: true, c: }}\n  labels: {{x: y}}\n  limit: 3",
    "equal rules": f"{RULE}\n  - record: a\n    {EXPR}",
    "no rules": f"{RULE}\n- name: b\n- name: c\n  rules: []",
    "a template": f"{ALERT}\n    annotations: {{a: '{{{{ $value | humanize }}}}'}}",
    "templates": f"""{ALERT}
    annotations:
      a: '{{{{- /* it */ -}}}} {{{{ with query "nothing(x[1e3])" }}}}{{{{ . | first | value | printf "%.0f" }}}}{{{{ end }}}}'
      b: '{{{{ $x := reReplaceAll "a" `b c` $labels.job }}}}{{{{ if and (gt $value 1e3) true }}}}{{{{ $x | toUpper }}}}{{{{ end }}}}'
""",
}


def found(path: Path, text: str) -> dict[str, str]:
    """Return the severities of doctor's findings on a rule file by their codes."""
    path.write_text(text)
    done = CliRunner().invoke(cli, ["doctor", "--json", "--rules", str(path)])
    return {each["code"]: each["severity"] for each in json.loads(done.output)["findings"]}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_files_that_prometheus_refuses(text: str, tmp_path: Path) -> None:
    """Each is an error."""
    assert "error" in found(tmp_path / "rules.yaml", text).values()


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED)
def test_files_that_prometheus_accepts(text: str, tmp_path: Path) -> None:
    """None has an error or a warning."""
    assert found(tmp_path / "rules.yaml", text) == {}


@pytest.mark.skipif(PROMTOOLS["3"] is None, reason="there is no promtool 3 (make tools)")
def test_promtool_agrees(tmp_path: Path) -> None:
    """It refuses and accepts the same files."""
    files = {**REFUSED, **ACCEPTED}
    files |= {path.name: path.read_text() for path in RULE_FILES}
    refused, path = set(), tmp_path / "rules.yaml"
    for name, text in files.items():
        path.write_text(text)
        if run("check", "rules", "--lint=none", path, binary=PROMTOOLS["3"]).returncode:
            refused.add(name)
    assert refused == {*REFUSED}
