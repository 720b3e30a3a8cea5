"""Recording rules and alerts: what they name exists, they are tested both ways, and have a runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from rulefiles import (
    RECORDED,
    ROOT,
    RULE_FILES,
    RUNBOOKS,
    SUFFIX,
    TESTS,
    alert_tests,
    alerts,
    divisors,
    families,
    groups,
    promtool_tests,
    recordings,
    selectors,
)
from sidestep.catalog import slo
from sidestep.catalog.buckets import DEFAULTS

PROMTOOLS = {
    "2": shutil.which("promtool"),
    "3": shutil.which("promtool", path=ROOT / "build" / "prometheus-3" / "usr" / "bin"),
}
NAMES = sorted({alert["alert"] for alert in alerts()})
RULES = [*recordings(), *alerts()]
SELECTORS = [selector for rule in RULES for selector in selectors(rule["expr"])]
GROWING = {"rate", "increase", "changes"}
TARGET = {"cluster", "namespace", "job", "instance", "pod"}
ALERTING = ROOT / "docs" / "alerting.md"
SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]
SLOS = {"time_to_first_token", "inter_token_latency", "request_latency", "availability"}
"""By bounds and counters of the engines."""
COUNTED = {*slo.FAMILIES, slo.AVAILABILITY}
"""By the exporter, for all dialects."""
WINDOWS = ("1h", "6h", "1d", "3d")


@pytest.fixture(params=PROMTOOLS)
def promtool(request: pytest.FixtureRequest) -> str:
    """One of each major version that is there."""
    found = PROMTOOLS[request.param]
    if found is None:
        pytest.skip(f"there is no promtool {request.param} (make tools)")
    return found


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Its result and its output."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def test_promtool_takes_the_rules(promtool: str) -> None:
    """Expressions, names and templates."""
    done = run(promtool, "check", "rules", *RULE_FILES)

    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_do_what_their_tests_say(promtool: str) -> None:
    """``promtool test rules`` over all files beside this one, two at once."""
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda path: run(promtool, "test", "rules", path), TESTS))

    assert [one.stdout + one.stderr for one in done if one.returncode] == []
    assert all("SUCCESS" in one.stdout for one in done)


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_is_seen_firing_and_silent(name: str) -> None:
    """By looks of its own, not by what other looks happen to leave out."""
    looks = [bool(fired) for alert, fired in alert_tests() if alert == name]

    assert set(looks) == {True, False}


def test_tests_name_alerts_that_exist() -> None:
    """A renamed alert is silent in every test."""
    assert {alert for alert, _ in alert_tests()} == set(NAMES)


def test_every_objective_burns_at_every_speed() -> None:
    """Fast for each objective and kind of engine that has it, slow ones for one of them."""
    fired = [
        one["exp_labels"]
        for name, all_ in alert_tests()
        if name == "InferenceSLOBurn"
        for one in all_
    ]
    measured = {
        (rule["labels"]["slo"], rule["labels"]["dialect"])
        for rule in recordings()
        if rule["record"] == "model:slo_events:rate5m" and "labels" in rule
    }
    fast = {(one["slo"], one.get("dialect", "")) for one in fired if one["long"] == "1h"}

    # An operator may call one of the exporter's as the rules call theirs.
    own = {("time_to_first_token", "")}
    assert fast == measured | own | {(name, "") for name in COUNTED}
    assert {name for name, _ in measured} == SLOS
    assert {one["long"] for one in fired} == set(WINDOWS)


def test_what_the_exporter_counts_burns_once_at_every_speed() -> None:
    """What its objectives replace is left out of slow alerts as of fast ones."""
    burning = [alert for alert in alerts() if alert["alert"] == "InferenceSLOBurn"]

    assert len(burning) == len(WINDOWS)
    for alert in burning:
        assert alert["expr"].rstrip().endswith("\nunless model:slo_replaced:rate5m")


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_has_its_runbook(name: str) -> None:
    """Where its link leads, with the sections that a reader at night looks for."""
    text = (RUNBOOKS / f"{name}.md").read_text()
    links = {
        alert["annotations"]["runbook_url"].rsplit("/", 1)[1]
        for alert in alerts()
        if alert["alert"] == name
    }

    assert links == {f"{name}.md"}
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert [part.strip() for part in re.split(r"^##? .+$", text, flags=re.MULTILINE)[2:]].count(
        ""
    ) == 0


def test_every_runbook_has_its_alert() -> None:
    """None is left behind."""
    assert sorted(path.stem for path in RUNBOOKS.glob("*.md") if path.stem != "README") == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_alerts_say_what_they_must(name: str) -> None:
    """How urgent, what, and where to read on; and no label that the alert does not have."""
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
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
        text = alert["annotations"]["summary"] + alert["annotations"]["description"]
        assert set(re.findall(r"\$labels\.(\w+)", text)) - shown == set()


def test_alerts_of_one_name_differ_in_labels() -> None:
    """Otherwise Alertmanager takes them for one."""
    seen = Counter((alert["alert"], str(sorted(alert["labels"].items()))) for alert in alerts())

    assert set(seen.values()) == {1}


def test_what_rules_read_exists() -> None:
    """Families of the catalogue: counters and histograms by their growth, with labels and values of theirs."""
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


def test_what_rules_are_built_on_is_recorded() -> None:
    """A renamed recording rule would leave an alert without data."""
    recorded = {rule["record"] for rule in recordings()}
    named = {name for rule in RULES for name in RECORDED.findall(rule["expr"])}

    assert named - recorded == set()


def test_nothing_is_divided_by_no_traffic() -> None:
    """By numbers, and by what is compared to be above 0."""
    found = [divisor for rule in RULES for divisor in divisors(rule["expr"])]

    assert len(found) > 20
    assert [one for one in found if not re.fullmatch(r"[\d.e]+|.+ > 0", one, re.DOTALL)] == []


def test_thresholds_are_bounds_in_both_spellings() -> None:
    """Of that family: "1" and "1.0" are one bound, and "100" is none of them."""
    known = families()
    for selector in SELECTORS:
        for label, operator, value in selector.matchers:
            if label != "le":
                continue
            row = known[SUFFIX.sub("", selector.name)][2]
            assert row is not None
            pattern = value if operator == "=~" else re.escape(value)
            bounds = row.bounds or DEFAULTS[row.buckets]
            matched = [
                bound
                for bound in bounds
                for spelling in {repr(float(bound)), f"{bound:g}"}
                if re.fullmatch(pattern, spelling)
            ]
            spellings = {repr(float(matched[0])), f"{matched[0]:g}"}
            assert matched == [matched[0]] * len(spellings), selector


def test_levels_say_what_is_left() -> None:
    """``model:`` has a model's labels and nothing of an instance, whatever it is made of."""
    for rule in recordings():
        level = rule["record"].partition(":")[0]
        by = [set(labels.split(", ")) for labels in re.findall(r"by \(([^)]*)\)", rule["expr"])]
        if level.startswith("model"):
            assert all(labels & {"instance", "pod", "engine"} == set() for labels in by), rule
        if level.startswith("instance"):
            assert all(labels >= TARGET for labels in by), rule
        assert re.fullmatch(r"[a-z_]+:[a-z0-9_]+:[a-z0-9_]+", rule["record"])


def test_a_burnt_budget_can_be_seen() -> None:
    """A factor times the budget is below 1, and a second of the guard is a second of its group."""
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


def test_what_inhibits_what_exists() -> None:
    """Names and labels of the example for Alertmanager."""
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
    """With its severities, and the burn table as the rules have it."""
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


def test_promtool_evaluates_in_order() -> None:
    """Its tests have all groups, in the order of the files, or what builds on others comes too late."""
    order = [group["name"] for name in ("recording.yaml", "alerts.yaml") for group in groups(name)]
    for path in TESTS:
        text = path.read_text()
        named = re.findall(r"^  - (sidestep-[\w-]+)$", text, re.MULTILINE)
        assert named in (order, order[: len(groups("recording.yaml"))]), path
    assert promtool_tests()
