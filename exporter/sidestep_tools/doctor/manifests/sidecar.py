"""Check of the exporter's container: whether it runs for as long as the engine, its probes, memory and state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sidestep.config.settings import Config
from sidestep.diagnosis.finding import Code, Finding
from sidestep_tools.doctor.environment.processes import parse_options
from sidestep_tools.doctor.manifests import codes
from sidestep_tools.doctor.manifests.pods import (
    ENDPOINT,
    IPC,
    Container,
    Engine,
    Exporter,
    Pod,
    Probe,
    place,
)

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
SNAPSHOT_SECONDS = 2
"""Seconds that the exporter needs at most after its linger."""
HANG_SECONDS = 300
"""Shortest time after which a liveness probe may take a silent engine for a dead one."""
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def check(pods: list[Pod]) -> Iterator[Finding]:
    """Yield what is wrong with the exporters' containers, and the engines without one."""
    # An exporter in a pod of its own may poll any engine.
    polled = any(one.polls for pod in pods if not pod.engines for one in pod.exporters)
    for pod in pods:
        if not pod.exporters:
            yield from _without_exporter(pod, polled=polled)
        for exporter in pod.exporters:
            for code, text in _found(pod, exporter):
                yield code.on(pod.part(exporter.container), text)
    yield from _shared_state(pods)
    yield from _host_ports(pods)


def _without_exporter(pod: Pod, *, polled: bool) -> Iterator[Finding]:
    for engine in (each.container for each in pod.engines):
        endpoint = engine.variables.get(ENDPOINT, "")
        if endpoint.startswith(IPC):
            volume = pod.volume(place(engine, endpoint.removeprefix(IPC)))
            if not volume or not (volume.host_path or volume.persistent_volume_claim):
                yield codes.NO_EXPORTER.on(pod.part(engine), f"{ENDPOINT} is {endpoint}")
        elif not polled and not any(each.name == ENDPOINT for each in engine.env):
            hidden = ", unless by envFrom" if engine.env_from else ""
            yield codes.NOT_OBSERVED.on(pod.part(engine), f"{ENDPOINT} is not set{hidden}")


def _found(pod: Pod, exporter: Exporter) -> Iterator[tuple[Code, str]]:
    """Yield codes, and texts about the exporter's container."""
    if exporter.refusal:
        yield codes.REFUSED, exporter.refusal
    yield from _order(pod, exporter.container)
    if settings := exporter.settings:
        yield from _ports(exporter, settings)
        yield from _probes(exporter, exporter.container, settings)
        for engine in (each.container for each in pod.engines):
            yield from _probes(exporter, engine, settings)
        yield from _directories(pod, exporter.container, settings)
        yield from _limits(pod, exporter, settings)


def _order(pod: Pod, container: Container) -> Iterator[tuple[Code, str]]:
    if container not in pod.spec.init_containers:
        if pod.engines:
            yield codes.ENDS_EARLY, "it is an ordinary container"
    elif container.restart_policy != "Always":
        yield codes.NEVER_ENDS, "restartPolicy is not Always"
    else:
        before = pod.running[: pod.running.index(container)]
        for engine in (each.container for each in pod.engines if each.container in before):
            yield codes.ENDS_EARLY, f"it is after {engine.name}"


def _ports(exporter: Exporter, settings: Config) -> Iterator[tuple[Code, str]]:
    listening = exporter.page_ports
    declared = {each.container_port for each in exporter.container.ports} - exporter.ingest_ports
    hosts = {host for host, _ in settings.web_listen_address}
    if declared and not declared & listening:
        ports = [", ".join(map(str, sorted(each))) or "none" for each in (declared, listening)]
        yield codes.NOT_LISTENING, "it declares port {} and listens on {}".format(*ports)
    elif hosts and hosts <= LOOPBACK:
        yield codes.NOT_LISTENING, f"it listens on {min(hosts)} only"


