"""Validation of manifests against the schemas of Kubernetes, of operators, and of kinds that hold pods."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from manifests import ROOT, TOOLS, Resource, pods, tool

KUBERNETES = "1.32"
OPERATORS = ("monitoring.coreos.com/", "keda.sh/")
SCHEMA = ROOT / "tests" / "data" / "schemas" / "leaderworkerset.json"
HOLDERS = ("LeaderWorkerSet", "InferenceService", "LLMInferenceService")
PREDICTOR = {"minReplicas", "maxReplicas"}
"""Fields of an InferenceService's predictor that are no fields of a pod."""


def validate(found: Iterable[Resource], directory: Path) -> None:
    """Validate resources of any kind, and the pods in them, against their schemas."""
    everything = list(found)
    operators = [one for one in everything if one["apiVersion"].startswith(OPERATORS)]
    holders = [one for one in everything if one["kind"] in HOLDERS]
    known = [one for one in everything if one not in operators and one not in holders]
    _kubernetes([*known, *(_pod(spec) for one in holders for _, spec in pods(one))], directory)
    for one in holders:
        if one["kind"] == "LeaderWorkerSet":
            file = directory / "set.json"
            file.write_text(json.dumps(one))
            _run([tool("jsonschema"), "-i", file, SCHEMA])
    if operators:
        _run(["node", TOOLS / "validate.mjs"], json.dumps(operators))


def _kubernetes(found: Iterable[Resource], directory: Path) -> None:
    file = directory / "resources.yaml"
    file.write_text(yaml.safe_dump_all(found))
    said = _run([tool("kubernetes-validate"), "--strict", "-k", KUBERNETES, file])
    assert "WARN" not in said, said


def _pod(spec: Resource) -> Resource:
    # KServe fills in images, and mixes its own settings with those of pods.
    filled = {key: value for key, value in spec.items() if key not in PREDICTOR}
    filled["containers"] = [{"image": "theirs", **one} for one in spec["containers"]]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": filled}


def _run(command: Sequence[str | Path], given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said
