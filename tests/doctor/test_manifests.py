"""`sidestep doctor --manifest`: each fault in the manifests of this repository is found, and nothing else."""

from __future__ import annotations

import copy
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from charts import CHART, LIBRARY, VALUES, rendered
from charts import ENGINE as CHARTED
from command_line import ENVIRON, one_line, sidestep
from injection import built
from manifests import KUSTOMIZE, ROOT, Resource, defaults, kustomized, named, resources
from sidestep.diagnosis.finding import Finding
from sidestep_tools.doctor.manifests.checks import CODES, check
from sidestep_tools.doctor.manifests.pods import IMAGE_DEFAULTS

OVERLAYS = sorted(path.name for path in (KUSTOMIZE / "overlays").iterdir())
DEPLOYMENTS = sorted((ROOT / "tests" / "data" / "deployments").iterdir())
EXAMPLES = ROOT / "deploy" / "examples"
GONE = object()
"""A value that is removed."""
TEMPLATE = "Deployment: spec.template.spec"
SIDECAR = f"{TEMPLATE}.initContainers.[sidestep]"
ENGINE = f"{TEMPLATE}.containers.0"


class Fault(NamedTuple):
    """One change of good manifests, and the code of what doctor finds.

    Attributes:
        path: Kind, colon, keys; a number or a name in brackets chooses an item of a list.
        value: The new value, GONE, or a function of the old one.
        overlay: The manifests that are changed.
    """

    code: str
    path: str
    value: Any
    overlay: str = "vllm"


def more(*added: object) -> Callable[[list[object] | None], list[object]]:
    """Return a function that appends to a list."""
    return lambda old: [*(old or ()), *added]


def without(name: str) -> Callable[[list[Resource]], list[Resource]]:
    """Return a function that removes the item of that name."""
    return lambda old: [each for each in old if each["name"] != name]


def moved_to_containers(pod: Resource) -> Resource:
    """Make the sidecar an ordinary container."""
    sidecar = named(pod["initContainers"], "sidestep")
    del sidecar["restartPolicy"]
    plugin = [named(pod["initContainers"], "sidestep-plugin")]
    return {**pod, "initContainers": plugin, "containers": [*pod["containers"], sidecar]}


def mounted_deeper(pod: Resource) -> Resource:
    """Mount the socket's volume at the directory that the exporter would create."""
    for container in (named(pod["initContainers"], "sidestep"), pod["containers"][0]):
        for mount in container["volumeMounts"]:
            mount["mountPath"] = mount["mountPath"].replace("/run/sidestep", "/run/sidestep/ingest")
    return pod


def without_sidestep(pod: Resource) -> Resource:
    """Return a pod without anything of sidestep."""
    engine = {key: pod["containers"][0][key] for key in ("name", "image", "args")}
    return {"containers": [engine]}


