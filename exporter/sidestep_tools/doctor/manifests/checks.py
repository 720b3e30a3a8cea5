"""Tables of the checks of manifests, and the functions that their rows name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from sidestep.config.variables import PREFIX
from sidestep.diagnosis.finding import Code, Finding
from sidestep.transport.addresses import IPC
from sidestep_tools.doctor import environment
from sidestep_tools.doctor.checks import Check, codes, run
from sidestep_tools.doctor.manifests import pods, reading
from sidestep_tools.doctor.manifests.containers import Container, Place, Probe
from sidestep_tools.doctor.manifests.pods import ENDPOINT, Engine, Exporter, Pod
from sidestep_tools.doctor.manifests.reading import Resource

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
SNAPSHOT_SECONDS = 2
"""Most seconds that the exporter needs after its linger."""
HANG_SECONDS = 300
"""Fewest seconds without progress before a liveness probe may restart an engine."""
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
PLUGIN = "/opt/sidestep/plugin"
"""Directory of the exporter's image that has the plugin."""
NOTHING = Code("SD502", "info", "The manifests have neither an engine nor an exporter",
    "No container runs vLLM, SGLang, Triton or `sidestep serve`.",
    "Give the manifests of the engines' pods, such as `kubectl get deploy,sts -o yaml | sidestep doctor --manifest -`.")  # fmt: skip


def _not_observed(engine: Engine) -> str:
    container = engine.container
    if engine.pod.exporters or any(each.name == ENDPOINT for each in container.env):
        return ""
    return f"{ENDPOINT} is not set{', unless by envFrom' if container.env_from else ''}"


def _without_endpoint(engine: Engine) -> bool:
    container, exporters = engine.container, engine.pod.exporters
    is_polled = engine.kind == "triton" or any(each.polls for each in exporters)
    is_set = container.env_from or any(each.name == ENDPOINT for each in container.env)
    return bool(engine.bound) and not (is_set or is_polled)


def _not_shared(engine: Engine) -> str:
    exporter = engine.bound.get(engine.endpoint)
    if exporter is None or engine.reached or not engine.endpoint.startswith(IPC):
        return ""
    both = (engine.socket, exporter.container.place(engine.endpoint))
    here, there = (f"on volume {each.volume}" if each else "on no volume" for each in both)
    return f"{engine.endpoint} is {here}, in the exporter {there}"


def _not_permitted(engine: Engine) -> str:
    """Return why the engine's user cannot open the socket; empty if an image decides on the user."""
    pod, exporter = engine.pod, engine.reached
    group = exporter.settings.ingest_ipc_group if exporter else ""
    if exporter is None or (group and not group.isdecimal()):
        return ""
    user, own = pod.user(engine.container), pod.user(exporter.container)
    if group and own and int(group) not in pod.groups(exporter.container):
        return f"the exporter is not in its --ingest.ipc-group {group}"
    if None in (user, own) or own == user or (group and int(group) in pod.groups(engine.container)):
        return ""
    return f"it runs as {user} and the exporter as {own}{group and f', without the group {group}'}"


def _python_path(engine: Engine) -> tuple[str, list[Place]]:
    """Return the engine's PYTHONPATH, and the places of its parts."""
    path = engine.container.variables.get("PYTHONPATH", "")
    return path, [found for each in path.split(":") if (found := engine.container.place(each))]


def _others(engine: Engine) -> list[Container]:
    spec = engine.pod.spec
    return [e for e in (*spec.init_containers, *spec.containers) if e is not engine.container]


def _no_plugin(engine: Engine) -> str:
    path, here = _python_path(engine)
    mounted = {one.name for each in _others(engine) for one in each.volume_mounts}
    volumes = [volume for each in here if (volume := engine.pod.volume(each))]
    empty = [e.name for e in volumes if e.empty_dir is not None and e.name not in mounted]
    return f"PYTHONPATH is {path}, and volume {empty[0]} is empty" if empty else ""


def _no_python_path(engine: Engine) -> str:
    """Return the PYTHONPATH if it does not lead to a copied plugin; empty if nothing copies one."""
    path, here = _python_path(engine)
    copies = [each for each in _others(engine) if any(PLUGIN in word for word in each.words)]
    filled = [found for each in copies for word in each.words if (found := each.place(word))]
    is_there = any(each in filled for each in here)
    return f"PYTHONPATH is {path or 'not set'}" if filled and not is_there else ""


def _never_ends(exporter: Exporter) -> bool:
    container = exporter.container
    return container in exporter.pod.spec.init_containers and container.restart_policy != "Always"


