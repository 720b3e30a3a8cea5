"""Check of manifests: the exporter in an engine's pod, the engine's way to it, and what scrapes and scales them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from sidestep.config.settings import Config
from sidestep.config.variables import PREFIX
from sidestep.diagnosis.finding import Code, Finding
from sidestep_tools.doctor.checks import Check, codes, run
from sidestep_tools.doctor.environment.check import ALLOWED, OPTIONS, VALUES, VARIABLES, Start
from sidestep_tools.doctor.environment.packages import SGLANG, VLLM
from sidestep_tools.doctor.environment.processes import parse_options
from sidestep_tools.doctor.manifests import autoscaling, pods, reading, scraping
from sidestep_tools.doctor.manifests.pods import (
    ENDPOINT,
    IPC,
    Container,
    EngineContainer,
    Exporter,
    Place,
    Pod,
    Probe,
    place,
)
from sidestep_tools.doctor.manifests.reading import Resource

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
SNAPSHOT_SECONDS = 2
"""Seconds that the exporter needs at most after its linger."""
HANG_SECONDS = 300
"""Shortest time after which a liveness probe may take a silent engine for a dead one."""
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
PLUGIN = "/opt/sidestep/plugin"
"""Directory of the exporter's image that has the plugin."""
NOTHING = Code("SD502", "info", "The manifests have neither an engine nor an exporter",
    "No container runs vLLM, SGLang, Triton or `sidestep serve`, as far as command, image and variables show.",
    "Give the manifests of the engines' pods, or those of the cluster: `kubectl get deploy,sts,podmonitor -o yaml | sidestep doctor --manifest -`.")  # fmt: skip


class Sidecar(NamedTuple):
    """An exporter in its pod."""

    pod: Pod
    exporter: Exporter

    @property
    def container(self) -> Container:
        """Its container."""
        return self.exporter.container

    @property
    def settings(self) -> Config:
        """What its flags and variables mean; only asked where they are known."""
        assert self.exporter.settings is not None
        return self.exporter.settings

    @property
    def is_fixed(self) -> bool:
        """Whether its root file system is read-only."""
        return self.container.security_context.read_only_root_filesystem


class Client(NamedTuple):
    """An engine in its pod.

    Attributes:
        is_polled: Whether an exporter of another pod may read from it.
    """

    pod: Pod
    engine: EngineContainer
    is_polled: bool

    @property
    def container(self) -> Container:
        """Its container."""
        return self.engine.container

    @property
    def endpoint(self) -> str:
        """The endpoint that it sends to; empty if it is not set or not in the manifest."""
        return self.container.variables.get(ENDPOINT, "")

    @property
    def socket(self) -> Place | None:
        """Where its ipc endpoint is."""
        return _socket(self.container, self.endpoint) if self.endpoint.startswith(IPC) else None

    @property
    def bound(self) -> dict[str, Exporter]:
        """The exporters of its pod by their endpoints; none if not all endpoints are known."""
        exporters = self.pod.exporters
        if any(each.settings is None for each in exporters):
            return {}
        return {
            each: one for one in exporters if one.settings for each in one.settings.ingest_endpoint
        }

    @property
    def reached(self) -> Exporter | None:
        """The exporter of its pod whose socket is at the same place."""
        here = self.socket
        for each, exporter in self.bound.items() if here else ():
            if here and here.is_at(_socket(exporter.container, each)):
                return exporter
        return None

    @property
    def has_exporter(self) -> bool:
        """Whether its endpoint is one of its pod's exporters, whether or not it reaches that."""
        if self.endpoint.startswith(IPC):
            return self.reached is not None or self.endpoint in self.bound
        ports = {str(port) for each in self.pod.exporters for port in each.ingest_ports}
        return self.endpoint.rpartition(":")[2] in ports

    @property
    def is_on_node_or_claim(self) -> bool:
        """Whether other pods may have the volume of its socket."""
        volume = self.pod.volume(self.socket)
        return bool(volume and (volume.host_path or volume.persistent_volume_claim))


def _socket(container: Container, endpoint: str) -> Place | None:
    return place(container, endpoint.removeprefix(IPC))


def _not_observed(client: Client) -> str:
    container = client.container
    if client.pod.exporters or client.is_polled or any(e.name == ENDPOINT for e in container.env):
        return ""
    return f"{ENDPOINT} is not set{', unless by envFrom' if container.env_from else ''}"


