"""Check of all manifests together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sidestep.diagnosis.finding import Code, Finding
from sidestep.doctor.manifests import pods, reading, shared_socket, sidecar

NOTHING = Code(
    "SD502",
    "warning",
    "The manifests have neither an engine nor an exporter",
    "No container runs vLLM, SGLang, Triton or `sidestep serve`, as far as command, image and variables show.",
    "Give the manifests of the engines' pods, or those of the cluster: `kubectl get deploy,sts,podmonitor -o yaml |"
    " sidestep doctor --manifest -`.",
)
CODES = (*reading.CODES, NOTHING, *sidecar.CODES, *shared_socket.CODES)


def check(sources: Iterable[str]) -> Iterator[Finding]:
    """Yield what is wrong with the manifests in files, directories and standard input (``-``)."""
    names = list(sources)
    resources, unreadable = reading.read(names)
    found, invalid = pods.find(resources)
    yield from (*unreadable, *invalid)
    if not any(each.engines or each.exporters for each in found):
        if not (unreadable or invalid):
            yield NOTHING.on(", ".join(names), f"{len(resources)} resources were read")
        return
    yield from sidecar.check(found)
    for each in found:
        yield from shared_socket.check(each)
