"""Check of the engine's container: its way to the exporter of its pod, and its plugin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from sidestep.config.variables import PREFIX
from sidestep.diagnosis.finding import Code, Finding
from sidestep_tools.doctor.checks import run
from sidestep_tools.doctor.environment.check import ALLOWED, OPTIONS, VALUES, VARIABLES, Start
from sidestep_tools.doctor.environment.packages import SGLANG, VLLM
from sidestep_tools.doctor.environment.processes import parse_options
from sidestep_tools.doctor.manifests import codes
from sidestep_tools.doctor.manifests.pods import (
    ENDPOINT,
    IPC,
    Container,
    Engine,
    Exporter,
    Pod,
    place,
)

PLUGIN = "/opt/sidestep/plugin"
"""Directory of the exporter's image that has the plugin."""


def check(pod: Pod) -> Iterator[Finding]:
    """Yield why an engine does not send to the exporter of its pod."""
    for engine in pod.engines:
        found = [*_to_exporter(pod, engine)] if pod.exporters else []
        ours = [each.name for each in engine.container.env if each.name.startswith(PREFIX)]
        if ours and engine.kind != "triton":
            found += _plugin(pod, engine.container)
            yield from _environment(pod, engine, ours)
        for code, text in found:
            yield code.on(pod.part(engine.container), text)


def _to_exporter(pod: Pod, engine: Engine) -> Iterator[tuple[Code, str]]:
    container = engine.container
    endpoint = container.variables.get(ENDPOINT)
    bound = {
        each: one for one in pod.exporters if one.settings for each in one.settings.ingest_endpoint
    }
    if not bound or any(each.settings is None for each in pod.exporters):
        return
    if not endpoint:
        is_polled = engine.kind == "triton" or any(each.polls for each in pod.exporters)
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
        if here and here.is_at(place(exporter.container, each.removeprefix(IPC))):
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
    elif (
        None not in (user, own) and own != user and not (group and int(group) in pod.groups(engine))
    ):
        text = f"it runs as {user} and the exporter as {own}"
        yield codes.NOT_PERMITTED, f"{text}, without the group {group}" if group else text


def _plugin(pod: Pod, engine: Container) -> Iterator[tuple[Code, str]]:
    """Yield why the plugin is not on the engine's PYTHONPATH; its image may have the package."""
    path = engine.variables.get("PYTHONPATH", "")
    here = [found for each in path.split(":") if (found := place(engine, each))]
    others = [
        each for each in (*pod.spec.init_containers, *pod.spec.containers) if each is not engine
    ]
    mounted = {one.name for each in others for one in each.volume_mounts}
    volumes = [volume for each in here if (volume := pod.volume(each))]
    copies = [each for each in others if any(PLUGIN in word for word in each.words)]
    filled = [found for each in copies for word in each.words if (found := place(each, word))]
    empty = [
        each.name for each in volumes if each.empty_dir is not None and each.name not in mounted
    ]
    if empty:
        yield codes.NO_PLUGIN, f"PYTHONPATH is {path}, and volume {empty[0]} is empty"
    elif filled and not any(each.is_at(one) for each in here for one in filled):
        yield codes.NO_PYTHONPATH, f"PYTHONPATH is {path or 'not set'}"


def _environment(pod: Pod, engine: Engine, ours: list[str]) -> Iterator[Finding]:
    """Yield what is wrong with variables and options, as in a running engine."""
    container, subject = engine.container, pod.part(engine.container)
    environ, options = container.variables, parse_options(container.words)
    # Of those whose value is elsewhere, the name may be wrong as well.
    hidden = {name: "hidden" for name in ours if name not in VALUES}
    yield from run(VARIABLES, {**hidden, **environ}, subject)
    if known := {"vllm": VLLM, "sglang": SGLANG}.get(engine.kind):
        start = Start(known, environ, options)
        yield from run(ALLOWED, start, subject)
        # A file of options or a script's own arguments may have any.
        if engine.is_server and not {"--config", "$@"} & {*options, *container.words}:
            yield from run(OPTIONS, start, subject)