def _without_endpoint(client: Client) -> bool:
    is_polled = client.engine.kind == "triton" or any(e.polls for e in client.pod.exporters)
    is_set = client.endpoint or client.container.has(ENDPOINT)
    return bool(client.bound) and not (is_set or is_polled)


def _not_shared(client: Client) -> str:
    exporter = client.bound.get(client.endpoint)
    if exporter is None or client.reached or not client.endpoint.startswith(IPC):
        return ""
    both = (client.socket, _socket(exporter.container, client.endpoint))
    here, there = (f"on volume {each.volume}" if each else "on no volume" for each in both)
    return f"{client.endpoint} is {here}, in the exporter {there}"


def _not_permitted(client: Client) -> str:
    """Return why the engine's user cannot open the socket; images may decide that it can."""
    pod, exporter = client.pod, client.reached
    group = exporter.settings.ingest_ipc_group if exporter and exporter.settings else ""
    if exporter is None or (group and not group.isdecimal()):
        return ""
    user, own = pod.user(client.container), pod.user(exporter.container)
    if group and own and int(group) not in pod.groups(exporter.container):
        return f"the exporter is not in its --ingest.ipc-group {group}"
    if None in (user, own) or own == user or (group and int(group) in pod.groups(client.container)):
        return ""
    return f"it runs as {user} and the exporter as {own}{group and f', without the group {group}'}"


def _python_path(client: Client) -> tuple[str, list[Place]]:
    """Return the engine's PYTHONPATH, and where its parts are."""
    path = client.container.variables.get("PYTHONPATH", "")
    return path, [found for each in path.split(":") if (found := place(client.container, each))]


def _others(client: Client) -> list[Container]:
    spec = client.pod.spec
    return [e for e in (*spec.init_containers, *spec.containers) if e is not client.container]


def _no_plugin(client: Client) -> str:
    path, here = _python_path(client)
    mounted = {one.name for each in _others(client) for one in each.volume_mounts}
    volumes = [volume for each in here if (volume := client.pod.volume(each))]
    empty = [e.name for e in volumes if e.empty_dir is not None and e.name not in mounted]
    return f"PYTHONPATH is {path}, and volume {empty[0]} is empty" if empty else ""


def _no_python_path(client: Client) -> str:
    """Return a PYTHONPATH that does not lead to the plugin; the engine's image may have the package."""
    path, here = _python_path(client)
    copies = [each for each in _others(client) if any(PLUGIN in word for word in each.words)]
    filled = [found for each in copies for word in each.words if (found := place(each, word))]
    is_there = any(each.is_at(one) for each in here for one in filled)
    return f"PYTHONPATH is {path or 'not set'}" if filled and not is_there else ""


def _never_ends(sidecar: Sidecar) -> bool:
    container = sidecar.container
    return container in sidecar.pod.spec.init_containers and container.restart_policy != "Always"


def _ends_early(sidecar: Sidecar) -> list[str]:
    pod, container = sidecar.pod, sidecar.container
    engines = [each.container for each in pod.engines]
    if container not in pod.spec.init_containers:
        return ["it is an ordinary container"] * bool(engines)
    before = pod.running[: pod.running.index(container)]
    return [f"it is after {each.name}" for each in engines if each in before]


def _not_writable(sidecar: Sidecar) -> list[str]:
    pod, settings, found = sidecar.pod, sidecar.settings, list[str]()
    # With an engine in the pod, a missing mount is found as one that is not shared.
    for each in (each for each in settings.ingest_endpoint if each.startswith(IPC)):
        at = _socket(sidecar.container, each)
        if at.mount.read_only if at else sidecar.is_fixed and not pod.engines:
            found.append(f"the directory of {each}")
    at = place(sidecar.container, settings.state_dir) if settings.state_dir else None
    if settings.state_dir and (at.mount.read_only if at else sidecar.is_fixed):
        found.append(f"--state.dir is {settings.state_dir}")
    return found


def _not_listening(sidecar: Sidecar) -> str:
    listening = sidecar.exporter.page_ports
    declared = {e.container_port for e in sidecar.container.ports} - sidecar.exporter.ingest_ports
    hosts = {host for host, _ in sidecar.settings.web_listen_address}
    if declared and not declared & listening:
        ports = [", ".join(map(str, sorted(each))) or "none" for each in (declared, listening)]
        return f"it declares port {ports[0]} and listens on {ports[1]}"
    return f"it listens on {min(hosts)} only" if hosts and hosts <= LOOPBACK else ""


