"""Check of the exporter's container: whether it runs for as long as the engine, its probes, memory and state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from sidestep.config.settings import Config
from sidestep.diagnosis.finding import Code, Finding
from sidestep.doctor.manifests.pods import ENDPOINT, IPC, Container, Exporter, Pod, Probe

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
SNAPSHOT_SECONDS = 2
"""Seconds that the exporter needs at most after its linger."""
HANG_SECONDS = 300
"""Shortest time after which a liveness probe may take a silent engine for a dead one."""
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

NOT_OBSERVED = Code(
    "SD510",
    "warning",
    "The pod of an engine has no exporter",
    "The pod has neither an exporter nor SIDESTEP_ENDPOINT, so the engine's metrics come from its own page alone.",
    "Add the component of deploy/kustomize or the chart's templates to the workload, or label one that is no"
    ' engine `sidestep/inject: "false"`.',
)
NO_EXPORTER = Code(
    "SD511",
    "error",
    "An engine sends to an exporter that its pod does not have",
    "SIDESTEP_ENDPOINT is an ipc:// path, which only reaches a process in the same pod, and the pod has no"
    " exporter.",
    "Add the exporter's container to the pod, or give a tcp:// endpoint.",
)
NEVER_ENDS = Code(
    "SD512",
    "error",
    "The exporter is an init container that never ends",
    "An init container without `restartPolicy: Always` has to end before the engine starts, and an exporter does"
    " not end: the engine never starts.",
    "Set `restartPolicy: Always` in the exporter's container (Kubernetes 1.29 or later).",
)
ENDS_EARLY = Code(
    "SD513",
    "warning",
    "The exporter may end before the engine",
    "Kubernetes stops ordinary containers together, and native sidecars in the reverse order of their start, so an"
    " exporter that is not started before the engine misses its last counts.",
    "Make the exporter an init container with `restartPolicy: Always`, before the engine's.",
)
REFUSED = Code(
    "SD514",
    "error",
    "The exporter refuses its settings",
    "A flag or a SIDESTEP_ variable of the container is unknown or has an invalid value: the exporter ends at its"
    " start.",
    "Correct the setting; `sidestep serve --help` lists all.",
)
NOT_WRITABLE = Code(
    "SD524",
    "error",
    "The exporter cannot write a directory",
    "The socket and the state need a directory on a volume that is mounted read-write, the more so with"
    " `readOnlyRootFilesystem`.",
    "Mount an `emptyDir` there, without `readOnly`.",
)
NOT_LISTENING = Code(
    "SD540",
    "error",
    "The exporter does not listen where its port is declared",
    "The container declares another port than that of --web.listen-address, or the exporter listens on 127.0.0.1,"
    " which neither Prometheus nor the kubelet reaches.",
    "Set --web.listen-address to `:PORT`, and declare the same containerPort.",
)
WRONG_PROBE = Code(
    "SD555",
    "error",
    "A probe asks the exporter for what it does not have",
    "The probe's port is not the page's, is the name of another container's port, or its path does not exist: it"
    " fails for ever.",
    "Ask `/-/ready` for startup and readiness and `/-/healthy` for liveness, at the exporter's port; the engine's"
    " container gives the port by number.",
)
KILLS = Code(
    "SD556",
    "warning",
    "A liveness probe restarts a container because of a slow engine",
    "`/-/engines` fails while an engine is stalled or starts: the exporter is restarted for it, or an engine in a"
    " long prefill.",
    "Use `/-/healthy` for the exporter; for the engine see health.md: at least five minutes, with a startupProbe.",
)
NO_TIME = Code(
    "SD560",
    "warning",
    "The pod has too little time to terminate",
    "terminationGracePeriodSeconds has to last for the engine's own shutdown, --shutdown.linger and 2 s; after it"
    " Kubernetes kills all containers, and the last counts are lost.",
    "Raise terminationGracePeriodSeconds, or lower --shutdown.linger.",
)
OUT_OF_MEMORY = Code(
    "SD561",
    "warning",
    "The container's memory limit is below --limits.memory-hard",
    "Kubernetes kills the exporter before it limits its own memory.",
    "Set --limits.memory-hard to three quarters of the container's limit, and --limits.memory-soft below it.",
)
STATE_IN_CONTAINER = Code(
    "SD562",
    "warning",
    "The state directory is on no volume",
    "--state.dir is in the container's own file system, so a restart of the container is a counter reset.",
    "Mount a volume there, such as an `emptyDir` with `medium: Memory`.",
)
STATE_ON_DISK = Code(
    "SD563",
    "info",
    "The state directory is on the node's disk",
    "The `emptyDir` of --state.dir has no `medium: Memory`, so each snapshot waits for the node's disk.",
    "Set `medium: Memory`; the state does not outlive the pod in either case.",
)
SHARED_STATE = Code(
    "SD564",
    "error",
    "Several exporters have one state directory",
    "A state directory belongs to one exporter; replicas, pods or containers overwrite each other's counters.",
    "Give each its own: `volumeClaimTemplates`, an `emptyDir`, or one replica.",
)
ONE_PER_NODE = Code(
    "SD566",
    "info",
    "With hostNetwork only one such pod fits on a node",
    "The exporter's port is the node's, so a second pod with the same port does not start there.",
    "Give each such workload its own --web.listen-address, or run one pod per node.",
)
CODES = (
    NOT_OBSERVED, NO_EXPORTER, NEVER_ENDS, ENDS_EARLY, REFUSED, NOT_WRITABLE, NOT_LISTENING, WRONG_PROBE, KILLS,
    NO_TIME, OUT_OF_MEMORY, STATE_IN_CONTAINER, STATE_ON_DISK, SHARED_STATE, ONE_PER_NODE,
)  # fmt: skip


def check(pods: list[Pod]) -> Iterator[Finding]:
    """Yield what is wrong with the exporters' containers, and the engines without one."""
    polled = any(one.polls for pod in pods if not pod.engines for one in pod.exporters)
    for pod in pods:
        if not pod.exporters:
            yield from _without_exporter(pod, polled=polled)
        for exporter in pod.exporters:
            if exporter.refusal:
                yield REFUSED.on(pod.subject, _of(exporter.container, exporter.refusal))
            yield from _order(pod, exporter)
            if exporter.settings is not None:
                yield from _settings(pod, exporter, exporter.settings)
    yield from _shared_state(pods)
    yield from _host_ports(pods)