def _ends_early(exporter: Exporter) -> list[str]:
    pod, container = exporter.pod, exporter.container
    engines = [each.container for each in pod.engines]
    if container not in pod.spec.init_containers:
        return ["it is an ordinary container"] * bool(engines)
    before = pod.running[: pod.running.index(container)]
    return [f"it is after {each.name}" for each in engines if each in before]


def _not_writable(exporter: Exporter) -> list[str]:
    pod, settings, found = exporter.pod, exporter.settings, list[str]()
    # If the pod has an engine, SD522 is the finding on a missing mount.
    for each in (each for each in settings.ingest_endpoint if each.startswith(IPC)):
        at = exporter.container.place(each)
        if at.mount.read_only if at else exporter.is_read_only and not pod.engines:
            found.append(f"the directory of {each}")
    at = exporter.container.place(settings.state_dir) if settings.state_dir else None
    if settings.state_dir and (at.mount.read_only if at else exporter.is_read_only):
        found.append(f"--state.dir is {settings.state_dir}")
    return found


def _not_listening(exporter: Exporter) -> str:
    listening = exporter.page_ports
    declared = {e.container_port for e in exporter.container.ports} - exporter.ingest_ports
    hosts = {host for host, _ in exporter.settings.web_listen_address}
    if declared and not declared & listening:
        ports = [", ".join(map(str, sorted(each))) or "none" for each in (declared, listening)]
        return f"it declares port {ports[0]} and listens on {ports[1]}"
    return f"it listens on {min(hosts)} only" if hosts and hosts <= LOOPBACK else ""


def _probes(exporter: Exporter) -> Iterator[tuple[bool, str]]:
    """Yield the probes that always fail (False), and those that restart because of a slow engine (True)."""
    page = exporter.settings.web_telemetry_path
    served = {"/", "/-/healthy", "/-/ready", page, f"{page.rstrip('/')}/pod"}
    names = {each.name for each in exporter.container.ports if each.name}
    for container in (exporter.container, *(each.container for each in exporter.pod.engines)):
        own = container is exporter.container
        others = set() if own else names - {each.name for each in container.ports}
        for kind in ("startup", "liveness", "readiness"):
            probe: Probe | None = getattr(container, f"{kind}_probe")
            if probe is None or probe.http_get is None:
                continue
            port, path = probe.http_get.port, probe.http_get.path.partition("?")[0]
            asks_page = port in exporter.page_ports or (own and port in names)
            asks_engines = path.startswith("/-/engines")
            is_served = asks_engines or path in served or path.startswith("/api/v1/")
            text = f"{kind}Probe of {container.name} asks {path} at port {port}"
            if (asks_page and not is_served) or (own and not asks_page) or port in others:
                yield False, text
            elif asks_page and asks_engines and kind == "liveness":
                seconds = probe.period_seconds * probe.failure_threshold
                if own or seconds < HANG_SECONDS or container.startup_probe is None:
                    yield True, f"{text}, for {seconds} s"


def _no_time(exporter: Exporter) -> str:
    pod = exporter.pod
    needed = SNAPSHOT_SECONDS + (exporter.settings.shutdown_linger if exporter.page_ports else 0.0)
    if exporter.container in pod.spec.init_containers:
        # With --shutdown-timeout vLLM waits for requests in flight.
        options = [environment.parse_options(each.container.words) for each in pod.engines]
        given = [each.get("--shutdown-timeout", "") for each in options]
        needed += max((float(each) for each in given if each.isdecimal()), default=0.0)
    grace = pod.spec.termination_grace_period_seconds
    text = f"terminationGracePeriodSeconds is {grace}, {needed:g} s are needed"
    return text if grace < needed else ""


def _out_of_memory(exporter: Exporter) -> str:
    limit = exporter.container.resources.get("limits", {}).get("memory")
    quantity = re.fullmatch(r"(\d+\.?\d*)(\D*)", str(limit))
    hard = exporter.settings.limits_memory_hard
    if quantity and hard * UNITS["Mi"] > float(quantity[1]) * UNITS.get(quantity[2], UNITS["Gi"]):
        return f"its limit is {limit}, --limits.memory-hard is {hard} MiB"
    return ""


def _on_disk(exporter: Exporter) -> str:
    named = exporter.settings.state_dir
    at = exporter.container.place(named) if named else None
    if not named or (at.mount.read_only if at else exporter.is_read_only):
        return ""
    if at is None:
        return f"--state.dir is {named}, on no volume"
    volume = exporter.pod.volume(at)
    if volume is None or volume.empty_dir is None or volume.empty_dir.get("medium") == "Memory":
        return ""
    return f"--state.dir is {named}, and the emptyDir {volume.name} is on the node's disk"


