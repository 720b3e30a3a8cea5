"""Validation of manifests against the schemas of Kubernetes, of operators, and of kinds that hold pods."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from manifests import ROOT, TOOLS, Resource, pods, tool

KUBERNETES = "1.32"
OPERATORS = ("monitoring.coreos.com/", "keda.sh/")
HOLDERS = ("LeaderWorkerSet", "InferenceService", "LLMInferenceService")
PREDICTOR = {"minReplicas", "maxReplicas"}
"""Fields of an InferenceService's predictor that are no fields of a pod."""
PRIMITIVES: dict[str, dict[str, Any]] = {
    "bool": {"type": "boolean"},
    "float": {"type": "number"},
    "int": {"type": "integer"},
    "str": {"type": "string"},
}


def kserve(model: str) -> dict[str, Any]:
    """Return the JSON schema of a model in KServe's Python package, with those it refers to.

    Models are generated from KServe's OpenAPI; what the package does not have (types of Kubernetes', and the
    specification of an LLMInferenceService) may be anything.
    """
    (package,) = TOOLS.glob("lib/python3*/site-packages/kserve/models")
    files = {path.stem.replace("_", ""): path for path in package.glob("*.py")}
    found: dict[str, Any] = {}
    left = [model]
    while left:
        name = left.pop()
        if name not in found and name.lower() in files:
            tables = _tables(files[name.lower()])
            types: Mapping[str, str] = tables["openapi_types"]
            keys: Mapping[str, str] = tables["attribute_map"]
            found[name] = {
                "type": "object",
                "additionalProperties": False,
                "properties": {keys[key]: _schema(kind, files) for key, kind in types.items()},
            }
            left += [one for kind in types.values() for one in re.findall(r"V\d\w+", kind)]
    return {"$ref": f"#/definitions/{model}", "definitions": found}


def validate(found: Iterable[Resource], directory: Path) -> None:
    """Validate resources of any kind, and the pods in them, against their schemas."""
    everything = list(found)
    operators = [one for one in everything if one["apiVersion"].startswith(OPERATORS)]
    holders = [one for one in everything if one["kind"] in HOLDERS]
    known = [one for one in everything if one not in operators and one not in holders]
    _kubernetes([*known, *(_pod(spec) for one in holders for _, spec in pods(one))], directory)
    _holders(holders, directory)
    if operators:
        _run(["node", TOOLS / "validate.mjs"], json.dumps(operators))


def _kubernetes(found: Iterable[Resource], directory: Path) -> None:
    file = directory / "resources.yaml"
    file.write_text(yaml.safe_dump_all(found))
    said = _run([tool("kubernetes-validate"), "--strict", "-k", KUBERNETES, file])
    assert "WARN" not in said, said


def _holders(found: Iterable[Resource], directory: Path) -> None:
    command = tool("jsonschema")
    for kind in HOLDERS:
        instances: list[str | Path] = []
        for number, one in enumerate(one for one in found if one["kind"] == kind):
            instances += ["-i", directory / f"{kind}{number}.json"]
            Path(instances[-1]).write_text(json.dumps(one))
        if instances and (schema := _holder(kind)):
            file = directory / f"{kind}.schema.json"
            file.write_text(json.dumps(schema))
            _run([command, *instances, file])


def _holder(kind: str) -> dict[str, Any]:
    if kind == "InferenceService":
        return kserve("V1beta1InferenceService")
    if kind == "LeaderWorkerSet":
        file = ROOT / "tests" / "data" / "schemas" / "leaderworkerset.json"
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    return {}


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


def _schema(kind: str, files: Mapping[str, Path]) -> dict[str, Any]:
    if many := re.fullmatch(r"list\[(.+)\]", kind):
        return {"type": "array", "items": _schema(many[1], files)}
    if kind.startswith("dict("):
        return {"type": "object"}
    if kind.lower() in files:
        return {"$ref": f"#/definitions/{kind}"}
    return PRIMITIVES.get(kind, {})


def _tables(path: Path) -> dict[str, Any]:
    """Return the class attributes of a generated model."""
    tree = ast.parse(path.read_text())
    (model,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        target.id: ast.literal_eval(node.value)
        for node in model.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