def _of(container: Container, text: str) -> str:
    return f"container {container.name}: {text}"


def _without_exporter(pod: Pod, *, polled: bool) -> Iterator[Finding]:
    for engine, _ in pod.engines.values():
        endpoint = engine.variables.get(ENDPOINT, "")
        if endpoint.startswith(IPC):
            found = pod.location(engine, endpoint.removeprefix(IPC))
            volume = found and pod.volume(found.volume)
            if not volume or not (volume.host_path or volume.persistent_volume_claim):
                yield NO_EXPORTER.on(pod.subject, _of(engine, f"{ENDPOINT} is {endpoint}"))
        elif not engine.has(ENDPOINT) and not polled:
            yield NOT_OBSERVED.on(pod.subject, _of(engine, "nothing of sidestep is in its pod"))


def _order(pod: Pod, exporter: Exporter) -> Iterator[Finding]:
    container, running = exporter.container, pod.running
    is_init = container in pod.spec.init_containers
    if is_init and container.restart_policy != "Always":
        yield NEVER_ENDS.on(pod.subject, _of(container, "restartPolicy is not Always"))
        return
    for engine, _ in pod.engines.values():
        if is_init and running.index(container) > running.index(engine):
            yield ENDS_EARLY.on(pod.subject, _of(container, f"it is after {engine.name}"))
        elif not is_init:
            yield ENDS_EARLY.on(pod.subject, _of(container, "it is an ordinary container"))


def _settings(pod: Pod, exporter: Exporter, settings: Config) -> Iterator[Finding]:
    container = exporter.container
    yield from _ports(pod, exporter, settings)
    yield from _probes(pod, exporter, settings)
    yield from _directories(pod, container, settings)
    needed = SNAPSHOT_SECONDS + (settings.shutdown_linger if exporter.page_ports else 0)
    if container in pod.spec.init_containers:
        needed += max((_shutdown(engine) for engine, _ in pod.engines.values()), default=0)
    if (given := pod.spec.termination_grace_period_seconds) < needed:
        text = f"terminationGracePeriodSeconds is {given}, and {needed:g} s are needed"
        yield NO_TIME.on(pod.subject, text)
    limit, hard = _bytes(container.resources.limits.get("memory")), settings.limits_memory_hard
    if limit is not None and hard * UNITS["Mi"] > limit:
        text = f"its limit is {limit / UNITS['Mi']:.0f} MiB, --limits.memory-hard is {hard}"
        yield OUT_OF_MEMORY.on(pod.subject, _of(container, text))


def _ports(pod: Pod, exporter: Exporter, settings: Config) -> Iterator[Finding]:
    container, listening = exporter.container, exporter.page_ports
    ingest = {int(each.rpartition(":")[2]) for each in _tcp(settings)}
    declared = {each.container_port for each in container.ports} - ingest
    hosts = {host for host, _ in settings.web_listen_address}
    if declared and not declared & listening:
        where = ", ".join(map(str, sorted(listening))) or "no port"
        text = f"it declares {', '.join(map(str, sorted(declared)))} and listens on {where}"
        yield NOT_LISTENING.on(pod.subject, _of(container, text))
    elif hosts and hosts <= LOOPBACK:
        yield NOT_LISTENING.on(pod.subject, _of(container, f"it listens on {min(hosts)} only"))


def _tcp(settings: Config) -> list[str]:
    return [
        each
        for each in settings.ingest_endpoint
        if each.startswith("tcp://") and each.rpartition(":")[2].isdecimal()
    ]


