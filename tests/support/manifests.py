"""Manifests as values: what kustomize makes of them, and what is ours in a pod."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidestep.config.settings import SETTINGS, Config, read
from sidestep.transport.client_keys import CLIENT_KEY, SERVER_KEY

ROOT = Path(__file__).parents[2]
KUSTOMIZE = ROOT / "deploy" / "kustomize"
TOOLS = ROOT / "build" / "deploy"
"""What ``make deploy-test`` installs."""
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
"""Where kinds have their pods' specifications."""

OURS = frozenset(
    {
        "sidestep", "sidestep-plugin", "sidestep-keys", "sidestep-socket", "sidestep-state", "sidestep-forward",
        "SIDESTEP_ENDPOINT", "SIDESTEP_NAMESPACE",
    }
)  # fmt: skip
"""Names of all that is injected, but for PYTHONPATH, which may be an engine's own."""
COMPONENTS = {
    "component": (),
    "forward": ("parts/forward",),
}
"""Those for vLLM and SGLang, with what they change in the template."""

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
    return one["name"] in OURS


def defaults() -> dict[str, str]:
    """Settings that the image has in its environment."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    return dict(re.findall(r"(SIDESTEP_\w+)=(\S+)", text))


def settings(container: Resource, environ: Mapping[str, str]) -> Config:
    """As the command reads its arguments; a flag or a value that it does not know is an error."""
    command, *flags = container["args"]
    assert command == "serve"
    known = {f"--{setting.flag}": setting for setting in SETTINGS}
    given: dict[str, object] = {}
    for flag in flags:
        name, equals, value = flag.partition("=")
        setting = known[name]
        assert equals or setting.switch, flag
        given[setting.key] = [value] if setting.repeatable else value or not equals
    return read(given, environ)


def template(component: str = "component") -> Resource:
    """The specification of which everything that a component injects is a part."""
    if not COMPONENTS[component]:
        (found,) = resources((KUSTOMIZE / "parts" / "pod" / "pod.yaml").read_text())
    else:
        with tempfile.TemporaryDirectory() as name:
            parts = [KUSTOMIZE / part for part in ("parts/pod", *COMPONENTS[component])]
            shown = {
                "components": [os.path.relpath(part, Path(name).resolve()) for part in parts],
                # Else it is left out of what is built.
                "patches": [
                    {
                        "target": {"kind": "PodTemplate"},
                        "patch": "- {op: remove, path: /metadata/annotations}",
                    }
                ],
            }
            Path(name, "kustomization.yaml").write_text(json.dumps(shown))
            (found,) = kustomized(Path(name))
    specification: Resource = found["template"]["spec"]
    return specification


def environ(
    container: Resource, fields: Mapping[str, str], more: Mapping[str, str] = {}
) -> dict[str, str]:
    """Variables of a container as Kubernetes makes them, after ``more``; fields by their paths."""
    found = dict(more)
    for one in container.get("env", ()):
        text = one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], text)
    return found


def assert_known(container: Resource) -> None:
    """All flags and variables of one of our containers exist, and their values are taken.

    Raises:
        AssertionError: A variable is unknown: it would say nothing.
        ConfigError: A value is refused.
    """
    given = {one["name"]: one.get("value", "") for one in container.get("env", ())}
    ours_there = {name for name in given if name.startswith("SIDESTEP_")}
    assert ours_there <= {setting.variable for setting in SETTINGS} | {SERVER_KEY, CLIENT_KEY}
    # What Kubernetes fills in is some word.
    filled = {name: re.sub(r"\$\(\w+\)", "x", value) for name, value in given.items()}
    if container.get("args", ["serve"])[0] == "serve":
        settings({"args": ["serve"], **container}, {**defaults(), **filled})


def sidesteps(pod: Resource) -> Iterator[Resource]:
    """Containers of a pod that run our image."""
    for one in [*pod.get("initContainers", ()), *pod["containers"]]:
        if re.search(r"(^|/)sidestep[:@]", one.get("image", "")):
            yield one
