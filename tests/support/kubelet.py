"""A small stand-in of the kubelet: it runs the containers of a rendered pod by podman and runc, as root.

It has init containers in order, native sidecars with their startup probes, restarts with back-off, liveness
probes over HTTP, limits, user ids, read-only root file systems, emptyDir volumes, and the order of
termination. It has no readiness probes, since nothing here depends on them, and it evicts no pod.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Resource = dict[str, Any]
CONF = """
[containers]
default_ulimits = []
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""
"""Without ulimits, which root may lack the capability to raise; crun fails where both versions of cgroups are mounted."""
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@dataclasses.dataclass(frozen=True)
class Image:
    """An unpacked image."""

    root: Path
    environ: Sequence[str]
    entrypoint: Sequence[str]
    command: Sequence[str]
    user: str
    mounts: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    folder: str = "/"


def options(container: Resource, pod: Resource, fields: Mapping[str, str]) -> Iterator[str]:
    """Yield the options that follow from the manifest: limits, privileges and variables.

    ``fields`` are the values of the downward API.
    """
    own = container.get("securityContext", {})
    limits = container.get("resources", {}).get("limits", {})
    for group in pod.get("securityContext", {}).get("supplementalGroups", []):
        yield f"--group-add={group}"
    if own.get("readOnlyRootFilesystem"):
        yield "--read-only"
    for name in own.get("capabilities", {}).get("drop", []):
        yield f"--cap-drop={name}"
    if own.get("allowPrivilegeEscalation") is False:
        yield "--security-opt=no-new-privileges"
    if "memory" in limits:
        memory = int(quantity(limits["memory"]))
        yield from (f"--memory={memory}", f"--memory-swap={memory}")
    if "cpu" in limits:
        yield f"--cpus={quantity(limits['cpu']):g}"
    for variable in container.get("env", []):
        value = variable.get("value")
        if value is None:
            value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        yield f"--env={variable['name']}={value}"


def arguments(container: Resource, image: Image) -> Iterator[str]:
    """Yield the rest of the command line: what the image has, its root, and the command in it."""
    own = container.get("securityContext", {})
    user, _, group = image.user.partition(":")
    yield f"--user={own.get('runAsUser', user)}:{own.get('runAsGroup', group)}"
    yield from ("--no-hosts", "--http-proxy=false", "--log-driver=passthrough")
    yield from ("--read-only-tmpfs=false", f"--workdir={image.folder}")
    named = {variable["name"] for variable in container.get("env", [])}
    for pair in image.environ:
        if pair.partition("=")[0] not in named:
            yield f"--env={pair}"
    for path, target in image.mounts.items():
        yield f"--volume={path}:{target}"
    yield from ("--rootfs", str(image.root), *container.get("command", image.entrypoint))
    yield from container.get("args", [] if "command" in container else image.command)


