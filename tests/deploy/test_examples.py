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
from sidestep.catalogue import DIALECTS

EXAMPLES = sorted((ROOT / "deploy" / "examples").iterdir())
RESOURCES = ("hpa.yaml", "keda.yaml", "podmonitor.yaml", "podmonitor-aggregator.yaml")
FAMILIES = {row.name for rows in DIALECTS.values() for row in rows}
PORT = template()["initContainers"][1]["ports"][0]


def text(name: str) -> str:
    """Of an example."""
    return (ROOT / "deploy" / "examples" / name).read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_metrics_exist(path: Path) -> None:
    """In the catalogue, by their whole names."""
    queries = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))

    assert set(re.findall(r"\b(?:vllm|sglang):\w+", queries)) <= FAMILIES


def test_resources_are_valid(tmp_path: Path) -> None:
    """As the schemas of Kubernetes and of its operators have them."""
    found = [one for name in RESOURCES for one in resources(text(name))]

    validate(found, tmp_path)
    assert {one["kind"] for one in found} == {
        "HorizontalPodAutoscaler",
        "PodMonitor",
        "ScaledObject",
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_autoscalers_queries_are_one_number(tmp_path: Path) -> None:
    """KEDA takes one value, and an empty answer is no zero; the adapter's one for each pod."""
    (trigger,) = resources(text("keda.yaml"))[0]["spec"]["triggers"]
    (rule,) = yaml.safe_load(text("adapter-values.yaml"))["rules"]["custom"]
    adapter = (
        rule["metricsQuery"]
        .replace("<<.GroupBy>>", "namespace, pod")
        .replace("<<.LabelMatchers>>", 'namespace="default"')
    )
    series = [
        f'vllm:num_requests_{what}{{namespace="default",pod="{pod}",engine="{engine}",'
        f'model_name="Qwen/Qwen3-0.6B"}}'
        for what in ("running", "waiting")
        for pod in "ab"
        for engine in "01"
    ]
    test = {
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": one, "values": "3+0x4"} for one in series],
                "promql_expr_test": [
                    {
                        "expr": trigger["metadata"]["query"],
                        "eval_time": "1m",
                        "exp_samples": [{"labels": "{}", "value": 24}],
                    },
                    {
                        "expr": adapter,
                        "eval_time": "1m",
                        "exp_samples": [
                            {"labels": f'{{namespace="default", pod="{pod}"}}', "value": 12}
                            for pod in "ab"
                        ],
                    },
                ],
            }
        ]
    }
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps(test))
    done = subprocess.run(
        [str(shutil.which("promtool")), "test", "rules", file],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_who_scrapes_knows_the_port() -> None:
    """By name or number, and the picker gets the pod's view."""
    (monitor,) = resources(text("podmonitor.yaml"))
    (picker,) = resources(text("endpoint-picker.yaml"))
    parameters = picker["plugins"][0]["parameters"]

    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == PORT["name"]
    assert f"regex: {PORT['name']}," in text("prometheus.yml")
    assert (parameters["path"], parameters["port"]) == ("/metrics/pod", PORT["containerPort"])
