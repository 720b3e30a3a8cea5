"""Recording rules and alerts: valid, tested both ways, and documented by runbooks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from boards import DASHBOARDS, dashboard, variables
from prometheus_server import VERSIONS
from promtool import PROMTOOLS, run
from rulefiles import (
    ROOT,
    RULE_FILES,
    RULES,
    RUNBOOKS,
    SUFFIX,
    PromtoolTest,
    alert_tests,
    alerts,
    families,
    groups,
    label_lists,
    promtool_tests,
    recordings,
    rules_of,
    selectors,
    write_rules,
)
from sidestep.catalog import slo
from sidestep.catalog.buckets import DEFAULTS
from trtllm_page import made_families

NAMES = sorted({alert["alert"] for alert in alerts()})
SELECTORS = [selector for rule in RULES for selector in selectors(rule["expr"])]
GROWING = {"rate", "increase", "changes"}
ORIGIN = {"cluster", "namespace", "job"}
TARGET = {*ORIGIN, "instance", "pod"}
PLACE = {"cluster", "namespace", "pod"}
"""Labels that GPUs of dcgm-exporter, which is another job, have in common with engines."""
RANKS = {"tp_rank", "pp_rank", "moe_ep_rank", "attn_cp_rank"}
ALERTING = ROOT / "docs" / "alerting.md"
SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]
SLOS = {"time_to_first_token", "inter_token_latency", "request_latency", "availability"}
"""By bounds and counters of the engines."""
COUNTED = {*slo.LATENCIES, slo.AVAILABILITY}
"""By the exporter, for all dialects."""
WINDOWS = ("1h", "6h", "1d", "3d")
TO_RULES = "../../deploy/rules/"
"""Path of the rules in promtool's tests, which can be run as they are."""
LONG = "boundaries_long"
"""The bounds of windows of days, which ``objectives_long`` tests more coarsely."""


@pytest.fixture(params=VERSIONS)
def promtool(request: pytest.FixtureRequest) -> str:
    """Return the promtool of a major version that is installed."""
    found = PROMTOOLS[request.param]
    if found is None:
        pytest.skip(f"there is no promtool {request.param} (make tools)")
    return found


def test_the_rules_are_valid(promtool: str) -> None:
    """Expressions, names and templates are valid."""
    done = run("check", "rules", *RULE_FILES, binary=promtool)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.id, marks=[pytest.mark.long] * each.id.startswith(LONG))
        for each in promtool_tests()
    ],
)
def test_promtool_tests_pass(promtool: str, tmp_path: Path, each: PromtoolTest) -> None:
    """``promtool test rules`` passes for every test in this folder, with the rules that it looks at."""
    write_rules(tmp_path, rules_of(each.test))
    path = tmp_path / "test.yaml"
    path.write_text(each.text.replace(TO_RULES, ""))
    done = run("test", "rules", path, binary=promtool)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_is_tested_firing_and_silent(name: str) -> None:
    """Every alert has a test in which it fires, and one in which it does not."""
    looks = [bool(fired) for alert, fired in alert_tests() if alert == name]

    assert set(looks) == {True, False}


def test_burn_alerts_leave_out_replaced_objectives() -> None:
    """Every burn alert leaves out the objectives that the exporter counts itself."""
    burning = [alert for alert in alerts() if alert["alert"] == "InferenceSLOBurn"]

    assert len(burning) == len(WINDOWS)
    for alert in burning:
        assert alert["expr"].rstrip().endswith("\nunless model:slo_replaced:rate5m")


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_has_its_runbook(name: str) -> None:
    """An alert links to its runbook, which has all sections."""
    text = (RUNBOOKS / f"{name}.md").read_text()
    links = {
        alert["annotations"]["runbook_url"].rsplit("/", 1)[1]
        for alert in alerts()
        if alert["alert"] == name
    }

    assert links == {f"{name}.md"}
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert len([*RUNBOOKS.glob("*.md")]) == len(NAMES) + (RUNBOOKS / "README.md").exists()
    opening = text.partition("## ")[0]
    assert all(f"../{name}.md)" in opening for name in ("live", "why", "doctor"))
    assert [part.strip() for part in re.split(r"^##? .+$", text, flags=re.MULTILINE)[2:]].count(
        ""
    ) == 0


@pytest.mark.parametrize("name", NAMES)
def test_alerts_have_severity_and_annotations(name: str) -> None:
    """An alert has a severity and annotations, which use only labels that it has."""
    shown = {
        label
        for alert, fired in alert_tests()
        if alert == name
        for one in fired
        for label in one["exp_labels"]
    }
    for alert in alerts():
        if alert["alert"] != name:
            continue
        assert alert["labels"]["severity"] in ("critical", "warning")
        found = alert["annotations"].keys() - {"live_page_url"}
        assert found == {"summary", "description", "runbook_url", "dashboard_url"}
        text = "".join(alert["annotations"].values())
        # A setup may be without any of those of ORIGIN, which a query matches as well.
        assert set(re.findall(r"\$labels\.(\w+)", text)) - shown - ORIGIN == set()


def test_alerts_link_to_boards_and_the_live_page() -> None:
    """Links choose a variable of a board; alerts about an exporter that can be reached link to its page."""
    boards = {board["uid"]: variables(board) for board in map(dashboard, DASHBOARDS)}
    for alert in alerts():
        url = alert["annotations"]["dashboard_url"]
        uid, variable, label = re.fullmatch(  # type: ignore[union-attr]
            r'https://grafana.example/d/([\w-]+)\?var-(\w+)=\{\{ (?:or )?\$labels\.(\w+)(?: "\$__all")? \| urlquery \}\}',
            url,
        ).groups()
        assert variable in boards[uid]
        assert label == ("model_name" if variable == "model" else variable)
        page = alert["annotations"].get("live_page_url")
        has_page = label == "instance" and alert["alert"] != "SidestepDown"
        assert page == ("http://{{ $labels.instance }}/" if has_page else None)


