"""The Helm charts, rendered with Go's templates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts import CHART, ENGINE, LIBRARY, VALUES, rendered
from manifests import (
    ROOT,
    Resource,
    named,
    pods,
    template,
    tool,
)
from schemas import validate


def of_kind(found: list[Resource], kind: str) -> list[Resource]:
    """Return the resources of a kind."""
    return [one for one in found if one["kind"] == kind]


def schema_exit_code(instance: object, schema: Path, directory: Path) -> int:
    """Return the exit code of a JSON schema check."""
    file = directory / "values.json"
    file.write_text(json.dumps(instance))
    done = subprocess.run(
        [tool("jsonschema"), "-i", file, schema], capture_output=True, text=True, check=False
    )
    return done.returncode


def values(path: Path) -> dict[str, Any]:
    """Read the values of a chart, or values to override them."""
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def library_values(directory: Path, **given: object) -> Path:
    """Return a file with values of the library chart."""
    file = directory / "values.yaml"
    file.write_text(yaml.safe_dump({"sidestep-lib": given}))
    return file


def test_the_library_injects_what_the_component_injects(tmp_path: Path) -> None:
    """The library chart and the kustomize component inject the same, except for the pull policy."""
    found = rendered(ENGINE, library=LIBRARY)
    ((_, pod),) = [one for deployment in found for one in pods(deployment)]
    for container in pod["initContainers"]:
        assert container.pop("imagePullPolicy") == "IfNotPresent"

    validate(found, tmp_path)
    assert pod.pop("terminationGracePeriodSeconds") == 48
    assert pod == template()


def test_the_librarys_grace_period_suffices_for_engine_and_sidecar(tmp_path: Path) -> None:
    """The grace period is the engine's time to stop, the sidecar's, and 2 s for its last snapshot."""
    file = library_values(tmp_path, engineStopSeconds=100, lingerSeconds=31)
    ((_, pod),) = pods(rendered(ENGINE, file, library=LIBRARY)[0])

    assert pod["terminationGracePeriodSeconds"] == 133
    assert "--shutdown.linger=31" in named(pod["initContainers"], "sidestep")["args"]


def test_the_library_probes_the_engine_only_on_request(tmp_path: Path) -> None:
    """Without the value the engine keeps its own probes; with it, it has the one of docs/health.md."""
    file = library_values(tmp_path, readinessProbe={"enabled": True})
    found = rendered(ENGINE, file, library=LIBRARY)
    ((_, pod),) = pods(found[0])
    ((_, before),) = pods(rendered(ENGINE, library=LIBRARY)[0])
    text = (ROOT / "docs" / "health.md").read_text()
    (documented,) = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])["containers"]
    (port,) = named(pod["initContainers"], "sidestep")["ports"]
    probe = pod["containers"][0].pop("readinessProbe")

    validate(found, tmp_path)
    assert pod == before
    assert probe == documented["readinessProbe"]
    assert probe["httpGet"]["port"] == port["containerPort"]


def test_the_library_serves_a_page_with_tls_as_any_user(tmp_path: Path) -> None:
    """Files come from the chart's volumes, probes speak TLS, and a platform may assign the user."""
    mount = {"name": "sidestep-socket", "mountPath": "/etc/sidestep", "readOnly": True}
    file = library_values(
        tmp_path,
        extraArgs=["--web.config.file=/etc/sidestep/web.yml"],
        extraVolumeMounts=[mount],
        probeHttpGet={"scheme": "HTTPS"},
        readinessProbe={"enabled": True},
        fixedUser=False,
    )
    found = rendered(ENGINE, file, library=LIBRARY)
    ((_, pod),) = pods(found[0])
    plugin, sidecar = pod["initContainers"]
    probes = (
        sidecar["startupProbe"],
        sidecar["livenessProbe"],
        pod["containers"][0]["readinessProbe"],
    )

    validate(found, tmp_path)
    assert sidecar["volumeMounts"][-1] == mount
    assert [each["httpGet"]["scheme"] for each in probes] == ["HTTPS"] * 3
    for container in (plugin, sidecar):
        assert not {"runAsUser", "runAsGroup"} & set(container["securityContext"])
        assert container["securityContext"]["runAsNonRoot"]


def test_the_library_without_the_plugin_polls(tmp_path: Path) -> None:
    """Without the plugin, the pod has neither its container nor its volume and path, and the exporter polls."""
    polled = ["--triton=http://127.0.0.1:8000"]
    file = library_values(tmp_path, plugin={"enabled": False}, extraArgs=polled)
    ((_, pod),) = pods(rendered(ENGINE, file, library=LIBRARY)[0])

    assert [one["name"] for one in pod["initContainers"]] == ["sidestep"]
    assert pod["initContainers"][0]["args"][-1] == "--triton=http://127.0.0.1:8000"
    assert [one["name"] for one in pod["volumes"]] == ["sidestep-socket", "sidestep-state"]
    (engine,) = pod["containers"]
    assert [one["name"] for one in engine["volumeMounts"]] == ["sidestep-socket"]
    assert [one["name"] for one in engine["env"]] == ["SIDESTEP_ENDPOINT", "SIDESTEP_NAMESPACE"]