FAULTS = [
    Fault("SD501", f"{ENGINE}.env.0.value", 8000),
    Fault("SD510", TEMPLATE, without_sidestep),
    Fault("SD511", f"{TEMPLATE}.initContainers", without("sidestep")),
    Fault("SD512", f"{SIDECAR}.restartPolicy", GONE),
    Fault("SD513", TEMPLATE, moved_to_containers),
    Fault("SD514", f"{SIDECAR}.args", more("--limits.memory=1")),
    Fault("SD514", f"{SIDECAR}.env", [{"name": "SIDESTEP_LOG_LEVEL", "value": "loud"}]),
    Fault("SD520", f"{ENGINE}.env.[SIDESTEP_ENDPOINT]", GONE),
    Fault("SD521", f"{ENGINE}.env.[SIDESTEP_ENDPOINT].value", "ipc:///run/sidestep/ingest.ipc"),
    Fault("SD522", f"{ENGINE}.volumeMounts.[sidestep-socket]", GONE),
    Fault("SD522", f"{ENGINE}.volumeMounts.[sidestep-socket].mountPath", "/var/run/sidestep"),
    Fault("SD522", f"{ENGINE}.volumeMounts.[sidestep-socket].subPath", "vllm"),
    Fault("SD524", f"{SIDECAR}.volumeMounts.[sidestep-socket].readOnly", True),
    Fault("SD524", f"{SIDECAR}.volumeMounts.[sidestep-state]", GONE),
    Fault(
        "SD525",
        f"{TEMPLATE}.volumes.[sidestep-socket]",
        {"name": "sidestep-socket", "hostPath": {"path": "/run/sidestep"}},
    ),
    Fault("SD527", TEMPLATE, mounted_deeper),
    Fault(
        "SD528",
        TEMPLATE,
        lambda old: {**old, "securityContext": {"runAsUser": 2000}},
    ),
    # Root could open it, but an engine does not use a directory of a user that shares no group with it.
    Fault("SD528", TEMPLATE, lambda old: {**old, "securityContext": {"runAsUser": 0}}),
    Fault("SD528", f"{SIDECAR}.args.[--ingest.ipc-group=65532]", "--ingest.ipc-group=2000"),
    Fault("SD530", f"{ENGINE}.env.[PYTHONPATH].value", "/opt/plugin"),
    Fault("SD530", f"{ENGINE}.volumeMounts.[sidestep-plugin]", GONE),
    Fault("SD531", f"{TEMPLATE}.initContainers.[sidestep-plugin]", GONE),
    Fault("SD024", f"{ENGINE}.args", more("--disable-log-stats")),
    Fault("SD011", f"{ENGINE}.env", more({"name": "SIDESTEP_VLLM_MODE", "value": "besides"})),
    Fault("SD514", f"{SIDECAR}.env", [{"name": "SIDESTEP_LOG_LEVLE", "value": "debug"}]),
    Fault("SD013", f"{ENGINE}.env.[SIDESTEP_NAMESPACE].name", "SIDESTEP_NAMESPCE"),
    Fault("SD003", f"{ENGINE}.env", more({"name": "VLLM_PLUGINS", "value": "lora"})),
    Fault(
        "SD022",
        "StatefulSet: spec.template.spec.containers.0.args.[--enable-metrics]",
        GONE,
        "sglang",
    ),
    Fault("SD540", f"{SIDECAR}.args", more("--web.listen-address=127.0.0.1:9857")),
    Fault("SD555", f"{SIDECAR}.livenessProbe.httpGet.path", "/healthz"),
    Fault("SD555", f"{ENGINE}.readinessProbe.httpGet", {"path": "/health", "port": 9857}),
    Fault("SD555", f"{ENGINE}.readinessProbe.httpGet.port", "sidestep"),
    Fault("SD556", f"{SIDECAR}.livenessProbe.httpGet.path", "/-/engines"),
    Fault("SD560", f"{TEMPLATE}.terminationGracePeriodSeconds", GONE),
    Fault("SD560", f"{SIDECAR}.args.[--shutdown.linger=16]", "--shutdown.linger=60"),
    Fault("SD561", f"{SIDECAR}.resources.limits.memory", "128Mi"),
    Fault("SD562", f"{TEMPLATE}.volumes.[sidestep-state].emptyDir", {}),
]  # fmt: skip


@functools.cache
def good(name: str) -> list[Resource]:
    """Return the rendered manifests of an overlay."""
    return kustomized(KUSTOMIZE / "overlays" / name)


def changed(fault: Fault) -> list[Resource]:
    """Return a copy of good manifests with the fault."""
    found = copy.deepcopy(good(fault.overlay))
    kind, _, path = fault.path.partition(": ")
    at: Any = next(each for each in found if each["kind"] == kind)
    *parents, last = [*_steps(path)]
    for step in parents:
        at = at[_key(at, step)]
    key = _key(at, last)
    if fault.value is GONE:
        del at[key]
    elif callable(fault.value):
        at[key] = fault.value(at[key] if isinstance(at, list) else at.get(key))
    else:
        at[key] = fault.value
    return found