# fmt: off
ALONE: Sequence[Check[Engine]] = (
    Check(Code("SD510", "warning", "The pod of an engine has no exporter",
        "It has neither an exporter nor SIDESTEP_ENDPOINT.",
        'Run `sidestep inject`, or label a workload that is no engine `sidestep/inject: "false"`.'),
        _not_observed),
)
ENGINES: Sequence[Check[Engine]] = (
    Check(Code("SD511", "error", "An engine sends to an exporter that its pod does not have",
        "SIDESTEP_ENDPOINT is an ipc:// path, which only reaches the same pod.",
        "Add the exporter's container to the pod, or give a tcp:// endpoint."),
        lambda e: e.endpoint.startswith(IPC) and not (e.pod.exporters or e.is_on_node_or_claim) and e.endpoint,
        f"{ENDPOINT} is {{}}"),
    Check(Code("SD520", "error", "An engine has no SIDESTEP_ENDPOINT",
        "The plugin does nothing without it.",
        "Set SIDESTEP_ENDPOINT in the engine's container to the exporter's --ingest.endpoint."),
        _without_endpoint, f"{ENDPOINT} is not set"),
    Check(Code("SD521", "error", "Engine and exporter have different endpoints",
        "SIDESTEP_ENDPOINT is none of the endpoints of the pod's exporter.",
        "Set both to the same endpoint."),
        lambda e: e.bound and e.endpoint and not e.has_exporter and f"{e.endpoint}, the exporter's is {', '.join(e.bound)}",
        f"{ENDPOINT} is {{}}"),
    Check(Code("SD522", "error", "Engine and exporter do not share the socket's directory",
        "Both have to mount one volume at the same path; a container without it has a directory of its own there.",
        "Mount the same `emptyDir` at the same path in both containers, with the same `subPath` or none."),
        _not_shared),
    Check(Code("SD525", "warning", "Other pods have the socket's directory, too",
        "The socket is on the node's disk or on a claim: the exporters of two pods take the path from each other.",
        "Use an `emptyDir` with `medium: Memory`."),
        lambda e: e.reached and e.socket and e.is_on_node_or_claim and f"{e.endpoint} is on volume {e.socket.volume}"),
    Check(Code("SD527", "error", "The socket is in a world-writable directory",
        "The directory of an `emptyDir` itself is world-writable, which the exporter refuses.",
        "Put the socket into a directory below the mount, such as /run/sidestep/ingest/ingest.ipc; the exporter creates it."),
        lambda e: e.reached and not e.is_on_node_or_claim and e.socket and e.socket.path.parent == PurePosixPath()
            and f"{e.endpoint} is directly in volume {e.socket.volume}"),
    Check(Code("SD528", "error", "The engine may not open the socket",
        "They run as different users without a common group, and only the exporter's user and --ingest.ipc-group may enter the directory.",
        "Set --ingest.ipc-group to a group that both have, by `runAsGroup`, or by the pod's `supplementalGroups` or `fsGroup`."),
        _not_permitted),
)
PLUGINS: Sequence[Check[Engine]] = (
    Check(Code("SD530", "error", "PYTHONPATH does not lead to the plugin",
        "An init container copies the plugin to a volume, and the engine does not mount it, or not at a directory of its PYTHONPATH.",
        "Mount the plugin's volume in the engine's container, and set PYTHONPATH to that path."),
        lambda e: not _no_plugin(e) and _no_python_path(e)),
    Check(Code("SD531", "error", "No init container copies the plugin",
        "The engine's PYTHONPATH names a volume that is empty when the engine starts.",
        "Add the init container `sidestep-plugin`, which copies /opt/sidestep/plugin to the volume."),
        _no_plugin),
)
CONTAINERS: Sequence[Check[Exporter]] = (
    Check(Code("SD512", "error", "The exporter is an init container that never ends",
        "An exporter does not end, and the engine starts only after an init container without `restartPolicy: Always` has ended.",
        "Set `restartPolicy: Always` in the exporter's container (Kubernetes 1.29 or later)."),
        _never_ends, "restartPolicy is not Always"),
    Check(Code("SD513", "warning", "The exporter may end before the engine",
        "Kubernetes stops native sidecars after other containers, in the reverse order of their start; this exporter may miss the engine's last counts.",
        "Make the exporter an init container with `restartPolicy: Always`, before the engine's."),
        lambda e: not _never_ends(e) and _ends_early(e)),
    Check(Code("SD514", "error", "The exporter refuses its settings",
        "A flag or a variable is unknown or has an invalid value: the exporter ends at its start.",
        "Correct the setting; `sidestep serve --help` lists all."),
        lambda e: e.refusal),
)
SETTINGS: Sequence[Check[Exporter]] = (
    Check(Code("SD524", "error", "The exporter cannot write a directory",
        "Socket and state need a volume that is mounted read-write, in particular with `readOnlyRootFilesystem`.",
        "Mount an `emptyDir` there, without `readOnly`."),
        _not_writable),
    Check(Code("SD540", "error", "The exporter does not listen where its port is declared",
        "The container declares another port than --web.listen-address, or the exporter listens on 127.0.0.1, which neither Prometheus nor the kubelet reaches.",
        "Set --web.listen-address to `:PORT`, and declare the same containerPort."),
        _not_listening),
    Check(Code("SD555", "error", "A probe asks the exporter for what it does not have",
        "The probe's path or port is not the exporter's, or it names another container's port: the probe always fails.",
        "Ask `/-/ready` for startup and readiness and `/-/healthy` for liveness; a probe of the engine's container names the exporter's port by number."),
        lambda e: [text for kills, text in _probes(e) if not kills]),
    Check(Code("SD556", "warning", "A liveness probe restarts a container because of a slow engine",
        "`/-/engines` fails while an engine is stalled or starts. The probe then restarts the exporter, or an engine that is in a long prefill.",
        "Use `/-/healthy` for the exporter; for the engine see health.md: at least five minutes, with a startupProbe."),
        lambda e: [text for kills, text in _probes(e) if kills]),
    Check(Code("SD560", "warning", "The pod has too little time to terminate",
        "terminationGracePeriodSeconds has to last for the engine's own shutdown, --shutdown.linger and 2 s, or the last counts are lost.",
        "Raise terminationGracePeriodSeconds, or lower --shutdown.linger."),
        _no_time),
    Check(Code("SD561", "warning", "The container's memory limit is below --limits.memory-hard",
        "Kubernetes kills the exporter before it limits its own memory.",
        "Set --limits.memory-hard to 192 MiB less than the container's limit, and --limits.memory-soft below it."),
        _out_of_memory),
    Check(Code("SD562", "warning", "The state directory is not on a volume in memory or on a claim",
        "In the container's own file system it is lost when the container restarts. On the node's disk, each snapshot waits for the disk.",
        "Mount an `emptyDir` with `medium: Memory` there, or a claim."),
        _on_disk),
)
# fmt: on
CODES = sorted((reading.UNREADABLE, NOTHING, *codes(ALONE, ENGINES, PLUGINS, CONTAINERS, SETTINGS)))


