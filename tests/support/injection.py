"""Comparison of a pod before and after sidestep is injected into it."""

from __future__ import annotations

import copy
import os
from pathlib import Path

from manifests import KUSTOMIZE, Resource, kustomized, named, ours, pods

PLUGIN = "/opt/sidestep/plugin"


def without_ours(pod: Resource) -> Resource:
    """Return a pod's specification without all that sidestep injects."""
    found = copy.deepcopy(pod)
    for holder, key in (
        (found, "initContainers"),
        (found, "volumes"),
        (found["containers"][0], "env"),
        (found["containers"][0], "volumeMounts"),
    ):
        left = [one for one in holder.get(key, ()) if not ours(one)]
        for one in left:
            if key == "env" and one["name"] == "PYTHONPATH":
                one["value"] = one["value"].removeprefix(PLUGIN).removeprefix(":")
        holder[key] = left
        if not holder[key]:
            del holder[key]
    groups = [one for one in found["securityContext"].get("supplementalGroups", ()) if one != 65532]
    found["securityContext"]["supplementalGroups"] = groups
    if not groups:
        del found["securityContext"]["supplementalGroups"]
    if not found["securityContext"]:
        del found["securityContext"]
    return found


def injected(pod: Resource) -> Resource:
    """Return what is injected into the pod of a vLLM or SGLang engine, lists sorted by name."""
    engine = pod["containers"][0]
    return {
        "initContainers": sorted((c for c in pod["initContainers"] if ours(c)), key=_name),
        "volumes": sorted((v for v in pod["volumes"] if ours(v)), key=_name),
        "env": sorted((e for e in engine["env"] if ours(e)), key=_name),
        "volumeMounts": sorted((m for m in engine["volumeMounts"] if ours(m)), key=_name),
    }


def _name(one: Resource) -> str:
    name: str = one["name"]
    return name


def bare(pod: Resource) -> Resource:
    """Remove empty lists and an empty PYTHONPATH, which mean the same as none."""
    engine, *others = pod["containers"]
    env = [one for one in engine.get("env") or () if one != {"name": "PYTHONPATH", "value": ""}]
    first = {key: value for key, value in {**engine, "env": env}.items() if value not in ([], None)}
    return {
        key: value
        for key, value in {**pod, "containers": [first, *others]}.items()
        if value not in ([], {}, None)
    }


def built(directory: Path, component: str, *files: str) -> list[Resource]:
    """Build files of a directory with the one line of kustomization that users write."""
    line = f"components: [{os.path.relpath(KUSTOMIZE / component, directory)}]"
    (directory / "kustomization.yaml").write_text(f"resources: [{', '.join(files)}]\n{line}\n")
    return kustomized(directory)


def assert_injected(before: Resource, after: Resource, whole: Resource) -> None:
    """Assert that each pod of a workload has all of ``whole`` and is otherwise unchanged."""
    expected = injected(whole)
    for (path, was), (_, pod) in zip(pods(before), pods(after), strict=True):
        assert bare(without_ours(pod)) == bare(was), path
        assert injected(pod) == expected, path
        assert 65532 in pod["securityContext"]["supplementalGroups"]
        names = [one["name"] for one in pod["initContainers"]]
        assert names.index(
            "sidestep-keys" if "sidestep-keys" in names else "sidestep"
        ) <= names.index("sidestep")
        theirs = {one["name"]: one.get("value") for one in was["containers"][0].get("env") or ()}
        path_of = named(pod["containers"][0]["env"], "PYTHONPATH")["value"]
        assert path_of == ":".join(filter(None, (PLUGIN, theirs.get("PYTHONPATH"))))
