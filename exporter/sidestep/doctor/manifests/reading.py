"""Reader of manifests: files, directories and standard input, into the resources that they have."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sidestep.diagnosis.finding import Code, Finding

STANDARD_INPUT = "-"
SUFFIXES = (".yaml", ".yml", ".json")
SOURCES_OF_MANIFESTS = {
    "Chart.yaml": "helm template {} | sidestep doctor --manifest -",
    "kustomization.yaml": "kubectl kustomize {} | sidestep doctor --manifest -",
    "kustomization.yml": "kubectl kustomize {} | sidestep doctor --manifest -",
    "Kustomization": "kubectl kustomize {} | sidestep doctor --manifest -",
}
"""Files whose directory has to be rendered, and how."""

UNREADABLE = Code(
    "SD501",
    "error",
    "A manifest cannot be read",
    "The file is not YAML, a field has a value that Kubernetes refuses, or it is the source of a chart or of a"
    " kustomization.",
    "Correct the file; render charts by `helm template` and kustomizations by `kubectl kustomize`.",
)
CODES = (UNREADABLE,)


class Resource(NamedTuple):
    """One document of a manifest, without its null values.

    Attributes:
        place: The file.
    """

    place: str
    value: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The resource's kind; empty for a document that is no resource."""
        return str(self.value.get("kind", ""))

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The resource's metadata."""
        return mapping(self.value.get("metadata"))

    @property
    def spec(self) -> Mapping[str, Any]:
        """The resource's specification."""
        return mapping(self.value.get("spec"))

    @property
    def subject(self) -> str:
        """File, kind and name, for findings."""
        return f"{self.place}: {self.kind}/{self.metadata.get('name', '')}"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads what Kubernetes does: a date is text, and so is a lone equals sign."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML does
        first: [pair for pair in resolvers if not pair[0].endswith((":timestamp", ":value"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def mapping(value: object) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings in ``value`` if it is a list, else none."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def read(sources: Iterable[str]) -> tuple[list[Resource], list[Finding]]:
    """Read all manifests; return their resources, and the findings about what cannot be read."""
    resources: list[Resource] = []
    findings: list[Finding] = []
    for source in sources:
        for each in _documents(source):
            if isinstance(each, Finding):
                findings.append(each)
            else:
                resources.extend(_items(each))
    return resources, findings


def _documents(source: str) -> Iterator[Resource | Finding]:
    if source == STANDARD_INPUT:
        yield from _parsed("standard input", sys.stdin.buffer.read())
        return
    for path in _files(Path(source)):
        if path.name in SOURCES_OF_MANIFESTS:
            command = SOURCES_OF_MANIFESTS[path.name].format(path.parent)
            yield UNREADABLE.on(str(path), "it has to be rendered", f"Run `{command}`.")
            continue
        try:
            content = path.read_bytes()
        except OSError as error:
            yield UNREADABLE.on(str(path), os.strerror(error.errno or 0))
        else:
            yield from _parsed(str(path), content)


def _files(path: Path) -> Iterator[Path]:
    """Yield the manifests at ``path``; of a directory that has to be rendered, the file that makes it one."""
    if not path.is_dir():
        yield path
        return
    inside = sorted(path.iterdir())
    rendered = [each for each in inside if each.name in SOURCES_OF_MANIFESTS]
    for each in rendered[:1] or inside:
        if each.is_dir() or each.suffix in SUFFIXES or rendered:
            yield from _files(each)


def _parsed(place: str, content: bytes) -> Iterator[Resource | Finding]:
    try:
        for document in yaml.load_all(content, Loader=_Loader):
            if isinstance(document, dict):
                yield Resource(place, _without_nulls(document))
            elif document is not None:
                yield UNREADABLE.on(place, "it has a document that is no mapping")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark is not None else ""
        is_template = "a template: render its chart by `helm template`." if b"{{" in content else ""
        yield UNREADABLE.on(place, f"{line}{error.problem}", is_template and f"It is {is_template}")
    # PyYAML raises ValueError for a number that is none.
    except (yaml.YAMLError, ValueError) as error:
        yield UNREADABLE.on(place, str(error))


def _without_nulls(value: Any) -> Any:
    """Return ``value`` without the null values in mappings: Kubernetes reads them as absent."""
    if isinstance(value, dict):
        return {str(key): _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _items(resource: Resource) -> Iterator[Resource]:
    """Yield the resource, or those that a list such as kubectl's has."""
    items = resource.value.get("items")
    if resource.kind.endswith("List") and isinstance(items, list):
        for item in mappings(items):
            yield from _items(Resource(resource.place, item))
    else:
        yield resource
