"""Kubernetes manifests as values, rendered by kustomize, and the parts that sidestep injects."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidestep.config.settings import SETTINGS, Config, read
from sidestep.transport.keys import CLIENT_KEY, SERVER_KEY

ROOT = Path(__file__).parents[2]
KUSTOMIZE = ROOT / "deploy" / "kustomize"
TOOLS = ROOT / "build" / "deploy"
"""Where ``make deploy-test`` installs its commands."""
PODS = {
    "Deployment": ["spec.template.spec"],
    "StatefulSet": ["spec.template.spec"],
    "DaemonSet": ["spec.template.spec"],
    "Job": ["spec.template.spec"],
    "LeaderWorkerSet": [
        "spec.leaderWorkerTemplate.leaderTemplate.spec",
        "spec.leaderWorkerTemplate.workerTemplate.spec",
    ],
    "LLMInferenceService": ["spec.template", "spec.prefill.template", "spec.worker"],
    "InferenceService": ["spec.predictor"],
}
"""Paths of the pod specifications in each kind."""

OURS = frozenset(
    {
        "sidestep", "sidestep-plugin", "sidestep-keys", "sidestep-socket", "sidestep-state",
        "SIDESTEP_ENDPOINT", "SIDESTEP_NAMESPACE",
    }
)  # fmt: skip
"""Names of everything that is injected, except PYTHONPATH, which an engine may set itself."""
Resource = dict[str, Any]


def tool(name: str) -> str:
    """Return the path of a command that ``make deploy-test`` installs, or skip the test."""
    found = shutil.which(name, path=TOOLS / "bin")
    if found is None:
        pytest.skip(f"there is no {name} (make deploy-test)")
    return found


def kustomized(directory: Path) -> list[Resource]:
    """Render a kustomization with kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    version = subprocess.run(
        [kubectl, "version", "--client"], capture_output=True, text=True, check=True
    ).stdout
    if int(re.findall(r"Kustomize Version: v(\d+)", version)[0]) < 5:
        pytest.skip("this kubectl is before 1.27: components need kustomize 5")
    done = subprocess.run(
        [kubectl, "kustomize", directory], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return resources(done.stdout)


def resources(text: str) -> list[Resource]:
    """Return all documents of a YAML stream."""
    return [one for one in yaml.safe_load_all(text) if one]


def at(resource: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None."""
    found: Any = resource
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def pods(resource: Resource) -> Iterator[tuple[str, Resource]]:
    """Yield the pod specifications of a resource with their paths."""
    for path in PODS.get(resource["kind"], ()):
        if (found := at(resource, path)) is not None:
            yield path, found


def named(items: Iterable[Resource] | None, name: str) -> Resource:
    """Return the item of that name."""
    (found,) = [one for one in items or () if one["name"] == name]
    return dict(found)


def ours(one: Resource) -> bool:
    """Return whether a container, volume, mount or variable is injected by sidestep."""
    return one["name"] in OURS


def defaults() -> dict[str, str]:
    """Return the settings in the image's environment."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    return dict(re.findall(r"(SIDESTEP_\w+)=(\S+)", text))


def settings(container: Resource, environ: Mapping[str, str]) -> Config:
    """Read the arguments of a container as the command does; an unknown flag is an error."""
    command, *flags = container["args"]
    assert command == "serve"
    known = {f"--{setting.flag}": setting for setting in SETTINGS}
    given: dict[str, Any] = {}
    for flag in flags:
        name, equals, value = flag.partition("=")
        setting = known[name]
        assert equals or not setting.metavar, flag
        if setting.repeatable:
            given.setdefault(setting.key, []).append(value)
        else:
            given[setting.key] = value or not equals
    return read(given, environ)


def template() -> Resource:
    """Return the pod specification that contains everything the component injects."""
    (found,) = resources((KUSTOMIZE / "parts" / "pod" / "pod.yaml").read_text())
    specification: Resource = found["template"]["spec"]
    return specification


def environ(
    container: Resource, fields: Mapping[str, str], more: Mapping[str, str] = {}
) -> dict[str, str]:
    """Return the variables of a container as Kubernetes resolves them, on top of ``more``."""
    found = dict(more)
    for one in container.get("env", ()):
        text = one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], text)
    return found


def assert_known(container: Resource) -> None:
    """Assert that all flags and variables of a container exist and have valid values."""
    given = {one["name"]: one.get("value", "") for one in container.get("env", ())}
    ours_there = {name for name in given if name.startswith("SIDESTEP_")}
    assert ours_there <= {setting.variable for setting in SETTINGS} | {SERVER_KEY, CLIENT_KEY}
    # Any text stands for what Kubernetes fills in.
    filled = {name: re.sub(r"\$\(\w+\)", "x", value) for name, value in given.items()}
    if container.get("args", ["serve"])[0] == "serve":
        settings({"args": ["serve"], **container}, {**defaults(), **filled})


def sidesteps(pod: Resource) -> Iterator[Resource]:
    """Yield the containers of a pod that run sidestep's image."""
    for one in [*pod.get("initContainers", ()), *pod["containers"]]:
        if re.search(r"(^|/)sidestep[:@]", one.get("image", "")):
            yield one