def _probes(sidecar: Sidecar) -> Iterator[tuple[bool, str]]:
    """Yield the probes that always fail (False), and those that kill because of a slow engine (True)."""
    page = sidecar.settings.web_telemetry_path
    served = {"/", "/-/healthy", "/-/ready", page, f"{page.rstrip('/')}/pod"}
    names = {each.name for each in sidecar.container.ports if each.name}
    for container in (sidecar.container, *(each.container for each in sidecar.pod.engines)):
        own = container is sidecar.container
        others = set() if own else names - {each.name for each in container.ports}
        for kind in ("startup", "liveness", "readiness"):
            probe: Probe | None = getattr(container, f"{kind}_probe")
            if probe is None or probe.http_get is None:
                continue
            port, path = probe.http_get.port, probe.http_get.path.partition("?")[0]
            asks_page = port in sidecar.exporter.page_ports or (own and port in names)
            asks_engines = path.startswith("/-/engines")
            is_served = asks_engines or path in served or path.startswith("/api/v1/")
            text = f"{kind}Probe of {container.name} asks {path} at port {port}"
            if (asks_page and not is_served) or (own and not asks_page) or port in others:
                yield False, text
            elif asks_page and asks_engines and kind == "liveness":
                seconds = probe.period_seconds * probe.failure_threshold
                if own or seconds < HANG_SECONDS or container.startup_probe is None:
                    yield True, f"{text}, for {seconds} s"


def _no_time(sidecar: Sidecar) -> str:
    pod, exporter = sidecar
    needed = SNAPSHOT_SECONDS + (sidecar.settings.shutdown_linger if exporter.page_ports else 0.0)
    if exporter.container in pod.spec.init_containers:
        # vLLM's flag gives requests in flight their time.
        options = [parse_options(each.container.words) for each in pod.engines]
        given = [each.get("--shutdown-timeout", "") for each in options]
        needed += max((float(each) for each in given if each.isdecimal()), default=0.0)
    grace = pod.spec.termination_grace_period_seconds
    text = f"terminationGracePeriodSeconds is {grace}, {needed:g} s are needed"
    return text if grace < needed else ""


def _out_of_memory(sidecar: Sidecar) -> str:
    limit = sidecar.container.resources.get("limits", {}).get("memory")
    quantity = re.fullmatch(r"(\d+\.?\d*)(\D*)", str(limit))
    hard = sidecar.settings.limits_memory_hard
    if quantity and hard * UNITS["Mi"] > float(quantity[1]) * UNITS.get(quantity[2], UNITS["Gi"]):
        return f"its limit is {limit}, --limits.memory-hard is {hard} MiB"
    return ""


def _on_disk(sidecar: Sidecar) -> str:
    named = sidecar.settings.state_dir
    at = place(sidecar.container, named) if named else None
    if not named or (at.mount.read_only if at else sidecar.is_fixed):
        return ""
    if at is None:
        return f"--state.dir is {named}, on no volume"
    volume = sidecar.pod.volume(at)
    if volume is None or volume.empty_dir is None or volume.empty_dir.get("medium") == "Memory":
        return ""
    return f"--state.dir is {named}, and the emptyDir {volume.name} is on the node's disk"