def test_selectors_match_the_catalogue() -> None:
    """Selectors use families, labels and values of the catalogue, and functions that fit the type."""
    known = families()
    for selector in SELECTORS:
        part = SUFFIX.search(selector.name)
        name = selector.name if selector.name in known else SUFFIX.sub("", selector.name)
        kind, labels, row = known[name]
        if name != selector.name:
            assert part is not None
            assert kind == "histogram", selector
            assert selector.function in GROWING, selector
        elif selector.function in GROWING:
            assert kind == "counter", selector
        else:
            assert kind != "histogram", selector
        for label, operator, value in selector.matchers:
            if label == "le":
                assert part is not None
                assert part[1] == "bucket", selector
                continue
            assert label in labels, selector
            if operator == "=" and row is not None and row.closed and value:
                assert value in row.closed, selector


def test_thresholds_are_bucket_bounds() -> None:
    """A matcher of ``le`` matches one bucket bound of the family, as "1" and as "1.0"."""
    known = families()
    for selector in SELECTORS:
        for label, operator, value in selector.matchers:
            if label != "le":
                continue
            name = SUFFIX.sub("", selector.name)
            row = known[name][2]
            pattern = value if operator == "=~" else re.escape(value)
            bounds = (
                made_families()[name].bounds if row is None else row.bounds or DEFAULTS[row.buckets]
            )
            matched = [
                bound
                for bound in bounds
                for spelling in {repr(float(bound)), f"{bound:g}"}
                if re.fullmatch(pattern, spelling)
            ]
            spellings = {repr(float(matched[0])), f"{matched[0]:g}"}
            assert matched == [matched[0]] * len(spellings), selector


def test_levels_fit_the_labels() -> None:
    """The level in a record's name fits the labels that the rule keeps."""
    for rule in recordings():
        level = rule["record"].partition(":")[0]
        for labels in label_lists("by", rule["expr"]):
            if level.startswith("model"):
                assert labels >= {"model_name", *ORIGIN}, rule
                assert labels & {"instance", "pod", "engine"} == set(), rule
            if level.startswith("instance"):
                assert labels >= TARGET, rule
        assert re.fullmatch(r"[a-z_]+:[a-z0-9_]+:[a-z0-9_]+", rule["record"])


def test_series_match_within_a_job() -> None:
    """Series of different clusters, namespaces or jobs never match, and all ranks of an engine count once."""
    for rule in RULES:
        of_gpus = re.search(r"\bDCGM_|\bpod:gpu", rule["expr"])
        for labels in [*label_lists("by", rule["expr"]), *label_lists("on", rule["expr"])]:
            least = PLACE if of_gpus and "job" not in labels else ORIGIN
            assert labels >= least or labels == {"slo"}, rule
        for labels in label_lists("without", rule["expr"]):
            assert labels >= RANKS or labels in ({"le"}, {"mode"}, {"pid"}), rule


def test_burn_factors_are_reachable() -> None:
    """Burn factors stay below the whole budget, and the guard fits the group's interval."""
    objectives = {
        rule["labels"]["slo"]: float(re.fullmatch(r"vector\((.+)\)", rule["expr"])[1])  # type: ignore[index]
        for rule in recordings()
        if rule["record"] == "slo:objective:ratio"
    }
    factors = re.findall(
        r"([\d.]+) \* \(1 - slo:objective:ratio\)", "".join(a["expr"] for a in alerts())
    )
    guards = set(
        re.findall(
            r"model:slo_errors:rate5m\[\w+\]\) \* (\d+) ", "".join(rule["expr"] for rule in RULES)
        )
    )
    (group,) = [g for g in groups("recording.yaml") if g["name"] == "sidestep-objectives"]

    assert objectives.keys() == SLOS | COUNTED
    assert max(map(float, factors)) * (1 - min(objectives.values())) < 1
    assert {f"{guard}s" for guard in guards} == {group["interval"]}


def test_inhibitions_name_existing_alerts() -> None:
    """The example for Alertmanager names existing alerts and severities."""
    (text,) = re.findall(r"```yaml\n(inhibit_rules.+?)```", ALERTING.read_text(), re.DOTALL)
    example = yaml.safe_load(text)
    named = {
        name
        for rule in example["inhibit_rules"]
        for matcher in (*rule["source_matchers"], *rule["target_matchers"])
        for name in re.findall(r"\b(?:Inference|Triton|Sidestep)\w+", matcher)
    }

    assert named <= set(NAMES)
    assert {rule["severity"] for rule in (alert["labels"] for alert in alerts())} == {
        *re.findall(r'severity="(\w+)"', text)
    }


def test_the_overview_has_every_alert() -> None:
    """docs/alerting.md lists every alert with its severities, and the table of burn rates."""
    text = ALERTING.read_text()
    rows = [line for line in text.splitlines() if "](runbooks/" in line and line.startswith("|")]
    for name in NAMES:
        (row,) = [row for row in rows if f"[{name}]" in row]
        severities = {a["labels"]["severity"] for a in alerts() if a["alert"] == name}
        assert set(row.split("|")[2].strip().split(", ")) == severities
    for alert in alerts():
        if alert["alert"] == "InferenceSLOBurn":
            labels = alert["labels"]
            (factor,) = set(re.findall(r"([\d.]+) \* \(1 - ", alert["expr"]))
            assert (
                f"| {labels['long']} | {labels['short']} | {factor} | {labels['severity']}"
                f" | {alert['for']} |"
            ) in text
