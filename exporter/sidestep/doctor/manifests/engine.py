"""Check of the engine's container: its way to the exporter of its pod, and its plugin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from sidestep.diagnosis.finding import Code, Finding
from sidestep.doctor.manifests import codes
from sidestep.doctor.manifests.pods import ENDPOINT, IPC, Container, Engine, Exporter, Pod, place

PLUGIN = "/opt/sidestep/plugin"
"""Directory of the exporter's image that has the plugin."""


def check(pod: Pod) -> Iterator[Finding]:
    """Yield why an engine does not send to the exporter of its pod."""
    for engine in pod.engines:
        found = [*_to_exporter(pod, engine)] if pod.exporters else []
        if engine.container.has(ENDPOINT) and engine.kind != "triton":
            found += _plugin(pod, engine)
        for code, text in found:
            yield code.on(pod.subject, f"container {engine.container.name}: {text}")


def _to_exporter(pod: Pod, engine: Engine) -> Iterator[tuple[Code, str]]:
    container, kind = engine
    endpoint = container.variables.get(ENDPOINT)
    bound = {
        each: one for one in pod.exporters if one.settings for each in one.settings.ingest_endpoint
    }
    if not bound or any(each.settings is None for each in pod.exporters):
        return
    if not endpoint:
        is_polled = kind == "triton" or any(each.polls for each in pod.exporters)
        if not (container.has(ENDPOINT) or is_polled):
            yield codes.NO_ENDPOINT, f"{ENDPOINT} is not set"
        return
    differ = f"{ENDPOINT} is {endpoint}, the exporter's is {', '.join(bound)}"
    if not endpoint.startswith(IPC):
        ports = {str(port) for each in pod.exporters for port in each.ingest_ports}
        if endpoint.rpartition(":")[2] not in ports:
            yield codes.OTHER_ENDPOINT, differ
        return
    here = place(container, endpoint.removeprefix(IPC))
    for each, exporter in bound.items():
        if here and here == place(exporter.container, each.removeprefix(IPC)):
            yield from _permitted(pod, container, exporter)
            yield from _directory(pod, container, endpoint)
            return
    if endpoint not in bound:
        yield codes.OTHER_ENDPOINT, differ
        return
    there = place(bound[endpoint].container, endpoint.removeprefix(IPC))
    places = [f"on volume {each.volume}" if each else "on no volume" for each in (here, there)]
    yield codes.NOT_SHARED, f"{endpoint} is {places[0]}, in the exporter {places[1]}"


def _directory(pod: Pod, engine: Container, endpoint: str) -> Iterator[tuple[Code, str]]:
    here = place(engine, endpoint.removeprefix(IPC))
    volume = pod.volume(here)
    if volume and (volume.host_path or volume.persistent_volume_claim):
        yield codes.OTHER_PODS, f"{endpoint} is on volume {volume.name}"
    elif here and here.path.parent == PurePosixPath():
        yield codes.WORLD_WRITABLE, f"{endpoint} is directly in volume {here.volume}"


def _permitted(pod: Pod, engine: Container, exporter: Exporter) -> Iterator[tuple[Code, str]]:
    """Yield why the engine's user cannot open the socket; images may decide that it can."""
    group = exporter.settings.ingest_ipc_group if exporter.settings else ""
    user, own = pod.user(engine), pod.user(exporter.container)
    if group and not group.isdecimal():
        return
    if group and own and int(group) not in pod.groups(exporter.container):
        yield codes.NOT_PERMITTED, f"the exporter is not in its --ingest.ipc-group {group}"
    elif user and own not in (None, user) and not (group and int(group) in pod.groups(engine)):
        text = f"it runs as {user} and the exporter as {own}"
        yield codes.NOT_PERMITTED, f"{text}, without the group {group}" if group else text


def _plugin(pod: Pod, engine: Engine) -> Iterator[tuple[Code, str]]:
    container, kind = engine
    line = " ".join(container.words)
    path = container.variables.get("PYTHONPATH", "")
    here = [found for each in path.split(":") if (found := place(container, each))]
    first = pod.spec.init_containers
    filled = [
        found
        for each in first
        if any(PLUGIN in word for word in each.words) and (found := place(each, each.words[-1]))
    ]
    others = [each for each in (*first, *pod.spec.containers) if each is not container]
    mounted = {one.name for each in others for one in each.volume_mounts}
    on_path = [volume for each in here if (volume := pod.volume(each))]
    empty = [
        each.name for each in on_path if each.empty_dir is not None and each.name not in mounted
    ]
    if empty:
        yield codes.NO_PLUGIN, f"PYTHONPATH is {path}, and volume {empty[0]} is empty"
    elif filled and not any(each in filled for each in here):
        yield codes.NO_PYTHONPATH, f"PYTHONPATH is {path or 'not set'}"
    for name in ("vllm", "sglang"):
        listed = container.variables.get(f"{name.upper()}_PLUGINS")
        is_listed = listed is None or "sidestep" in [each.strip() for each in listed.split(",")]
        if kind in (name, "") and not is_listed and "SidestepScheduler" not in line:
            yield codes.NOT_LISTED, f"{name.upper()}_PLUGINS is {listed!r}"
    is_complete = "launch_server" in line and "--config" not in line and "$@" not in line
    if kind == "sglang" and is_complete and "--enable-metrics" not in line:
        yield codes.NO_METRICS, "its arguments do not have --enable-metrics"