def _steps(path: str) -> Iterator[str]:
    for match in re.finditer(r"\[(.+?)\]|([^.]+)", path):
        yield match[1] or match[2]


def _key(at: Any, step: str) -> Any:
    if not isinstance(at, list):
        return step
    named = (
        i for i, one in enumerate(at) if step == (one if isinstance(one, str) else one["name"])
    )
    return int(step) if step.isdecimal() else next(named)


def same_sub_path(pod: Resource) -> Resource:
    """Put the socket below a subPath, in both containers."""
    for container in (named(pod["initContainers"], "sidestep"), pod["containers"][0]):
        for mount in container["volumeMounts"]:
            if mount["name"] == "sidestep-socket":
                mount["subPath"] = "vllm"
    return pod


def by_tcp(pod: Resource) -> Resource:
    """Connect the engine by a port of the pod."""
    for variable in pod["containers"][0]["env"]:
        if variable["name"] == "SIDESTEP_ENDPOINT":
            variable["value"] = "tcp://127.0.0.1:9858"
    sidecar = named(pod["initContainers"], "sidestep")
    sidecar["args"].append("--ingest.endpoint=tcp://127.0.0.1:9858")
    sidecar["ports"].append({"containerPort": 9858})
    return pod


PATIENT = {
    "startupProbe": {"httpGet": {"path": "/health", "port": "http"}},
    "livenessProbe": {"httpGet": {"path": "/-/engines", "port": 9857}, "failureThreshold": 30},
}
HARMLESS = [
    # A client may connect to a socket on a read-only mount.
    Fault("", f"{ENGINE}.volumeMounts.[sidestep-socket].readOnly", True),
    Fault("", f"{ENGINE}.securityContext", {"runAsUser": 0}),
    Fault("", f"{ENGINE}.env.[PYTHONPATH].value", "/a:/opt/sidestep/plugin:/b"),
    Fault("", f"{ENGINE}.env", more({"name": "VLLM_PLUGINS", "value": "lora,sidestep"})),
    Fault("", ENGINE, lambda old: {**old, **PATIENT}),
    Fault("", f"{ENGINE}.readinessProbe.httpGet", {"path": "/-/engines?ready", "port": 9857}),
    Fault("", TEMPLATE, same_sub_path),
    Fault("", TEMPLATE, by_tcp),
    Fault("", f"{SIDECAR}.args", more("--web.telemetry-path=/page")),
]


@pytest.mark.parametrize("change", HARMLESS, ids=lambda change: change.path[-60:])
def test_harmless_changes_are_no_findings(change: Fault, tmp_path: Path) -> None:
    """Manifests that work in a cluster have no finding."""
    assert found_in(tmp_path / "all.yaml", changed(change)) == []


def check_manifests(file: Path) -> list[Finding]:
    """Return what is wrong with the manifests in a file."""
    return list(check([str(file)]))


def found_in(file: Path, given: list[Resource]) -> list[Finding]:
    """Write the resources to a file and return doctor's findings."""
    file.write_text(yaml.safe_dump_all(given))
    return check_manifests(file)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.code}-{fault.path[-40:]}")
def test_each_fault_is_found_alone(fault: Fault, tmp_path: Path) -> None:
    """The fault's code is found once or more, and no other."""
    findings = found_in(tmp_path / "all.yaml", changed(fault))

    assert {each.code for each in findings} == {fault.code}
    assert all("\n" not in each.text + each.remedy for each in findings)
    assert all(str(tmp_path) in each.subject for each in findings)


