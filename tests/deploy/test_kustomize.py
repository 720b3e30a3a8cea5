"""The kustomize components: what they add to which pods, and that they change nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from injection import assert_injected, built
from manifests import (
    KUSTOMIZE,
    ROOT,
    Resource,
    assert_known,
    kustomized,
    named,
    pods,
    resources,
    sidesteps,
    template,
)
from schemas import validate

OVERLAYS = sorted(path.parent for path in KUSTOMIZE.glob("overlays/*/kustomization.yaml"))


def test_shapes_of_variables_groups_and_volumes(tmp_path: Path) -> None:
    """Every engine gets all of the component and keeps its own fields, whatever these are."""
    shapes: list[Resource] = [
        {},
        {"env": [], "securityContext": {}},
        {
            "env": [{"name": "A", "value": "b"}],
            "volumes": [{"name": "my-sidestep-socket-2", "emptyDir": {}}],
        },
        {
            "env": [
                {"name": "MY_PYTHONPATH", "value": "/c"},
                {"name": "PYTHONPATH", "value": "/a:/b"},
            ],
            "securityContext": {"fsGroup": 3, "supplementalGroups": [7, 165532]},
        },
        {
            "env": [{"name": "MY_PYTHONPATH_2", "value": ":/c"}],
            "initContainers": [
                {"name": "fetch-sidestep-2", "image": "theirs"},
                {"name": "their-proxy", "image": "theirs", "restartPolicy": "Always"},
            ],
        },
    ]
    given = []
    for number, shape in enumerate(shapes):
        engine = {"name": "engine", "image": "theirs"}
        engine |= {"env": shape.pop("env")} if "env" in shape else {}
        pod = {"containers": [engine, {"name": "other", "image": "theirs"}], **shape}
        given.append(deployment(f"w{number}", pod))
    found = applied(tmp_path, "component", *given)

    for before in given:
        assert_injected(before, found[before["metadata"]["name"]], template())
    validate(found.values(), tmp_path)


def deployment(name: str, pod: Resource) -> Resource:
    """Return a deployment of this pod."""
    template = {"metadata": {"labels": {"app": name}}, "spec": pod}
    spec = {"selector": {"matchLabels": {"app": name}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def applied(directory: Path, component: str, *given: Resource) -> dict[str, Resource]:
    """Render resources with a component; return them by name."""
    # Names are quoted in JSON and plain in YAML.
    texts = [json.dumps(one) if n % 2 else yaml.safe_dump(one) for n, one in enumerate(given)]
    (directory / "given.yaml").write_text("\n---\n".join(texts))
    return {one["metadata"]["name"]: one for one in built(directory, component, "given.yaml")}


def test_triton_itself_is_not_changed(tmp_path: Path) -> None:
    """Triton is polled: its container gets no plugin, variable or group."""
    pod = {"containers": [{"name": "triton", "image": "theirs"}]}
    found = applied(tmp_path, "triton", deployment("triton", pod))["triton"]
    ((_, after),) = pods(found)

    assert after["containers"] == pod["containers"]
    assert [one["name"] for one in after["initContainers"]] == ["sidestep"]
    assert "securityContext" not in after


def test_only_engines_of_production_stack_are_injected() -> None:
    """Routers, servers of caches and lookups, and the controller of adapters are left unchanged."""
    found = kustomized(KUSTOMIZE / "overlays" / "production-stack")
    injected = {
        one["metadata"]["name"] for one in found for _, pod in pods(one) if has_exporter(pod)
    }

    assert len(found) == 5
    assert injected == {"stack-qwen3-deployment-vllm"}


def has_exporter(pod: Resource) -> bool:
    """Return whether the pod has the sidecar."""
    return "sidestep" in {each["name"] for each in pod.get("initContainers", ())}


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_overlays_inject_into_every_engine(overlay: Path, tmp_path: Path) -> None:
    """Every pod of an overlay has the sidecar, unless it is labelled or sends to another pod's, and all of it is valid."""
    found = kustomized(overlay)
    theirs = [one for path in overlay.rglob("*.yaml") for one in resources(path.read_text())]
    kinds = {one["kind"] for one in theirs if "kind" in one} - {"Kustomization"}

    assert kinds <= {one["kind"] for one in found}
    for one in found:
        labels = one["metadata"].get("labels", {})
        for _, pod in pods(one):
            sends_away = "tcp://" in str(pod["containers"][0].get("env"))
            injected = labels.get("sidestep/inject") != "false" and not sends_away
            assert has_exporter(pod) == injected
            for container in sidesteps(pod):
                assert_known(container)
    validate(found, tmp_path)


def test_the_documented_patch_probes_the_engine(tmp_path: Path) -> None:
    """The patch of docs/kubernetes.md replaces the readiness probe of an engine, and nothing else."""
    text = (ROOT / "docs" / "kubernetes.md").read_text().partition("## Probes of the engine")[2]
    overlay = ROOT / "deploy" / "kustomize" / "overlays" / "vllm"
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{os.path.relpath(overlay, tmp_path.resolve())}]\n"
        + text.partition("```yaml\n")[2].partition("```")[0]
    )
    (before,) = [one for one in kustomized(overlay) if one["kind"] == "Deployment"]
    (after,) = [one for one in kustomized(tmp_path) if one["kind"] == "Deployment"]
    ((_, pod),) = pods(after)
    engine = pod["containers"][0]
    (port,) = named(pod["initContainers"], "sidestep")["ports"]

    validate([after], tmp_path)
    assert engine["readinessProbe"]["httpGet"] == {
        "path": "/-/engines?ready",
        "port": port["containerPort"],
    }
    ((_, own),) = pods(before)
    engine["readinessProbe"] = own["containers"][0]["readinessProbe"]
    assert after == before