# fmt: off
ENGINES: Sequence[Check[Client]] = (
    Check(Code("SD510", "warning", "The pod of an engine has no exporter",
        "The pod has neither an exporter nor SIDESTEP_ENDPOINT, so the engine's metrics come from its own page alone.",
        'Add the component of deploy/kustomize or the chart\'s templates to the workload, or label one that is no engine `sidestep/inject: "false"`.'),
        _not_observed),
    Check(Code("SD511", "error", "An engine sends to an exporter that its pod does not have",
        "SIDESTEP_ENDPOINT is an ipc:// path, which only reaches a process in the same pod, and the pod has no exporter.",
        "Add the exporter's container to the pod, or give a tcp:// endpoint."),
        lambda c: c.endpoint.startswith(IPC) and not (c.pod.exporters or c.is_on_node_or_claim) and c.endpoint,
        f"{ENDPOINT} is {{}}"),
    Check(Code("SD520", "error", "An engine has no SIDESTEP_ENDPOINT",
        "The pod has an exporter, and the plugin in the engine does nothing without the variable.",
        "Set SIDESTEP_ENDPOINT in the engine's container to the exporter's --ingest.endpoint."),
        _without_endpoint, f"{ENDPOINT} is not set"),
    Check(Code("SD521", "error", "Engine and exporter have different endpoints",
        "SIDESTEP_ENDPOINT is none of the endpoints of the pod's exporter.",
        "Set both to the same endpoint."),
        lambda c: c.bound and c.endpoint and not c.has_exporter and f"{c.endpoint}, the exporter's is {', '.join(c.bound)}",
        f"{ENDPOINT} is {{}}"),
    Check(Code("SD522", "error", "Engine and exporter do not share the socket's directory",
        "Both have to mount one volume at the same path; a container without it has a directory of its own there.",
        "Mount the same `emptyDir` at the same path in both containers, with the same `subPath` or none."),
        _not_shared),
    Check(Code("SD525", "warning", "Other pods have the socket's directory, too",
        "The socket is on the node's disk or on a claim: the exporters of two pods take the path from each other.",
        "Use an `emptyDir` with `medium: Memory`."),
        lambda c: c.reached and c.socket and c.is_on_node_or_claim and f"{c.endpoint} is on volume {c.socket.volume}"),
    Check(Code("SD527", "error", "The socket is in a world-writable directory",
        "The directory of an `emptyDir` itself is world-writable, which the exporter refuses.",
        "Put the socket into a directory below the mount, such as /run/sidestep/ingest/ingest.ipc; the exporter creates it."),
        lambda c: c.reached and not c.is_on_node_or_claim and c.socket and c.socket.path.parent == PurePosixPath()
            and f"{c.endpoint} is directly in volume {c.socket.volume}"),
    Check(Code("SD528", "error", "The engine may not open the socket",
        "Engine and exporter run as different users without a common group: the directory is open to the exporter's user and to --ingest.ipc-group only.",
        "Set --ingest.ipc-group to a group that both have, by `runAsGroup`, or by the pod's `supplementalGroups` or `fsGroup`."),
        _not_permitted),
)
PLUGINS: Sequence[Check[Client]] = (
    Check(Code("SD530", "error", "PYTHONPATH does not lead to the plugin",
        "An init container copies the plugin to a volume, and the engine does not mount it, or not at a directory of its PYTHONPATH.",
        "Mount the plugin's volume in the engine's container, and set PYTHONPATH to that path."),
        lambda c: not _no_plugin(c) and _no_python_path(c)),
    Check(Code("SD531", "error", "No init container copies the plugin",
        "The engine's PYTHONPATH names a volume that is empty when the engine starts.",
        "Add the init container `sidestep-plugin`, which copies /opt/sidestep/plugin to the volume."),
        _no_plugin),
)
CONTAINERS: Sequence[Check[Sidecar]] = (
    Check(Code("SD512", "error", "The exporter is an init container that never ends",
        "An init container without `restartPolicy: Always` has to end before the engine starts, and an exporter does not end: the engine never starts.",
        "Set `restartPolicy: Always` in the exporter's container (Kubernetes 1.29 or later)."),
        _never_ends, "restartPolicy is not Always"),
    Check(Code("SD513", "warning", "The exporter may end before the engine",
        "Kubernetes stops ordinary containers together, and native sidecars in the reverse order of their start: an exporter that does not start before the engine misses its last counts.",
        "Make the exporter an init container with `restartPolicy: Always`, before the engine's."),
        lambda s: not _never_ends(s) and _ends_early(s)),
    Check(Code("SD514", "error", "The exporter refuses its settings",
        "A flag or a variable of the container is unknown or has an invalid value: the exporter ends at its start.",
        "Correct the setting; `sidestep serve --help` lists all."),
        lambda s: s.exporter.refusal),
)
SETTINGS: Sequence[Check[Sidecar]] = (
    Check(Code("SD524", "error", "The exporter cannot write a directory",
        "The socket and the state need a directory on a volume that is mounted read-write, all the more with `readOnlyRootFilesystem`.",
        "Mount an `emptyDir` there, without `readOnly`."),
        _not_writable),
    Check(Code("SD540", "error", "The exporter does not listen where its port is declared",
        "The container declares another port than --web.listen-address, or the exporter listens on 127.0.0.1, which neither Prometheus nor the kubelet reaches.",
        "Set --web.listen-address to `:PORT`, and declare the same containerPort."),
        _not_listening),
    Check(Code("SD555", "error", "A probe asks the exporter for what it does not have",
        "The probe's path does not exist, its port is not the page's, or it is the name of another container's port: the probe always fails.",
        "Ask `/-/ready` for startup and readiness and `/-/healthy` for liveness; the engine's container gives the exporter's port by number."),
        lambda s: [text for kills, text in _probes(s) if not kills]),
    Check(Code("SD556", "warning", "A liveness probe restarts a container because of a slow engine",
        "`/-/engines` fails while an engine is stalled or starts: the exporter is restarted for it, or an engine in a long prefill.",
        "Use `/-/healthy` for the exporter; for the engine see health.md: at least five minutes, with a startupProbe."),
        lambda s: [text for kills, text in _probes(s) if kills]),
    Check(Code("SD560", "warning", "The pod has too little time to terminate",
        "terminationGracePeriodSeconds has to last for the engine's own shutdown, --shutdown.linger and 2 s; after it Kubernetes kills all containers, and the last counts are lost.",
        "Raise terminationGracePeriodSeconds, or lower --shutdown.linger."),
        _no_time),
    Check(Code("SD561", "warning", "The container's memory limit is below --limits.memory-hard",
        "Kubernetes kills the exporter before it limits its own memory.",
        "Set --limits.memory-hard to 192 MiB less than the container's limit, and --limits.memory-soft below it."),
        _out_of_memory),
    Check(Code("SD562", "warning", "The state directory is not on a volume in memory or on a claim",
        "In the container's own file system it ends with the container, and its restart is a counter reset; on the node's disk each snapshot waits for the disk.",
        "Mount an `emptyDir` with `medium: Memory` there, or a claim."),
        _on_disk),
)
# fmt: on
_ROWS = codes(ENGINES, PLUGINS, CONTAINERS, SETTINGS)
CODES = sorted((reading.UNREADABLE, NOTHING, *_ROWS, *scraping.CODES))