@pytest.mark.parametrize("file", VALUES, ids=lambda path: path.stem)
def test_rendered_resources_are_valid(file: Path, tmp_path: Path) -> None:
    """Every resource is valid by the schemas of Kubernetes and the operators, and has a unique name."""
    found = rendered(CHART, file)
    names = [(one["metadata"]["namespace"], one["kind"], one["metadata"]["name"]) for one in found]

    validate(found, tmp_path)
    assert len(set(names)) == len(names)


def test_names_and_labels_are_valid_whatever_the_release_is_called(tmp_path: Path) -> None:
    """A release may be called like a number or be cut at a dot, and two values may have one label."""
    file = tmp_path / "values.yaml"
    monitor = {"labels": {"release": "own"}}
    file.write_text(yaml.safe_dump({"commonLabels": {"release": "all"}, "podMonitor": monitor}))
    (number,) = of_kind(rendered(CHART, file, name="1e3"), "PodMonitor")
    (cut,) = of_kind(rendered(CHART, file, name=f"{'a' * 39}.b"), "PodMonitor")

    assert number["metadata"]["labels"]["app.kubernetes.io/instance"] == "1e3"
    assert number["metadata"]["labels"]["release"] == "own"
    assert cut["metadata"]["name"] == f"{'a' * 39}-sidestep"


def test_a_short_interval_needs_no_timeout(tmp_path: Path) -> None:
    """The operator ignores a monitor whose timeout exceeds its interval, so there is none by default."""
    file = tmp_path / "values.yaml"
    file.write_text("podMonitor: {interval: 5s}")
    (monitor,) = of_kind(rendered(CHART, file), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]

    assert endpoint == {"port": "sidestep", "path": "/metrics", "interval": "5s"}


@pytest.mark.parametrize("chart", [LIBRARY, CHART], ids=lambda path: path.name)
def test_schemas_of_values_refuse_unknown_keys(chart: Path, tmp_path: Path) -> None:
    """Defaults and examples are valid values, an unknown key is not."""
    schema = chart / "values.schema.json"
    defaults = values(chart / "values.yaml")

    assert schema_exit_code(defaults, schema, tmp_path) == 0
    for example in chart.glob("ci/*-values.yaml"):
        assert schema_exit_code({**defaults, **values(example)}, schema, tmp_path) == 0
    assert schema_exit_code({**defaults, "extraArg": []}, schema, tmp_path) == 1
    described = json.loads(schema.read_text())["properties"]
    assert set(defaults) == set(described) - {"global"}


def test_dashboards_and_rules_are_rendered_unchanged() -> None:
    """Dashboards and rules are rendered unchanged, braces included, and Grafana's folder is named."""
    found = rendered(CHART, CHART / "ci" / "default-values.yaml")
    boards = {
        key: json.loads(text)
        for config in of_kind(found, "ConfigMap")
        for key, text in config["data"].items()
    }
    rules = {one["metadata"]["name"]: one["spec"] for one in of_kind(found, "PrometheusRule")}

    folders = [one["metadata"]["annotations"] for one in of_kind(found, "ConfigMap")]
    assert folders == [{"grafana_folder": "sidestep"}] * len(boards)
    assert boards == {
        f"sidestep-{path.name}": json.loads(path.read_text())
        for path in ROOT.glob("grafana/*.json")
    }
    assert rules == {
        f"release-sidestep-{path.stem}": values(path) for path in ROOT.glob("deploy/rules/*.yaml")
    }
    # The API server accepts a resource of up to a megabyte.
    assert all(len(json.dumps(one)) < 1_000_000 for one in found)


def test_the_network_policy_restricts_only_the_exporters_port() -> None:
    """The policy restricts the exporter's port where the engines are, and leaves all other ports open."""
    policies = of_kind(rendered(CHART, CHART / "ci" / "options-values.yaml"), "NetworkPolicy")
    (at_home,) = of_kind(rendered(CHART, CHART / "ci" / "least-values.yaml"), "NetworkPolicy")
    ours, others = policies[0]["spec"]["ingress"]
    open_ports = {
        (rule["protocol"], port)
        for rule in others["ports"]
        for port in range(rule["port"], rule["endPort"] + 1)
    }

    assert "from" not in others
    assert ours["ports"] == [{"port": 9857, "protocol": "TCP"}]
    everything = {(kind, port) for kind in ("TCP", "UDP", "SCTP") for port in range(1, 65536)}
    assert everything - open_ports == {("TCP", 9857)}
    assert [each["metadata"]["namespace"] for each in policies] == ["llm", "llm-canary"]
    assert at_home["metadata"]["namespace"] == "default"


def test_the_network_policy_opens_no_other_port_on_request(tmp_path: Path) -> None:
    """Where other policies restrict the engines' ports, the chart's adds only the exporter's."""
    file = tmp_path / "values.yaml"
    file.write_text("networkPolicy: {enabled: true, allowOtherPorts: false}")
    (policy,) = of_kind(rendered(CHART, file), "NetworkPolicy")

    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": 9857, "protocol": "TCP"}]
