"""Check of all manifests together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sidestep.diagnosis.finding import Finding
from sidestep_tools.doctor.manifests import autoscaling, codes, engine, pods, scraping, sidecar
from sidestep_tools.doctor.manifests.pods import Pod
from sidestep_tools.doctor.manifests.reading import Resource


def check(names: Sequence[str], read: Sequence[Resource | Finding]) -> Iterator[Finding]:
    """Yield what is wrong with the manifests that were read from sources of these names."""
    resources = [each for each in read if isinstance(each, Resource)]
    converted = list(pods.find(resources))
    found = [each for each in converted if isinstance(each, Pod)]
    unreadable = [each for each in (*read, *converted) if isinstance(each, Finding)]
    scaling = [*autoscaling.check(resources)]
    yield from (*unreadable, *scaling)
    if any(each.engines or each.exporters for each in found):
        yield from sidecar.check(found)
        for pod in found:
            yield from engine.check(pod)
        yield from scraping.check(found, resources)
    elif not (unreadable or scaling or autoscaling.queries(resources)):
        yield codes.NOTHING.on(", ".join(names), f"{len(resources)} resources were read")