def check(sources: Sequence[str]) -> Iterator[Finding]:
    """Yield what is wrong with the manifests in files, directories and standard input (``-``)."""
    read = list(reading.read_all(sources))
    resources = [each for each in read if isinstance(each, Resource)]
    converted = list(pods.find(resources))
    found = [each for each in converted if isinstance(each, Pod)]
    unreadable = [each for each in (*read, *converted) if isinstance(each, Finding)]
    yield from unreadable
    # An exporter in a pod of its own may poll any engine.
    is_polled = any(one.polls for pod in found if not pod.engines for one in pod.exporters)
    for pod in found:
        yield from _pod(pod, is_polled=is_polled)
    if not (unreadable or any(each.engines or each.exporters for each in found)):
        yield NOTHING.on(", ".join(sources), f"{len(resources)} resources were read")


def _pod(pod: Pod, *, is_polled: bool) -> Iterator[Finding]:
    for exporter in pod.exporters:
        checks = (*CONTAINERS, *(SETTINGS if exporter.config else ()))
        yield from run(checks, exporter, f"{pod.subject}, container {exporter.container.name}")
    for engine in pod.engines:
        subject = f"{pod.subject}, container {engine.container.name}"
        yield from run((*(() if is_polled else ALONE), *ENGINES), engine, subject)
        ours = [each.name for each in engine.container.env if each.name.startswith(PREFIX)]
        if ours and engine.kind != "triton":
            yield from run(PLUGINS, engine, subject)
            yield from _environment(engine, subject, ours)


def _environment(engine: Engine, subject: str, ours: list[str]) -> Iterator[Finding]:
    environ, words = engine.container.variables, engine.container.words
    # A variable whose value is not in the manifest may have a wrong name, too.
    hidden = {name: "hidden" for name in ours if name not in environment.VALUES}
    yield from run(environment.VARIABLES, {**hidden, **environ}, subject)
    if known := {"vllm": environment.VLLM, "sglang": environment.SGLANG}.get(engine.kind):
        options = environment.parse_options(words)
        # Further options may be in a file, or in the arguments of a script.
        is_whole = engine.is_server and not {"--config", "$@"} & {*options, *words}
        checks = (*environment.ALLOWED, *(environment.OPTIONS if is_whole else ()))
        yield from run(checks, environment.Start(known, environ, options), subject)