def test_each_code_has_a_fault() -> None:
    """Every code is seeded, except that of manifests without an engine, which has its own test."""
    assert {each.code for each in CODES} - {each.code for each in FAULTS} == {"SD502"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_our_manifests_are_good(overlay: str, tmp_path: Path) -> None:
    """Nothing is wrong with the examples of this repository."""
    assert found_in(tmp_path / "all.yaml", good(overlay)) == []


@pytest.mark.parametrize("file", DEPLOYMENTS, ids=lambda path: path.stem)
def test_injected_deployments_are_good(file: Path, tmp_path: Path) -> None:
    """What the components make of other projects' deployments has no error and no warning.

    The component injects into the first container only, and not into replica sets.
    """
    component = "kserve" if file.stem.endswith("inference_service") else "component"
    (tmp_path / file.name).write_text(file.read_text())
    found = found_in(tmp_path / "all.yaml", built(tmp_path, component, file.name))
    expected = {
        "two_engines": {"SD520"},
        "other_kinds": {"SD510"},
    }.get(file.stem, set())

    assert {each.code for each in found if each.severity != "info"} == expected


@pytest.mark.parametrize("file", VALUES, ids=lambda path: path.stem)
def test_our_chart_is_good(file: Path, tmp_path: Path) -> None:
    """Nothing is wrong with what the chart renders, alone and beside the engines that it scrapes."""
    found = rendered(CHART, file)

    assert {each.severity for each in found_in(tmp_path / "all.yaml", found)} <= {"info"}


def test_our_library_is_good(tmp_path: Path) -> None:
    """Nothing is wrong with a pod that has the templates of the library chart."""
    assert found_in(tmp_path / "all.yaml", rendered(CHARTED, library=LIBRARY)) == []


def test_malformed_manifests_are_no_crash(tmp_path: Path) -> None:
    """A value of a wrong type anywhere in manifests does not end the check of the others."""
    file = tmp_path / "all.json"
    (faulty,) = changed(Fault("SD512", f"{SIDECAR}.restartPolicy", GONE))
    faulty["metadata"]["name"] = "other"
    whole = copy.deepcopy(good("vllm"))
    for number, (holder, key) in enumerate(list(_nodes(whole))):
        before, holder[key] = holder[key], ("text", ["text"], {"text": 1}, 1)[number % 4]
        file.write_text(json.dumps({"kind": "List", "items": [*whole, faulty]}))
        assert "SD512" in {each.code for each in check_manifests(file)}
        holder[key] = before


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all values below one, as their holder and their key or number."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _nodes(value[key])


def test_defaults_of_the_image_are_known() -> None:
    """The variables are those of the Dockerfile."""
    assert defaults() == IMAGE_DEFAULTS


def doctor(*arguments: object, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command with text on standard input."""
    return subprocess.run(
        [sys.executable, "-m", "sidestep", "doctor", *map(str, arguments)],
        input=given, capture_output=True, text=True, check=False, env=ENVIRON,
    )  # fmt: skip


def test_standard_input() -> None:
    """Rendered manifests come from a pipe; findings name the kind and the name of the resource."""
    given = changed(Fault("SD512", f"{SIDECAR}.restartPolicy", GONE))
    as_list = {"apiVersion": "v1", "kind": "List", "items": given}
    for text in (yaml.safe_dump_all(given), yaml.safe_dump(as_list)):
        done = doctor("--manifest", "-", given=text)
        assert done.stdout.startswith(
            "SD512 error: standard input: Deployment/vllm, container sidestep: "
        )
        assert (done.returncode, done.stderr) == (2, "")


RAY = """
kind: RayCluster
metadata: {name: ray}
spec:
  workerGroupSpecs:
    - groupName: a
      template: {spec: {containers: [{name: proxy, image: example/proxy}]}}
    - groupName: b
      template:
        spec:
          containers:
            - name: vllm
              env: [{name: SIDESTEP_ENDPOINT, value: "ipc:///run/sidestep/ingest/ingest.ipc"}]
"""


def test_pods_of_other_operators_are_found(tmp_path: Path) -> None:
    """A pod's specification is found at any depth of a resource of any kind."""
    (found,) = found_in(tmp_path / "all.yaml", resources(RAY))

    assert found.code == "SD511"
    assert found.subject.endswith(": RayCluster/ray workerGroupSpecs, container vllm")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"image": "registry.example/team/sidestep-exporter:1", "name": "metrics"}, None),
        ({"image": "python:3.12", "command": ["sidestep"]}, "SD540"),
        ({"command": ["/bin/sh", "-c"], "args": ["exec sidestep serve --no-such-flag"]}, "SD514"),
        ({"command": ["sh", "-c"], "args": ["sidestep serve --config.file=$HOME/a && true"]}, None),
        ({"envFrom": [{"configMapRef": {"name": "settings"}}]}, None),
    ],
)
def test_ways_to_run_the_exporter(change: Resource, code: str | None, tmp_path: Path) -> None:
    """The exporter is found by its image, its name or its command; what is not in the manifest is not guessed."""
    fault = Fault("", SIDECAR, lambda old: {**old, **change})
    findings = found_in(tmp_path / "all.yaml", changed(fault))

    assert {each.code for each in findings if each.severity != "info"} == {code} - {None}


