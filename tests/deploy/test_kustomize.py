"""The components: what they add to whose pods, and that they change nothing else."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from injection import assert_injected, built
from manifests import (
    COMPONENTS,
    KUSTOMIZE,
    Resource,
    assert_known,
    kustomized,
    pods,
    resources,
    sidesteps,
    template,
)
from schemas import validate

OVERLAYS = sorted(path.parent for path in KUSTOMIZE.glob("overlays/*/kustomization.yaml"))


def engines() -> list[Resource]:
    """Pods as others have them, in every mixture of what a component has to find its place in."""
    variables: list[Any] = [
        None,
        [],
        [{"name": "A", "value": "b"}],
        [{"name": "PYTHONPATH", "value": "/a"}, {"name": "A", "value": "b"}],
        [{"name": "MY_PYTHONPATH", "value": "/c"}, {"name": "PYTHONPATH", "value": "/a:/b"}],
        [{"name": "MY_PYTHONPATH_2", "value": ":/c"}],
    ]
    first: list[Any] = [
        None,
        [{"name": "fetch-sidestep-2", "image": "theirs"}],
        [{"name": "their-proxy", "image": "theirs", "restartPolicy": "Always"}],
    ]
    contexts: list[Any] = [None, {}, {"fsGroup": 3, "supplementalGroups": [7, 165532]}]
    volumes: list[Any] = [None, [{"name": "my-sidestep-socket-2", "emptyDir": {}}]]
    found: list[Resource] = []
    mixed = itertools.product(variables, contexts)
    others = itertools.cycle(itertools.product(volumes, first))
    for (env, context), (volume, before) in zip(mixed, others, strict=False):
        engine: Resource = {"name": f"engine{len(found)}", "image": "theirs"}
        pod: Resource = {"containers": [engine, {"name": "other", "image": "theirs"}]}
        if env is not None:
            engine["env"] = env
        if before is not None:
            pod["initContainers"] = before
        if context is not None:
            pod["securityContext"] = context
        if volume is not None:
            pod["volumes"] = volume
            engine["volumeMounts"] = [{"name": "my-sidestep-socket-2", "mountPath": "/models"}]
        found.append(pod)
    return found


def workload(kind: str, name: str, pod: Resource, **more: Any) -> Resource:
    """Of any of the kinds that the component knows."""
    template = {"metadata": {"labels": {"app": name}}, "spec": pod}
    api = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1"}.get(kind, "apps/v1")
    spec: Resource = {"selector": {"matchLabels": {"app": name}}, "template": template}
    if kind == "LeaderWorkerSet":
        spec = {"leaderWorkerTemplate": {"leaderTemplate": template, "workerTemplate": template}}
    if kind == "StatefulSet":
        spec["serviceName"] = name
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, **more}, "spec": spec}


def applied(directory: Path, component: str, *given: Resource) -> dict[str, Resource]:
    """By name, after the one line that a user writes."""
    # Names with quotes, as JSON has them, and without; JSON has no anchors.
    texts = [
        json.dumps(one) if n % 2 else yaml.safe_dump(json.loads(json.dumps(one)))
        for n, one in enumerate(given)
    ]
    (directory / "given.yaml").write_text("\n---\n".join(texts))
    return {one["metadata"]["name"]: one for one in built(directory, component, "given.yaml")}


@pytest.mark.parametrize("component", COMPONENTS)
def test_any_engine_gets_all_of_it_and_keeps_what_it_had(component: str, tmp_path: Path) -> None:
    """Deployments, StatefulSets and LeaderWorkerSets, whatever their pods have already."""
    kinds = itertools.cycle(["Deployment", "StatefulSet", "LeaderWorkerSet"])
    given = [
        workload(kind, f"w{number}", pod)
        for number, (kind, pod) in enumerate(zip(kinds, engines(), strict=False))
    ]
    found = applied(tmp_path, component, *given)
    whole = template(component)

    for before in given:
        assert_injected(before, found[before["metadata"]["name"]], whole)
    validate(found.values(), tmp_path)


def test_who_is_no_engine_says_so(tmp_path: Path) -> None:
    """By a label; and other kinds are never touched."""
    pod = {"containers": [{"name": "router", "image": "theirs"}]}
    router = workload("Deployment", "router", pod, labels={"sidestep/inject": "false"})
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
    job["spec"] = {"template": {"spec": pod}}
    workers = workload("LeaderWorkerSet", "lws", pod, labels={"sidestep/leader": "none"})
    del workers["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    found = applied(tmp_path, "component", router, job, workers)

    assert found["router"] == router
    assert found["job"] == job
    assert set(found["lws"]["spec"]["leaderWorkerTemplate"]) == {"workerTemplate"}
    assert set(found) == {"router", "job", "lws"}


def test_triton_itself_is_not_changed(tmp_path: Path) -> None:
    """It is polled: no plugin, no variable, no group."""
    pod = {"containers": [{"name": "triton", "image": "theirs"}]}
    found = applied(tmp_path, "triton", workload("Deployment", "triton", pod))["triton"]
    ((_, after),) = pods(found)

    assert after["containers"] == pod["containers"]
    assert [one["name"] for one in after["initContainers"]] == ["sidestep"]
    assert "securityContext" not in after


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_overlays_inject_into_every_engine(overlay: Path, tmp_path: Path) -> None:
    """Each pod but those that are labelled has the sidecar, its flags exist, and the schemas allow it."""
    found = kustomized(overlay)
    theirs = [one for path in overlay.rglob("*.yaml") for one in resources(path.read_text())]
    kinds = {one["kind"] for one in theirs} - {"Kustomization"}

    assert kinds <= {one["kind"] for one in found}
    for one in found:
        labels = one["metadata"].get("labels", {})
        for _, pod in pods(one):
            names = [each["name"] for each in pod.get("initContainers", ())]
            assert ("sidestep" in names) == (labels.get("sidestep/inject") != "false")
            for container in sidesteps(pod):
                assert_known(container)
    validate(found, tmp_path)