def quantity(text: str) -> float:
    """Return the number of a quantity such as 250m or 64Mi."""
    if text.endswith("m"):
        return float(text[:-1]) / 1000
    return float(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else float(text)


TICK = 0.1
BACKOFF, MAX_BACKOFF = 10.0, 300.0
"""Seconds before the second restart, which double until the most; the first restart is immediate."""
SIDECAR_GRACE = 2.0
"""Least seconds that a sidecar gets to end, however long the main containers took."""
MAX_EXITS = 2
"""Most times that a sidecar may end before it has started, as on a machine that is too busy for its startup probe."""
START = 300.0
"""Most seconds until the pod has started."""
NETWORK = """
ip netns add {name}
ip link add {link}a type veth peer name {link}b netns {name}
ip addr add {host}/31 dev {link}a
ip link set {link}a up
ip -n {name} addr add {pod}/31 dev {link}b
ip -n {name} link set {link}b up
ip -n {name} link set lo up
"""
_numbers = itertools.count(1)


class Container:
    """One container of a pod: its process, its probes and its restarts.

    Attributes:
        starts: Monotonic times at which its processes started.
        exits: Exit codes of its processes, in order; a signal counts as 128 and its number.
    """

    def __init__(self, pod: Pod, spec: Resource) -> None:
        self.spec, self.name = spec, str(spec["name"])
        self.log, self.pidfile = (pod.folder / f"{self.name}.{end}" for end in ("log", "pid"))
        self.starts: list[float] = []
        self.exits: list[int] = []
        self.started = self._terminated = False
        self._pod = pod
        self._process: subprocess.Popen[bytes] | None = None
        self._restart_at = self._probe_at = 0.0
        self._failures = 0
        self._kill_at = float("inf")
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        """True if a process runs; the exit code of one that has ended is recorded."""
        with self._lock:
            if self._process is not None and (code := self._process.poll()) is not None:
                self._process = None
                self.exits.append(code)
            return self._process is not None

    @property
    def pid(self) -> int:
        """Id of its first process; 0 if none runs yet."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(self.pidfile.read_text()) if self.running else 0
        return 0

    def run(self) -> None:
        """Start a process of the container."""
        self.pidfile.unlink(missing_ok=True)
        self.starts.append(time.monotonic())
        self._failures, self._probe_at, self._kill_at = 0, 0.0, float("inf")
        self.started = "startupProbe" not in self.spec
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._pod.command(self, len(self.starts)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "CONTAINERS_CONF": str(self._pod.folder / "containers.conf")},
            )

    def signal(self, number: int) -> None:
        """Send a signal to the container's first process, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            if pid := self.pid:
                os.kill(pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, once: a second one stops an exporter at once."""
        if not self._terminated:
            self._terminated = True
            self.signal(signal.SIGTERM)

    def stop(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL unless the process ends in time; it is not started again."""
        self.terminate()
        if not until(lambda: not self.running, grace):
            self.signal(signal.SIGKILL)
            until(lambda: not self.running, START)

    def sync(self) -> None:
        """Start a process that has ended again, and probe one that runs."""
        now = time.monotonic()
        if self.running:
            if now >= self._kill_at:
                self.signal(signal.SIGKILL)
            elif now >= self._probe_at:
                self._probe(now)
        elif not self._restart_at:
            restarts = len(self.exits)
            delay = 0.0 if restarts == 1 else BACKOFF * 2.0 ** (restarts - 2)
            self._restart_at = now + min(delay, MAX_BACKOFF)
        elif now >= self._restart_at:
            self._restart_at = 0.0
            self.run()

    def _probe(self, now: float) -> None:
        probe = self.spec.get("livenessProbe" if self.started else "startupProbe")
        if probe is None or self._kill_at < float("inf"):
            return
        self._probe_at = now + probe.get("periodSeconds", 10)
        if self._succeeds(probe):
            self._failures, self.started = 0, True
            return
        self._failures += 1
        if self._failures >= probe.get("failureThreshold", 3):
            self.signal(signal.SIGTERM)
            self._kill_at = now + probe.get("terminationGracePeriodSeconds", self._pod.grace)

    def _succeeds(self, probe: Resource) -> bool:
        get = probe["httpGet"]
        ports = {one.get("name"): one["containerPort"] for one in self.spec.get("ports", [])}
        url = f"http://{self._pod.address}:{ports.get(get['port'], get['port'])}{get['path']}"
        try:
            with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1)) as answer:
                return bool(answer.status < 400)
        except OSError:
            return False