def test_invalid_yaml_names_file_and_line(tmp_path: Path) -> None:
    """Each broken file is one finding, and the others are read."""
    (tmp_path / "broken.yaml").write_text("kind: Pod\nspec: [\n")
    (tmp_path / "chart.yml").write_text("kind: Pod\nspec: {{ .Values.spec }}\n")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "text.yaml").write_text("only text\n")
    (tmp_path / "notes.txt").write_text("[")
    lines = doctor("--manifest", tmp_path).stdout.splitlines()

    assert [line.partition(": ")[0] for line in lines[:-1:2]] == ["SD501 error"] * 4
    assert any("broken.yaml: line 3: " in line for line in lines)
    assert any("`helm template` renders its chart" in line for line in lines)


def test_sources_of_manifests_have_to_be_rendered() -> None:
    """A kustomization and a chart are named with the command that renders them."""
    kustomization = doctor("--manifest", KUSTOMIZE / "overlays" / "vllm").stdout
    chart = doctor("--manifest", ROOT / "deploy" / "helm" / "sidestep").stdout

    assert f"Run `kubectl kustomize {KUSTOMIZE}/overlays/vllm | sidestep doctor" in kustomization
    assert f"Run `helm template {ROOT}/deploy/helm/sidestep | sidestep doctor" in chart
    assert kustomization.endswith(": 1 error\n")


def test_nothing_to_check(tmp_path: Path) -> None:
    """Manifests without an engine are not silently good; a file that does not exist is a usage error."""
    monitor = "podmonitor.yaml"
    (tmp_path / monitor).write_text((EXAMPLES / monitor).read_text())

    assert doctor("--manifest", tmp_path).stdout.startswith("SD502 info: ")
    one_line(sidestep("doctor", "--manifest", tmp_path / "no.yaml"), 2, "does not exist")


def test_owned_resources_are_checked_once(tmp_path: Path) -> None:
    """In a dump of a namespace, the pods of a workload are not checked again."""
    fault = Fault("SD512", f"{SIDECAR}.restartPolicy", GONE)
    (deployment,) = changed(fault)
    owned = {
        "kind": "ReplicaSet",
        "metadata": {"name": "vllm-1", "ownerReferences": [{"kind": "Deployment", "name": "vllm"}]},
        "spec": deployment["spec"],
    }
    pods = [
        {
            "kind": "Pod",
            "metadata": {
                "name": f"vllm-1-{n}",
                "ownerReferences": [{"kind": "ReplicaSet", "name": "vllm-1"}],
            },
            "spec": deployment["spec"]["template"]["spec"],
        }
        for n in range(3)
    ]

    assert len(found_in(tmp_path / "all.yaml", [deployment, owned, *pods])) == 1
    assert len(found_in(tmp_path / "all.yaml", pods)) == 1
