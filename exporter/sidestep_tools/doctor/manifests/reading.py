"""Reader of manifests: files, directories and standard input, into the resources that they have."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from sidestep.config.yaml_reader import MAX_BYTES, read_documents
from sidestep.diagnosis.finding import Code, Finding
from sidestep.errors import ConfigError

UNREADABLE = Code("SD501", "error", "A manifest cannot be read",
    "The file is not YAML, a field has a value that Kubernetes refuses, or it is the source of a chart or of a kustomization.",
    "Correct the file; render charts by `helm template` and kustomizations by `kubectl kustomize`.")  # fmt: skip
SUFFIXES = (".yaml", ".yml", ".json")
RENDERERS = {"Chart.yaml": "helm template", "kustomization.yaml": "kubectl kustomize"}
"""Files that show that their directory has to be rendered, and the command for it."""


class Resource(NamedTuple):
    """One resource, without its null values; ``place`` is its file or standard input."""

    place: str
    value: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Its kind; empty for a document that is no resource."""
        return str(self.value.get("kind", ""))

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Its metadata."""
        return mapping(self.value.get("metadata"))

    @property
    def namespace(self) -> str:
        """Its namespace; empty if the manifest leaves it to the command that applies it."""
        return str(self.metadata.get("namespace", ""))

    @property
    def subject(self) -> str:
        """File, kind and name, for findings."""
        return f"{self.place}: {self.kind}/{self.metadata.get('name', '')}"


def mapping(value: object) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings in ``value`` if it is a list, else none."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def read_all(sources: Iterable[str]) -> Iterator[Resource | Finding]:
    """Yield the resources of files, directories and standard input (``-``), and findings on the unreadable."""
    for path in (path for source in sources for path in _files(Path(source))):
        place = "standard input" if path.name == "-" else str(path)
        if path.name in RENDERERS:
            command = f"{RENDERERS[path.name]} {path.parent} | sidestep doctor --manifest -"
            yield UNREADABLE.on(place, "it has to be rendered", f"Run `{command}`.")
            continue
        try:
            with click.open_file(str(path), "rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            yield UNREADABLE.on(place, os.strerror(error.errno or 0))
        else:
            yield from _resources(place, content)


def _files(path: Path) -> Iterator[Path]:
    """Yield the manifests at ``path``, or the file that shows that its directory has to be rendered."""
    if not path.is_dir():
        yield path
        return
    inside = sorted(path.iterdir())
    rendered = [each for each in inside if each.name in RENDERERS]
    for each in rendered[:1] or inside:
        if rendered or each.is_dir() or each.suffix in SUFFIXES:
            yield from _files(each)


def _resources(place: str, content: bytes) -> Iterator[Resource | Finding]:
    try:
        for document in read_documents(content):
            if isinstance(document, dict):
                yield from _items(Resource(place, without_nulls(document)))
            elif document is not None:
                yield UNREADABLE.on(place, "it has a document that is no mapping")
    except ConfigError as error:
        remedy = "It is a template: `helm template` renders its chart." if b"{{" in content else ""
        yield UNREADABLE.on(place, str(error), remedy)


def without_nulls(value: Any) -> Any:
    """Return ``value`` without the null values in mappings: Kubernetes reads them as absent."""
    if isinstance(value, dict):
        return {str(key): without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _items(resource: Resource) -> Iterator[Resource]:
    """Yield the resource, or those of a list such as kubectl prints."""
    if not resource.kind.endswith("List"):
        yield resource
        return
    for item in mappings(resource.value.get("items")):
        yield from _items(Resource(resource.place, item))
