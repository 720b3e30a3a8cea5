"""Check of all manifests together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sidestep.diagnosis.finding import Finding
from sidestep.doctor.manifests import codes, engine, pods, reading, scraping, sidecar
from sidestep.doctor.manifests.pods import Pod
from sidestep.doctor.manifests.reading import Resource


def check(sources: Iterable[str]) -> Iterator[Finding]:
    """Yield what is wrong with the manifests in files, directories and standard input (``-``)."""
    names = list(sources)
    read = [each for name in names for each in reading.read(name)]
    resources = [each for each in read if isinstance(each, Resource)]
    converted = list(pods.find(resources))
    found = [each for each in converted if isinstance(each, Pod)]
    unreadable = [each for each in (*read, *converted) if isinstance(each, Finding)]
    yield from unreadable
    if any(each.engines or each.exporters for each in found):
        yield from sidecar.check(found)
        for pod in found:
            yield from engine.check(pod)
        yield from scraping.check(found, resources)
    elif not unreadable:
        yield codes.NOTHING.on(", ".join(names), f"{len(resources)} resources were read")
