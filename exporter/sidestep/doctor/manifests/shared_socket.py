"""Check of the way from an engine to the exporter of its pod: endpoint, volume and permissions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from sidestep.config.settings import Config
from sidestep.diagnosis.finding import Code, Finding
from sidestep.doctor.manifests.pods import ENDPOINT, IPC, Container, Exporter, Pod

NO_ENDPOINT = Code(
    "SD520",
    "error",
    "An engine has no SIDESTEP_ENDPOINT",
    "The pod has an exporter, and the plugin in the engine does nothing without the variable.",
    "Set SIDESTEP_ENDPOINT in the engine's container to the exporter's --ingest.endpoint.",
)
OTHER_ENDPOINT = Code(
    "SD521",
    "error",
    "Engine and exporter have different endpoints",
    "SIDESTEP_ENDPOINT is none of the endpoints of the pod's exporter.",
    "Set both to the same endpoint.",
)
NOT_SHARED = Code(
    "SD522",
    "error",
    "Engine and exporter do not share the socket's directory",
    "Both have to mount one volume at the same path; a container without it has a directory of its own there.",
    "Mount the same `emptyDir` at the same path in both containers, with the same `subPath` or none.",
)
OTHER_PODS = Code(
    "SD525",
    "warning",
    "Other pods have the socket's directory, too",
    "The socket is on a volume of the node or on a claim: the exporters of two pods take the path from each other.",
    "Use an `emptyDir` with `medium: Memory`.",
)
WORLD_WRITABLE = Code(
    "SD527",
    "error",
    "The socket is in a world-writable directory",
    "The directory of an `emptyDir` itself is world-writable, which the exporter refuses.",
    "Put the socket into a directory below the mount, such as /run/sidestep/ingest/ingest.ipc; the exporter creates it.",
)
NOT_PERMITTED = Code(
    "SD528",
    "error",
    "The engine may not open the socket",
    "Engine and exporter run as different users without a group in common: the directory is open to the exporter's"
    " user and to --ingest.ipc-group only.",
    "Set --ingest.ipc-group to a group that both have: `runAsGroup` or `supplementalGroups` of the pod.",
)
CODES = (NO_ENDPOINT, OTHER_ENDPOINT, NOT_SHARED, OTHER_PODS, WORLD_WRITABLE, NOT_PERMITTED)


def check(pod: Pod) -> Iterator[Finding]:
    """Yield why an engine does not reach the exporter of its pod."""
    known = [(each, each.settings) for each in pod.exporters if each.settings is not None]
    if len(known) < len(pod.exporters) or not known:
        return
    for engine, kind in pod.engines.values():
        endpoint = engine.variables.get(ENDPOINT)
        if endpoint:
            yield from _reaches(pod, engine, endpoint, known)
        elif not (engine.has(ENDPOINT) or kind == "triton" or any(each.polls for each, _ in known)):
            yield NO_ENDPOINT.on(pod.subject, f"container {engine.name}")


def _reaches(
    pod: Pod, engine: Container, endpoint: str, exporters: list[tuple[Exporter, Config]]
) -> Iterator[Finding]:
    subject, path = pod.subject, endpoint.removeprefix(IPC)
    bound = {each: one for one, found in exporters for each in found.ingest_endpoint}
    if not endpoint.startswith(IPC):
        ports = {each.rpartition(":")[2] for each in bound if each.startswith("tcp://")}
        if endpoint.rpartition(":")[2] not in ports:
            yield OTHER_ENDPOINT.on(subject, _differ(engine, endpoint, bound))
        return
    place = pod.location(engine, path)
    for each, exporter in bound.items():
        there = pod.location(exporter.container, each.removeprefix(IPC))
        if there is not None and place is not None and place.is_at(there):
            yield from _usable(pod, engine, exporter, endpoint)
            return
    if endpoint not in bound:
        yield OTHER_ENDPOINT.on(subject, _differ(engine, endpoint, bound))
        return
    there = pod.location(bound[endpoint].container, path)
    without = [engine.name] * (place is None) + [bound[endpoint].container.name] * (there is None)
    where = f"is on no volume in container {' and '.join(without)}"
    yield NOT_SHARED.on(
        subject, f"{path} {where if without else 'is on different volumes or paths'}"
    )


def _differ(engine: Container, endpoint: str, bound: dict[str, Exporter]) -> str:
    return f"container {engine.name} has {endpoint}, the exporter {', '.join(bound)}"


def _usable(pod: Pod, engine: Container, exporter: Exporter, endpoint: str) -> Iterator[Finding]:
    """Yield why a socket in a shared directory cannot be used."""
    place = pod.location(engine, endpoint.removeprefix(IPC))
    assert place is not None
    volume = pod.volume(place.volume)
    is_shared = volume and (volume.host_path or volume.persistent_volume_claim)
    if is_shared or place.volume in pod.claims:
        yield OTHER_PODS.on(pod.subject, f"{endpoint} is on volume {place.volume}")
    elif volume and place.path.parent == PurePosixPath():
        yield WORLD_WRITABLE.on(pod.subject, f"{endpoint} is directly in volume {volume.name}")
    if reason := _denied(pod, engine, exporter):
        yield NOT_PERMITTED.on(pod.subject, reason)


def _denied(pod: Pod, engine: Container, exporter: Exporter) -> str:
    """Return why the engine's user cannot open the socket; empty if it can, or if images decide."""
    settings = exporter.settings
    group = settings.ingest_ipc_group if settings else ""
    user, own = pod.user(engine), pod.user(exporter.container)
    number = int(group) if group.isdecimal() else None
    if number is not None and own not in (None, 0) and number not in pod.groups(exporter.container):
        return f"container {exporter.container.name} is not in its --ingest.ipc-group {group}"
    if (
        None in (user, own)
        or user in (0, own)
        or (number is not None and number in pod.groups(engine))
    ):
        return ""
    if group and number is None:
        return ""
    return f"container {engine.name} runs as {user}, the exporter as {own}" + (
        f", and --ingest.ipc-group {group} is no group of the former" if group else ""
    )
