"""Manifests as values: what kustomize makes of them, what is ours in a pod, and whether schemas allow it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
KUSTOMIZE = ROOT / "deploy" / "kustomize"
TOOLS = ROOT / "build" / "deploy"
"""What ``make deploy-test`` installs."""
KUBERNETES = "1.32"
PODS = {
    "Deployment": ["spec.template.spec"],
    "StatefulSet": ["spec.template.spec"],
    "LeaderWorkerSet": [
        "spec.leaderWorkerTemplate.leaderTemplate.spec",
        "spec.leaderWorkerTemplate.workerTemplate.spec",
    ],
    "LLMInferenceService": ["spec.template"],
    "InferenceService": ["spec.predictor"],
}
"""Where kinds have their pods' specifications."""

Resource = dict[str, Any]


def tool(name: str) -> str:
    """A command that ``make deploy-test`` brings."""
    found = shutil.which(name, path=TOOLS / "bin")
    if found is None:
        pytest.skip(f"there is no {name} (make deploy-test)")
    return found


def kustomized(directory: Path) -> list[Resource]:
    """What kubectl makes of a kustomization."""
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
    """All documents of a stream."""
    return [one for one in yaml.safe_load_all(text) if one]


def at(resource: Mapping[str, Any], path: str) -> Any:
    """What stands there, or None."""
    found: Any = resource
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def pods(resource: Resource) -> Iterator[tuple[str, Resource]]:
    """The pods' specifications that a resource has, with where."""
    for path in PODS.get(resource["kind"], ()):
        if (found := at(resource, path)) is not None:
            yield path, found


def named(items: Iterable[Resource] | None, name: str) -> Resource:
    """The one of that name."""
    (found,) = [one for one in items or () if one["name"] == name]
    return dict(found)


def ours(one: Resource) -> bool:
    """Whether a container, volume, mount or variable is one that we inject."""
    name: str = one["name"]
    return name.lower().startswith("sidestep")


def template() -> Resource:
    """The specification of which everything injected is a part."""
    (found,) = resources((KUSTOMIZE / "parts" / "pod" / "pod.yaml").read_text())
    specification: Resource = found["template"]["spec"]
    return specification


def validate(found: Iterable[Resource], directory: Path) -> None:
    """Hold resources, and the pods of kinds that Kubernetes does not know, against its schemas.

    Raises:
        AssertionError: A field is unknown or has the wrong type; with all that was said.
    """
    known = [one for one in found if one["kind"] not in PODS or "apps/" in one["apiVersion"]]
    pods_of = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": _named(spec)}
        for one in found
        if one not in known
        for _, spec in pods(one)
    ]
    file = directory / "resources.yaml"
    file.write_text(yaml.safe_dump_all([*known, *pods_of]))
    done = subprocess.run(
        [tool("kubernetes-validate"), "--strict", "-k", KUBERNETES, file],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr

    assert (done.returncode, "WARN" in said) == (0, False), said


def _named(spec: Resource) -> Resource:
    """KServe fills in images."""
    filled = [{"image": "theirs", **one} for one in spec["containers"]]
    return {**spec, "containers": filled}
