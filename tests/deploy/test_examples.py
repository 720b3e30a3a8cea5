"""Examples that users copy: valid, and asking for metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from manifests import ROOT, resources, template
from schemas import validate
from sidestep.engines.dialects import DIALECTS

EXAMPLES = sorted((ROOT / "deploy" / "examples").iterdir())
RESOURCES = (
    "hpa.yaml",
    "hpa-saturation.yaml",
    "keda.yaml",
    "keda-saturation.yaml",
    "podmonitor.yaml",
    "podmonitor-aggregator.yaml",
)
FAMILIES = {row.name for dialect in DIALECTS.values() for row in dialect.rows}
PORT = template()["initContainers"][1]["ports"][0]


def text(name: str) -> str:
    """Of an example."""
    return (ROOT / "deploy" / "examples" / name).read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_metrics_exist(path: Path) -> None:
    """In the catalogue, by their whole names."""
    queries = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))

    assert set(re.findall(r"\b(?:vllm:|sglang:|sidestep_)\w+", queries)) <= FAMILIES


def test_resources_are_valid(tmp_path: Path) -> None:
    """As the schemas of Kubernetes and of its operators have them."""
    found = [one for name in RESOURCES for one in resources(text(name))]

    validate(found, tmp_path)
    assert {one["kind"] for one in found} == {
        "HorizontalPodAutoscaler",
        "PodMonitor",
        "ScaledObject",
    }


MODEL = 'model_name="Qwen/Qwen3-0.6B"'
IN_FLIGHT = {
    f'vllm:num_requests_{what}{{namespace="default",pod="{pod}",engine="{engine}",{MODEL}}}': "3+0x4"
    for what in ("running", "waiting")
    for pod in "abc"
    for engine in "01"
}
"""Three pods of two ranks each."""
KNOWN = {
    f'sidestep_saturation_ratio{{namespace="default",pod="{pod}",engine="{engine}",{MODEL}}}': values
    for pod, engine, values in (("a", "0", "0.6+0x4"), ("a", "1", "0.9+0x4"), ("b", "0", "0.7+0x4"))
}
"""Of the third nobody knows yet what it can serve."""


def query(name: str) -> str:
    """Of KEDA's only trigger."""
    (trigger,) = resources(text(name))[0]["spec"]["triggers"]
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    found: str = trigger["metadata"]["query"]
    return found


def adapted(metric: str) -> str:
    """The adapter's query of a metric, as it asks for all pods."""
    rules = yaml.safe_load(text("adapter-values.yaml"))["rules"]["custom"]
    (rule,) = [rule for rule in rules if rule["name"]["as"] == metric]
    found: str = rule["metricsQuery"]
    return found.replace("<<.GroupBy>>", "namespace, pod").replace(
        "<<.LabelMatchers>>", 'namespace="default"'
    )


def asked(directory: Path, series: dict[str, str], expr: str, wanted: dict[str, float]) -> None:
    """Hold that ``expr`` has the samples ``wanted``, by labels, over ``series``."""
    look = {
        "expr": f"round({expr}, 0.001)",
        "eval_time": "1m",
        "exp_samples": [{"labels": labels, "value": value} for labels, value in wanted.items()],
    }
    inputs = [{"series": one, "values": values} for one, values in series.items()]
    test = {"interval": "15s", "input_series": inputs, "promql_expr_test": [look]}
    file = directory / "test.yaml"
    file.write_text(json.dumps({"tests": [test]}))
    done = subprocess.run(
        [str(shutil.which("promtool")), "test", "rules", file],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_autoscalers_queries_are_one_number(tmp_path: Path) -> None:
    """KEDA takes one value, and an empty answer is no zero; the adapter's one for each pod."""
    each = {f'{{namespace="default", pod="{pod}"}}': 12.0 for pod in "abc"}

    asked(tmp_path, IN_FLIGHT, query("keda.yaml"), {"{}": 36.0})
    asked(tmp_path, IN_FLIGHT, adapted("inference_requests_in_flight"), each)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_who_does_not_know_its_saturation_counts_as_the_others(tmp_path: Path) -> None:
    """A new pod must not be scaled away for that, and before anybody knows there is a number, too."""
    saturated = query("keda-saturation.yaml")
    metric = adapted("inference_saturation_ratio")

    asked(tmp_path, IN_FLIGHT | KNOWN, saturated, {"{}": 2.4})
    asked(tmp_path, IN_FLIGHT, saturated, {"{}": 0.288})
    asked(tmp_path, {}, saturated, {})
    each = {
        f'{{namespace="default", pod="{pod}"}}': value for pod, value in (("a", 0.9), ("b", 0.7))
    }
    asked(tmp_path, IN_FLIGHT | KNOWN, metric, each)


def test_autoscalers_ask_for_what_the_adapter_makes() -> None:
    """By the names that it gives."""
    rules = yaml.safe_load(text("adapter-values.yaml"))["rules"]["custom"]
    wanted = {
        metric["pods"]["metric"]["name"]
        for name in ("hpa.yaml", "hpa-saturation.yaml")
        for resource in resources(text(name))
        for metric in resource["spec"]["metrics"]
    }

    assert wanted == {rule["name"]["as"] for rule in rules}


def test_who_scrapes_knows_the_port() -> None:
    """By name or number, and the picker gets the pod's view."""
    (monitor,) = resources(text("podmonitor.yaml"))
    (picker,) = resources(text("endpoint-picker.yaml"))
    parameters = picker["plugins"][0]["parameters"]

    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == PORT["name"]
    assert f"regex: {PORT['name']}," in text("prometheus.yml")
    assert (parameters["path"], parameters["port"]) == ("/metrics/pod", PORT["containerPort"])
