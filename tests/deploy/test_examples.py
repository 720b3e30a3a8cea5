"""The examples: valid resources, whose queries use metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from manifests import ROOT, resources, template
from promtool import assert_query, needs_promtool
from schemas import validate
from sidestep.engines.dialects import DIALECTS

EXAMPLES = sorted((ROOT / "deploy" / "examples").iterdir())
RESOURCES = (
    "hpa.yaml",
    "hpa-saturation.yaml",
    "keda.yaml",
    "keda-saturation.yaml",
    "podmonitor.yaml",
    "servicemonitor.yaml",
)
FAMILIES = {row.name for dialect in DIALECTS.values() for row in dialect.rows}
PORT = template()["initContainers"][1]["ports"][0]


def text(name: str) -> str:
    """Read an example."""
    return (ROOT / "deploy" / "examples" / name).read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_metrics_exist(path: Path) -> None:
    """Every metric in an example is in the catalogue."""
    queries = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))

    assert set(re.findall(r"\b(?:vllm:|sglang:|sidestep_)\w+", queries)) <= FAMILIES


def test_resources_are_valid(tmp_path: Path) -> None:
    """Resources are valid by the schemas of Kubernetes and the operators."""
    found = [one for name in RESOURCES for one in resources(text(name))]

    validate(found, tmp_path)
    assert {one["kind"] for one in found} == {
        "HorizontalPodAutoscaler",
        "PodMonitor",
        "ScaledObject",
        "Service",
        "ServiceMonitor",
    }


MODEL = 'model_name="Qwen/Qwen3-0.6B"'
IN_FLIGHT = {
    f'vllm:num_requests_{what}{{namespace="default",pod="{pod}",engine="{engine}",{MODEL}}}': "3+0x4"
    for what in ("running", "waiting")
    for pod in "abc"
    for engine in "01"
}
"""Series of three pods with two ranks each."""
KNOWN = {
    f'sidestep_saturation_ratio{{namespace="default",pod="{pod}",engine="{engine}",{MODEL}}}': values
    for pod, engine, values in (("a", "0", "0.6+0x4"), ("a", "1", "0.9+0x4"), ("b", "0", "0.7+0x4"))
}
"""Saturation ratios; the third pod is starting and has none."""


BACKLOG = {
    f'sidestep_unfinished_prefill_tokens{{namespace="default",pod="{pod}",engine="{engine}",{MODEL}}}': "500+0x4"
    for pod in "abc"
    for engine in "01"
}
"""Tokens to prefill of the same pods."""


def query(name: str, number: int = 0) -> str:
    """Return the query of one of KEDA's triggers."""
    trigger = resources(text(name))[0]["spec"]["triggers"][number]
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    found: str = trigger["metadata"]["query"]
    return found


def adapted(metric: str) -> str:
    """Return the adapter's query of a metric for all pods."""
    rules = yaml.safe_load(text("adapter-values.yaml"))["rules"]["custom"]
    (rule,) = [rule for rule in rules if rule["name"]["as"] == metric]
    found: str = rule["metricsQuery"]
    return found.replace("<<.GroupBy>>", "namespace, pod").replace(
        "<<.LabelMatchers>>", 'namespace="default"'
    )


@needs_promtool
def test_autoscaler_queries_give_one_value(tmp_path: Path) -> None:
    """KEDA's query gives one value, the adapter's one for each pod."""
    each = {f'{{namespace="default", pod="{pod}"}}': 12.0 for pod in "abc"}

    assert_query(tmp_path, IN_FLIGHT, query("keda.yaml"), {"{}": 36.0})
    assert_query(tmp_path, IN_FLIGHT, adapted("inference_requests_in_flight"), each)
    tokens = dict.fromkeys(each, 1000.0)
    assert_query(tmp_path, BACKLOG, query("keda-saturation.yaml", 1), {"{}": 3000.0})
    assert_query(tmp_path, BACKLOG, adapted("inference_unfinished_prefill_tokens"), tokens)


@needs_promtool
def test_one_hot_pod_does_not_stand_for_others(tmp_path: Path) -> None:
    """Each pod counts with its own ratio, the highest of its ranks; a pod that is starting has no load."""
    saturated = query("keda-saturation.yaml")
    metric = adapted("inference_saturation_ratio")

    assert_query(tmp_path, KNOWN, saturated, {"{}": 1.6})
    assert_query(tmp_path, IN_FLIGHT, saturated, {})
    each = {
        f'{{namespace="default", pod="{pod}"}}': value for pod, value in (("a", 0.9), ("b", 0.7))
    }
    assert_query(tmp_path, KNOWN, metric, each)


def test_autoscalers_use_the_adapters_metrics() -> None:
    """The autoscalers use exactly the metrics that the adapter provides."""
    rules = yaml.safe_load(text("adapter-values.yaml"))["rules"]["custom"]
    wanted = {
        metric["pods"]["metric"]["name"]
        for name in ("hpa.yaml", "hpa-saturation.yaml")
        for resource in resources(text(name))
        for metric in resource["spec"]["metrics"]
    }

    assert wanted == {rule["name"]["as"] for rule in rules}


def test_scrapers_use_the_sidecars_port() -> None:
    """Monitors, scrape configuration and endpoint picker use the sidecar's port.

    A Service names it by number: those of Kubernetes before 1.33 find no name in an init container (its issue 127958).
    """
    files = ("podmonitor", "servicemonitor", "podmonitoring", "vmpodscrape")
    monitors = [each for file in files for each in resources(text(f"{file}.yaml"))]
    fields = "podMetricsEndpoints", "endpoints", "ports"
    ports = [each["spec"][name][0] for each in monitors for name in fields if name in each["spec"]]
    (picker,) = resources(text("endpoint-picker.yaml"))
    parameters = picker["plugins"][0]["parameters"]

    targets = [each.pop("targetPort") for each in ports if "targetPort" in each]
    assert targets == [PORT["containerPort"]]
    assert {each.get("name", each["port"]) for each in ports} == {PORT["name"]}
    assert len(ports) == len(monitors)
    assert f"regex: {PORT['name']}," in text("prometheus.yml")
    assert (parameters["path"], parameters["port"]) == ("/metrics/pod", PORT["containerPort"])