def check(names: Sequence[str], read: Sequence[Resource | Finding]) -> Iterator[Finding]:
    """Yield what is wrong with the manifests that were read from sources of these names."""
    resources = [each for each in read if isinstance(each, Resource)]
    converted = list(pods.find(resources))
    found = [each for each in converted if isinstance(each, Pod)]
    unreadable = [each for each in (*read, *converted) if isinstance(each, Finding)]
    scaling = [*autoscaling.check(resources)]
    yield from (*unreadable, *scaling)
    if any(each.engines or each.exporters for each in found):
        # An exporter in a pod of its own may poll any engine.
        is_polled = any(one.polls for pod in found if not pod.engines for one in pod.exporters)
        for pod in found:
            yield from _pod(pod, is_polled=is_polled)
        yield from scraping.check(found, resources)
    elif not (unreadable or scaling or autoscaling.queries(resources)):
        yield NOTHING.on(", ".join(names), f"{len(resources)} resources were read")


def _pod(pod: Pod, *, is_polled: bool) -> Iterator[Finding]:
    for exporter in pod.exporters:
        checks = (*CONTAINERS, *(SETTINGS if exporter.settings else ()))
        yield from run(checks, Sidecar(pod, exporter), pod.part(exporter.container))
    for engine in pod.engines:
        client, subject = Client(pod, engine, is_polled), pod.part(engine.container)
        yield from run(ENGINES, client, subject)
        ours = [each.name for each in engine.container.env if each.name.startswith(PREFIX)]
        if ours and engine.kind != "triton":
            yield from run(PLUGINS, client, subject)
            yield from _environment(engine, subject, ours)


def _environment(engine: EngineContainer, subject: str, ours: list[str]) -> Iterator[Finding]:
    """Yield what is wrong with variables and options, as in a running engine."""
    environ, words = engine.container.variables, engine.container.words
    # Of those whose value is elsewhere, the name may be wrong as well.
    hidden = {name: "hidden" for name in ours if name not in VALUES}
    yield from run(VARIABLES, {**hidden, **environ}, subject)
    if known := {"vllm": VLLM, "sglang": SGLANG}.get(engine.kind):
        options = parse_options(words)
        # A file of options or a script's own arguments may have any.
        is_whole = engine.is_server and not {"--config", "$@"} & {*options, *words}
        checks = (*ALLOWED, *(OPTIONS if is_whole else ()))
        yield from run(checks, Start(known, environ, options), subject)
