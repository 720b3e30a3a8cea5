"""`sidestep doctor --manifest`: what KEDA, an HPA and prometheus-adapter would ask for, and never get."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from command_line import sidestep
from sidestep.cli import cli

DATA = Path(__file__).parents[1] / "data"
EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
TRIGGER = {
    "serverAddress": "http://prometheus:9090",
    "query": "sum(vllm:num_requests_waiting)",
    "threshold": "5",
    "ignoreNullValues": "false",
}
RULE = {
    "seriesQuery": '{__name__="vllm:num_requests_waiting",namespace!="",pod!=""}',
    "resources": {"overrides": {"namespace": {"resource": "namespace"}}},
    "name": {"matches": "^vllm:(.*)$", "as": "vllm_${1}"},
    "metricsQuery": "sum(<<.Series>>{<<.LabelMatchers>>,engine!~'x'}) by (<<.GroupBy>>)",
}


def found(path: Path, *resources: dict[str, Any], page: bool = False) -> dict[str, str]:
    """Return the text of each code that doctor finds in resources, beside the page of a real vLLM or not."""
    file = path / "all.yaml"
    file.write_text(yaml.safe_dump_all(resources))
    arguments = ["--manifest", str(file)]
    if page:
        (path / "page.txt").write_bytes(
            gzip.decompress((DATA / "page_main.txt.gz").read_bytes())
            + b"sidestep_build_info 1\n"  # whose own checks have other tests
        )
        arguments += ["--engine-page", str(path / "page.txt")]
    done = CliRunner().invoke(cli, ["doctor", "--json", *arguments])
    findings = json.loads(done.stdout)["findings"]
    return {e["code"]: e["text"] for e in findings if e["subject"].startswith(str(file))}


def scaled(**metadata: str | None) -> dict[str, Any]:
    """Return a ScaledObject with these values in its only trigger; None: without the key."""
    given = {key: value for key, value in {**TRIGGER, **metadata}.items() if value is not None}
    trigger = {"type": "prometheus", "metadata": given}
    return {"kind": "ScaledObject", "metadata": {"name": "a"}, "spec": {"triggers": [trigger]}}


def hpa(metric: str, **labels: str) -> dict[str, Any]:
    """Return an HPA that scales by a metric."""
    selected = {"name": metric, "selector": {"matchLabels": labels}}
    metrics = [
        {"type": "Resource", "resource": {"name": "cpu"}},
        {"type": "Pods", "pods": {"metric": selected}},
    ]
    return {"kind": "HorizontalPodAutoscaler", "spec": {"metrics": metrics}}


def adapter(**changes: Any) -> dict[str, Any]:
    """Return the ConfigMap of prometheus-adapter with one rule."""
    rules = {"rules": [{**RULE, **changes}]}
    return {"kind": "ConfigMap", "data": {"config.yaml": yaml.safe_dump(rules)}}


TRIGGERS: dict[str, dict[str, str | None]] = {
    "SD571": {"ignoreNullValues": None},
    "SD405": {"query": "sum(vllm_num_requests_waiting)"},
    "SD421": {"query": "avg(vllm:gpu_cache_usage_perc)"},
    "SD406": {"query": "sum(vllm:num_request_waiting)"},
    "SD403": {"query": "sum(vllm:num_requests_waiting"},
}


@pytest.mark.parametrize("code", TRIGGERS)
def test_triggers_of_keda(code: str, tmp_path: Path) -> None:
    """Each fault of a trigger is found, and nothing else."""
    assert list(found(tmp_path, scaled(**TRIGGERS[code]))) == [code]


def test_values_of_labels_are_those_of_the_page(tmp_path: Path) -> None:
    """A condition that no series of the page fulfils is found in triggers, HPAs and rules."""
    no_model = 'model_name="m-router"'
    trigger = scaled(query=f"sum(vllm:num_requests_waiting{{{no_model}}})")
    rule = adapter(seriesQuery=f"vllm:num_requests_waiting{{{no_model}}}")
    for resource in (trigger, rule, hpa("vllm_num_requests_waiting", model_name="m-router")):
        texts = found(tmp_path, resource, page=True)
        assert list(texts) == ["SD408"]
        assert "no series has model_name='m-router'" in texts["SD408"]


@pytest.mark.parametrize("is_chart", [False, True])
def test_rules_of_the_adapter(*, is_chart: bool, tmp_path: Path) -> None:
    """A rule for a name that no engine has is an error; a name that a rule makes is none."""
    rules = {"rules": {"default": False, "custom": [RULE]}} if is_chart else adapter()

    assert found(tmp_path, rules, hpa("vllm_num_requests_waiting"), page=True) == {}
    assert found(tmp_path, rules, hpa("s0-prometheus")) == {}  # KEDA's own
    assert list(found(tmp_path, adapter(seriesQuery="vllm_num_requests_waiting"))) == ["SD405"]


def test_an_hpa_with_a_former_name(tmp_path: Path) -> None:
    """Without the adapter's rules, its metric's name is compared with the catalogue."""
    assert list(found(tmp_path, hpa("vllm_gpu_cache_usage_perc"))) == ["SD421"]


@pytest.mark.parametrize("given", [None, 1, "text", [], [1], {"name": 1}])
def test_malformed_autoscalers_are_no_crash(given: Any, tmp_path: Path) -> None:
    """A value of any type, anywhere."""
    resources = [
        {"kind": "ScaledObject", "spec": {"triggers": given}},
        {"kind": "ScaledObject", "spec": {"triggers": [{"type": "prometheus", "metadata": given}]}},
        {"kind": "HorizontalPodAutoscaler", "spec": {"metrics": given}},
        {"kind": "HorizontalPodAutoscaler", "spec": {"metrics": [{"type": "Pods", "pods": given}]}},
        {"rules": given},
        {"rules": {"custom": given}},
        adapter(name=given),
        adapter(name={"matches": "(", "as": "$9"}),
        adapter(metricsQuery=given),
    ]
    found(tmp_path, *resources)


def test_our_examples_are_good() -> None:
    """Nothing is wrong with the examples of this repository."""
    done = sidestep("doctor", "--manifest", str(EXAMPLES))
    assert done.stdout == f"checked {EXAMPLES}: nothing is wrong\n"