def _probes(
    exporter: Exporter, container: Container, settings: Config
) -> Iterator[tuple[Code, str]]:
    """Yield what is wrong with the probes of a container that ask the exporter."""
    own, page = container is exporter.container, settings.web_telemetry_path
    paths = {"/", "/-/healthy", "/-/ready", page, f"{page.rstrip('/')}/pod"}
    names = {each.name for each in exporter.container.ports if each.name}
    others = set() if own else names - {each.name for each in container.ports}
    for kind in ("startup", "liveness", "readiness"):
        probe: Probe | None = getattr(container, f"{kind}_probe")
        if probe is None or probe.http_get is None:
            continue
        port, path = probe.http_get.port, probe.http_get.path.partition("?")[0]
        asks_page = port in exporter.page_ports or (own and port in names)
        asks_engines = path.startswith("/-/engines")
        is_served = asks_engines or path in paths or path.startswith("/api/v1/")
        text = f"{kind}Probe of {container.name} asks {path} at port {port}"
        if (asks_page and not is_served) or (own and not asks_page) or port in others:
            yield codes.WRONG_PROBE, text
        elif asks_page and asks_engines and kind == "liveness":
            seconds = probe.period_seconds * probe.failure_threshold
            if own or seconds < HANG_SECONDS or container.startup_probe is None:
                yield codes.KILLS, f"{text}, for {seconds} s"


def _directories(pod: Pod, container: Container, settings: Config) -> Iterator[tuple[Code, str]]:
    is_fixed = container.security_context.read_only_root_filesystem
    # With an engine in the pod, a missing mount is found as one that is not shared.
    sockets = [each for each in settings.ingest_endpoint if each.startswith(IPC)]
    for endpoint in sockets:
        found = place(container, endpoint.removeprefix(IPC))
        if found.mount.read_only if found else is_fixed and not pod.engines:
            yield codes.NOT_WRITABLE, f"the directory of {endpoint}"
    if not settings.state_dir:
        return
    found = place(container, settings.state_dir)
    volume = pod.volume(found)
    text = f"--state.dir is {settings.state_dir}"
    if found.mount.read_only if found else is_fixed:
        yield codes.NOT_WRITABLE, text
    elif found is None:
        yield codes.STATE, f"{text}, on no volume"
    elif volume and volume.empty_dir is not None and volume.empty_dir.get("medium") != "Memory":
        yield codes.STATE, f"{text}, and the emptyDir {volume.name} is on the node's disk"


def _limits(pod: Pod, exporter: Exporter, settings: Config) -> Iterator[tuple[Code, str]]:
    needed = SNAPSHOT_SECONDS + (settings.shutdown_linger if exporter.page_ports else 0)
    if exporter.container in pod.spec.init_containers:
        needed += max(map(_shutdown_seconds, pod.engines), default=0)
    if (given := pod.spec.termination_grace_period_seconds) < needed:
        yield codes.NO_TIME, f"terminationGracePeriodSeconds is {given}, {needed:g} s are needed"
    memory = exporter.container.resources.get("limits", {}).get("memory")
    quantity = re.fullmatch(r"(\d+\.?\d*)(\D*)", str(memory))
    hard = settings.limits_memory_hard
    if quantity and hard * UNITS["Mi"] > float(quantity[1]) * UNITS.get(quantity[2], UNITS["Gi"]):
        yield codes.OUT_OF_MEMORY, f"its limit is {memory}, --limits.memory-hard is {hard} MiB"


def _shutdown_seconds(engine: Engine) -> float:
    """Return the seconds that vLLM's flag gives requests in flight."""
    given = parse_options(engine.container.words).get("--shutdown-timeout", "")
    return float(given) if given.isdecimal() else 0.0


def _shared_state(pods: Iterable[Pod]) -> Iterator[Finding]:
    seen: dict[tuple[object, ...], str] = {}
    for number, pod in enumerate(pods):
        for container, settings, _ in pod.exporters:
            found = place(container, settings.state_dir) if settings else None
            volume = pod.volume(found)
            if found is None or volume is None:
                continue
            claim = str((volume.persistent_volume_claim or {}).get("claimName", ""))
            key = (pod.namespace, claim or (number, volume.name), found.path)
            if claim and pod.replicas > 1:
                text = f"{pod.replicas} replicas use the claim {claim}"
                yield codes.SHARED_STATE.on(pod.part(container), text)
            elif key in seen:
                text = f"its volume {volume.name} is also that of {seen[key]}"
                yield codes.SHARED_STATE.on(pod.part(container), text)
            seen[key] = pod.part(container)


def _host_ports(pods: Iterable[Pod]) -> Iterator[Finding]:
    seen: dict[int, str] = {}
    for pod in (each for each in pods if each.spec.host_network):
        for port in sorted(set().union(*(each.page_ports for each in pod.exporters))):
            if pod.replicas > 1 or port in seen:
                other = seen.get(port, f"its {pod.replicas} replicas")
                yield codes.ONE_PER_NODE.on(pod.subject, f"port {port} is also that of {other}")
            seen[port] = pod.subject