class Pod:
    """The containers of a pod specification; use it as a context.

    Args:
        images: Images by name.
        folder: Folder of the volumes, logs and podman's own files.

    Attributes:
        address: Address of the pod's network, for probes and scrapes.
        grace: Seconds that the pod has to end.
        volumes: Host paths of the volumes by name.
    """

    def __init__(self, spec: Resource, images: Mapping[str, Image], folder: Path) -> None:
        self.folder, self._spec, self._images = folder, spec, images
        self.grace = float(spec.get("terminationGracePeriodSeconds", 30))
        number = next(_numbers)
        self.name = f"pod-{os.getpid()}-{number}"
        # The name of an interface is short.
        self._link = f"p{os.getpid() % 100_000}-{number}"
        self._host, self.address = (
            f"10.217.{os.getpid() % 256}.{2 * number % 256 + end}" for end in (0, 1)
        )
        self.volumes = {one["name"]: folder / "volumes" / one["name"] for one in spec["volumes"]}
        self.init = [Container(self, one) for one in spec.get("initContainers", [])]
        self.main = [Container(self, one) for one in spec["containers"]]
        self.sidecars = [one for one in self.init if one.spec.get("restartPolicy") == "Always"]
        # The path must be short.
        self._podman = Path(tempfile.mkdtemp(prefix="pod-"))
        self._synced: list[Container] = []
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)

    def __enter__(self) -> Pod:  # noqa: PYI034 - Self is not yet in typing in 3.10
        (self.folder / "containers.conf").write_text(CONF)
        script = NETWORK.format(name=self.name, link=self._link, host=self._host, pod=self.address)
        subprocess.run(["sh", "-ec", script], check=True)
        for volume in self._spec["volumes"]:
            path, source = self.volumes[volume["name"]], volume["emptyDir"]
            path.mkdir(parents=True)
            if source.get("medium") == "Memory":
                size = int(quantity(source["sizeLimit"])) if "sizeLimit" in source else "50%"
                mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
                subprocess.run(mount, check=True)
            path.chmod(0o777)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for container in (*self.init, *self.main):
            container.signal(signal.SIGCONT)
            container.stop(0.0)
        for volume in self._spec["volumes"]:
            if volume["emptyDir"].get("medium") == "Memory":
                subprocess.run(["umount", "-l", self.volumes[volume["name"]]], check=False)
        subprocess.run(["ip", "netns", "del", self.name], check=False)
        shutil.rmtree(self._podman, ignore_errors=True)

    def start(self) -> None:
        """Run the init containers in order, wait for each sidecar's startup probe, and start the main containers."""
        for container in self.init:
            container.run()
            is_sidecar = container in self.sidecars
            if is_sidecar:
                self._sync(container)
            until(partial(_is_over, container, is_sidecar=is_sidecar), START)
            ready = container.started if is_sidecar else container.exits == [0]
            if not ready:
                raise RuntimeError(f"{container.name}: {container.log.read_text()[-1000:]}")
        for container in self.main:
            container.run()
            self._sync(container)

    def stop(self) -> float:
        """End the main containers, then the sidecars in reverse order; return the seconds it took."""
        begun = time.monotonic()
        self.forget(*self._synced)
        for container in self.main:
            container.terminate()
        for container in self.main:
            container.stop(max(0.0, begun + self.grace - time.monotonic()))
        for container in reversed(self.sidecars):
            container.stop(max(SIDECAR_GRACE, begun + self.grace - time.monotonic()))
        return time.monotonic() - begun

    def forget(self, *containers: Container) -> None:
        """Probe and restart these containers no more."""
        with self._lock:
            self._synced = [one for one in self._synced if one not in containers]

    def container(self, name: str) -> Container:
        """Return a container by its name."""
        return next(one for one in (*self.init, *self.main) if one.name == name)

    def command(self, container: Container, start: int) -> list[str]:
        """Return podman's command that runs a container for the ``start``-th time."""
        spec = container.spec
        mounts = [
            f"{self.volumes[one['name']]}:{one['mountPath']}" + ":ro" * one.get("readOnly", False)
            for one in spec.get("volumeMounts", [])
        ]
        return [
            "podman", f"--root={self._podman}/root", f"--runroot={self._podman}/run",
            "--storage-driver=vfs", "run", "--rm", f"--name={self.name}-{spec['name']}-{start}",
            f"--pidfile={container.pidfile}", f"--network=ns:/run/netns/{self.name}",
            *options(spec, self._spec, {"metadata.name": self.name}),
            *(f"--volume={mount}" for mount in mounts),
            *arguments(spec, self._images[spec["image"]]),
        ]  # fmt: skip

    def _sync(self, container: Container) -> None:
        with self._lock:
            self._synced.append(container)

    def _run(self) -> None:
        while not self._stop.wait(TICK):
            with self._lock:
                for container in self._synced:
                    container.sync()


def _is_over(container: Container, *, is_sidecar: bool) -> bool:
    if is_sidecar:
        return container.started or len(container.exits) > MAX_EXITS
    return not container.running


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition becomes true in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(TICK)
    return True