def _probes(pod: Pod, exporter: Exporter, settings: Config) -> Iterator[Finding]:
    own = {each.name for each in exporter.container.ports}
    page = settings.web_telemetry_path.rstrip("/")
    known = {"/", "/-/healthy", "/-/ready", settings.web_telemetry_path, f"{page}/pod"}
    engines = [engine for engine, _ in pod.engines.values()]
    for container in (exporter.container, *engines):
        is_own = container is exporter.container
        for name, probe in _http_probes(container):
            asked = probe.http_get
            assert asked is not None
            path = asked.path.partition("?")[0]
            is_known = path in known or path.startswith(("/-/engines", "/api/v1/"))
            port = asked.port
            asks_page = port in exporter.page_ports or (is_own and port in own)
            if not is_own and not asks_page:
                wrong = port in own - {each.name for each in container.ports}
            else:
                wrong = not asks_page or not is_known
            where = f"{name}Probe asks {asked.path} at port {asked.port}"
            if wrong:
                yield WRONG_PROBE.on(pod.subject, _of(container, where))
            elif name == "liveness" and path.startswith("/-/engines"):
                is_patient = (
                    container.startup_probe is not None
                    and probe.period_seconds * probe.failure_threshold >= HANG_SECONDS
                )
                if asks_page and (is_own or not is_patient):
                    yield KILLS.on(pod.subject, _of(container, where))


def _http_probes(
    container: Container,
) -> Iterator[tuple[Literal["startup", "liveness", "readiness"], Probe]]:
    if (found := container.startup_probe) and found.http_get:
        yield "startup", found
    if (found := container.liveness_probe) and found.http_get:
        yield "liveness", found
    if (found := container.readiness_probe) and found.http_get:
        yield "readiness", found


def _directories(pod: Pod, container: Container, settings: Config) -> Iterator[Finding]:
    is_fixed = container.security_context.read_only_root_filesystem
    sockets = [each for each in settings.ingest_endpoint if each.startswith(IPC)]
    for endpoint in sockets:
        found = pod.location(container, endpoint.removeprefix(IPC))
        if found.read_only if found else is_fixed and not pod.engines:
            yield NOT_WRITABLE.on(pod.subject, _of(container, f"the directory of {endpoint}"))
    if not settings.state_dir:
        return
    state = pod.location(container, settings.state_dir)
    volume = pod.volume(state.volume) if state else None
    text = _of(container, f"--state.dir is {settings.state_dir}")
    if state.read_only if state else is_fixed:
        yield NOT_WRITABLE.on(pod.subject, text)
    elif state is None:
        yield STATE_IN_CONTAINER.on(pod.subject, text)
    elif volume and volume.empty_dir is not None and volume.empty_dir.get("medium") != "Memory":
        yield STATE_ON_DISK.on(pod.subject, f"{text} on volume {volume.name}")


def _shutdown(engine: Container) -> float:
    """Return the seconds that vLLM's flag gives requests in flight."""
    found = re.search(r"--shutdown[-_]timeout[ =](\d+)", " ".join(engine.words))
    return float(found[1]) if found else 0.0


def _bytes(quantity: float | str | None) -> float | None:
    found = re.fullmatch(r"([\d.]+)(\D*)", str(quantity))
    return float(found[1]) * UNITS[found[2]] if found and found[2] in UNITS else None


def _shared_state(pods: Iterable[Pod]) -> Iterator[Finding]:
    seen: dict[tuple[object, ...], str] = {}
    for number, pod in enumerate(pods):
        for exporter in pod.exporters:
            state_dir = exporter.settings.state_dir if exporter.settings else ""
            found = pod.location(exporter.container, state_dir) if state_dir else None
            volume = pod.volume(found.volume) if found else None
            if found is None or volume is None:
                continue
            claim = volume.persistent_volume_claim
            holder = (number, volume.name) if claim is None else (claim.get("claimName"),)
            key = (pod.namespace, *holder, found.path)
            if claim is not None and pod.replicas > 1:
                text = f"{pod.replicas} replicas use the claim {claim.get('claimName')}"
                yield SHARED_STATE.on(pod.subject, text)
            elif key in seen:
                text = f"{state_dir} on volume {volume.name} is also that of {seen[key]}"
                yield SHARED_STATE.on(pod.subject, text)
            seen[key] = f"{pod.subject}, container {exporter.container.name}"


def _host_ports(pods: Iterable[Pod]) -> Iterator[Finding]:
    seen: dict[int, str] = {}
    for pod in pods:
        for port in {p for each in pod.exporters for p in each.page_ports if pod.spec.host_network}:
            if pod.replicas > 1:
                yield ONE_PER_NODE.on(pod.subject, f"{pod.replicas} replicas use port {port}")
            elif port in seen:
                yield ONE_PER_NODE.on(pod.subject, f"port {port} is also that of {seen[port]}")
            seen[port] = pod.subject
