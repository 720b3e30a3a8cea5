"""Pods of the overlays as real containers, run by a stand-in of the kubelet."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chaos.engine import COUNT
from chaos.stage import shown
from chaos.traffic import MODEL, Traffic
from chaos.verdict import MARKERS, compare
from chaos.watch import Page, parse, total
from fuzz.pod_flood import PARTS, send

from kubelet import Container, Image, Pod, until
from manifests import KUSTOMIZE, ROOT, Resource, kustomized, named, pods
from prometheus_server import labels, prometheus
from sidestep.telemetry.rows import BY_NAME

PATIENCE = 300.0
PLUGIN = "/opt/sidestep/plugin"


class EnginePod:
    """A pod, and what its engine pushed."""

    def __init__(self, pod: Pod, folder: Path) -> None:
        self.pod, self.folder = pod, folder
        self.engine, self.exporter = pod.main[0], pod.container("sidestep")
        self.expected: dict[str, float] = {}
        self.source, self.folded = 1, False

    def tell(self, word: str) -> None:
        """Let the present engine begin (go) or pause."""
        (self.folder / f"{word}-{self.source}").touch()

    @property
    def pushed(self) -> int:
        """Items that the present engine has pushed."""
        with contextlib.suppress(FileNotFoundError, struct.error):
            return int(COUNT.unpack_from((self.folder / f"pushed-{self.source}").read_bytes())[0])
        return 0

    def text(self, path: str = "/metrics") -> str:
        """Return a page of the exporter."""
        with urllib.request.urlopen(
            f"http://{self.pod.address}:9857{path}", timeout=PATIENCE
        ) as answer:
            text: str = answer.read().decode()
        return text

    def page(self) -> Page:
        """Return the engine's counts on the page; nothing while the exporter does not answer."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return parse(self.text(), MODEL)
        return {}

    def differences(self, page: Page | None = None) -> object:
        """Return the series that differ most from what was pushed; empty if the page is exact."""
        wanted = dict(self.expected)
        for series, value in shown(Traffic(self.source, self.source), self.pushed).items():
            wanted[series] = wanted.get(series, 0.0) + value
        found = self.page() if page is None else page
        return compare(wanted, found, derived_apart=self.folded).worst

    def pushes(self, items: int) -> None:
        """Wait until the engine has pushed so many items more, and the page has more as well."""
        wanted, before = self.pushed + items, self.arrived(self.page())
        assert until(lambda: self.pushed >= wanted, PATIENCE)
        assert until(lambda: self.arrived(self.page()) > before, PATIENCE)

    def is_exact(self) -> None:
        """Pause the engine, and compare the page once all has arrived."""
        self.tell("pause")
        # Counts stay exact; intervals of requests in progress are lost, as docs/reliability.md says.
        self.folded = total(self.text(), "sidestep_folded_items_total") > 0
        assert until(lambda: not self.differences(), PATIENCE), self.differences()

    def arrived(self, page: Page) -> int:
        """Return the items of the present engine on a page."""
        return sum(
            int(page.get(series, 0.0) - self.expected.get(series, 0.0)) // each
            for series, (_, each) in MARKERS.items()
        )

    def replaced(self) -> tuple[int, int]:
        """Wait for the successor of a killed engine; return the items that arrived and that were pushed.

        What arrived must be the first of what was pushed.
        """
        pushed, traffic = self.pushed, Traffic(self.source, self.source)
        successor = self.folder / f"pushed-{self.source + 1}"
        assert until(successor.exists, PATIENCE)
        # Once it is connected, no more items of its predecessor are applied.
        restarts = "sidestep_engine_restarts_total"
        assert until(lambda: f"{restarts}{{" in self.text() and self._restarted(), PATIENCE)
        page = self.page()
        arrived = self.arrived(page)
        wanted = {**self.expected}
        for series, value in shown(traffic, arrived).items():
            wanted[series] = wanted.get(series, 0.0) + value
        assert compare(wanted, page, derived_apart=False).worst == ()
        for series, value in shown(traffic, arrived, died=True).items():
            self.expected[series] = self.expected.get(series, 0.0) + value
        self.source += 1
        return arrived, pushed

    def _restarted(self) -> bool:
        values = [
            float(line.rpartition(" ")[2])
            for line in self.text().splitlines()
            if line.startswith("sidestep_engine_restarts_total{")
        ]
        return bool(values) and min(values) >= self.source


@contextlib.contextmanager
def running(
    images: Images,
    folder: Path,
    overlay: str = "vllm",
    patch: Callable[[Resource], object] = lambda _: None,
) -> Iterator[EnginePod]:
    """Run the first pod of an overlay with an engine that waits, and end it; ``patch`` changes its specification."""
    spec = _spec(overlay)
    patch(spec)
    progress = folder / "engine"
    progress.mkdir()
    progress.chmod(0o777)
    engine = dataclasses.replace(
        images.engine, mounts={**images.engine.mounts, progress: "/run/engine"}
    )
    named = {one["image"]: images.sidestep for one in spec["initContainers"]}
    named |= {one["image"]: engine for one in spec["containers"]}
    with Pod(spec, named, folder) as pod:
        pod.start()
        yield EnginePod(pod, progress)


@dataclasses.dataclass(frozen=True)
class Images:
    """The image of sidestep, and one of a stand-in engine."""

    sidestep: Image
    engine: Image


def of_image(root: Path, config: Mapping[str, Any]) -> Images:
    """Return the images made of an unpacked image of sidestep and its configuration."""
    ours = Image(root, config["Env"], config["Entrypoint"], config["Cmd"], config["User"])
    return Images(ours, _engine(root, config["Env"], {}))


def of_this_machine(folder: Path) -> Images:
    """Return images that have this machine's programs and this checkout, which need no build."""
    root, plugin = folder / "root", folder / "plugin"
    root.mkdir()
    for package in (ROOT / "exporter" / "sidestep", ROOT / "adapters" / "sidestep_adapters"):
        shutil.copytree(package, plugin / package.name)
    paths = map(Path, ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix, sys.prefix, str(ROOT)))
    mounts = {path: f"{path}:ro" for path in paths if path.exists()}
    environ = [
        f"PATH={sys.prefix}/bin:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE=1",
        "SIDESTEP_WEB_LISTEN_ADDRESS=:9857",
    ]
    ours = {**mounts, plugin: f"{PLUGIN}:ro"}
    return Images(
        Image(root, environ, ["python3", "-m", "sidestep"], ["serve"], "65532:65532", ours),
        _engine(root, environ, mounts),
    )


def _engine(root: Path, environ: Sequence[str], mounts: Mapping[Path, str]) -> Image:
    """Return an image whose commands of vLLM and SGLang are the stand-in engine."""
    script = ROOT / "tests" / "support" / "pod_engine.py"
    mounts = {**mounts, ROOT / "chaos": "/engine/chaos:ro", script: "/engine/pod_engine.py:ro"}
    # A path can be mounted once by its name.
    again = root.with_name("engine-scripts") / "launch_server.py"
    again.parent.mkdir(exist_ok=True)
    shutil.copy(script, again)
    mounts[again] = "/engine/sglang/launch_server.py:ro"
    command = ["python3", "-m", "pod_engine"]
    return Image(root, environ, command, [], "0:0", mounts, "/engine")


def _spec(overlay: str) -> Resource:
    for resource in kustomized(KUSTOMIZE / "overlays" / overlay):
        for _, found in pods(resource):
            return found
    raise LookupError(overlay)


pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.getuid() != 0 or not all(map(shutil.which, ("podman", "runc", "ip", "kubectl"))),
        reason="containers need root, podman, runc, ip and kubectl",
    ),
]
ITEMS = 200
REPLACED = 75.0
"""Most seconds until a frozen exporter has been replaced."""
TARGET = {"job", *labels("pod")}
"""Labels that Prometheus adds."""
STORAGE = ROOT / "build" / "image"


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    """Build the image from this checkout, and unpack it."""
    build = [str(ROOT / "tools" / "build_image.sh"), str(STORAGE)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    image = done.stdout.split()[-1]
    container = _buildah("from", "--pull-never", image)
    try:
        yield of_image(Path(_buildah("mount", container)), _config(image))
    finally:
        _buildah("rm", container)


def test_a_pod_starts_counts_and_survives_a_kill(tmp_path: Path) -> None:
    """A short form without an image: a pod starts, its exporter is killed, and its page is exact."""
    (tmp_path / "images").mkdir()
    with running(of_this_machine(tmp_path / "images"), tmp_path) as pod:
        pod.tell("go")
        pod.pushes(ITEMS)
        pod.exporter.signal(signal.SIGKILL)
        assert until(lambda: len(pod.exporter.starts) == 2 and pod.exporter.started, PATIENCE)
        pod.pushes(ITEMS)
        pod.is_exact()

    assert pod.exporter.exits[0] == 128 + signal.SIGKILL


@pytest.mark.pod
@pytest.mark.parametrize("user", [0, 1000, 65532, 1000650000])
def test_an_engine_of_any_user_is_counted(images: Images, tmp_path: Path, user: int) -> None:
    """Engines of any user reach the exporter, whose root file system is read-only."""
    overlay = "sglang" if user == 1000 else "vllm"
    with running(images, tmp_path, overlay, partial(_run_as, user=user)) as pod:
        pod.tell("go")
        pod.pushes(ITEMS)
        pod.is_exact()
        status = _status(pod.exporter)
        written = _touch(pod.exporter, "/opt/sidestep/new")

    assert (status["Uid"].split(), status["Groups"].split()) == (["65532"] * 4, ["65532"])
    assert (int(status["CapEff"], 16), status["NoNewPrivs"]) == (0, "1")
    assert "Read-only file system" in written


@pytest.mark.pod
def test_killed_containers_are_restarted(images: Images, tmp_path: Path) -> None:
    """The exporter and the engine are killed in turns; nothing is counted twice, and only what an engine had not sent is lost."""
    with running(images, tmp_path) as pod:
        for _ in range(2):
            pod.tell("go")
            pod.pushes(ITEMS)
            exits = len(pod.exporter.exits)
            pod.exporter.signal(signal.SIGKILL)
            assert until(lambda: len(pod.exporter.exits) > exits, PATIENCE)  # noqa: B023
            assert until(lambda: pod.exporter.running and pod.exporter.started, PATIENCE)
            pod.pushes(ITEMS)
            pod.engine.signal(signal.SIGKILL)
            arrived, pushed = pod.replaced()
            assert arrived <= pushed
        pod.tell("go")
        pod.pushes(ITEMS)
        pod.is_exact()


@pytest.mark.pod
@pytest.mark.parametrize("interval", ["1s", "15s"])
@pytest.mark.parametrize("order", ["engine", "exporter"])
def test_prometheus_gets_the_last_counts(
    images: Images, tmp_path: Path, order: str, interval: str
) -> None:
    """The last sample of every counter is exact, whichever container has to end first."""
    binary = shutil.which("prometheus") or pytest.skip("there is no prometheus")
    with running(images, tmp_path) as pod:
        page = {"engines": {"pod": f"http://{pod.pod.address}:9857/metrics"}}
        with prometheus(binary, tmp_path / "prometheus", page, interval=interval) as server:
            pod.tell("go")
            pod.pushes(ITEMS)
            server.scraped(1, time.time())
            if order == "exporter":
                pod.pod.forget(pod.engine, pod.exporter)
                pod.exporter.terminate()
                time.sleep(1.0)
            seconds = pod.pod.stop()

            def differences() -> object:
                return pod.differences(_stored(server.ask(f'{{model_name="{MODEL}"}}[5m]')))

            # Prometheus stores a scrape a moment after the exporter has served it.
            until(lambda: not differences(), 20.0)
            assert differences() == ()

    assert (pod.engine.exits, pod.exporter.exits) == ([0], [0])
    assert seconds < 60


@pytest.mark.pod
@pytest.mark.parametrize("kind", list(PARTS))
def test_a_flood_at_the_manifests_limits_changes_no_count(
    images: Images, tmp_path: Path, kind: str
) -> None:
    """The exporter neither exceeds its memory nor loses counts, whatever its peers send."""
    with running(images, tmp_path) as pod:
        pod.tell("go")
        pod.pushes(ITEMS)
        send(pod.pod.volumes["sidestep-socket"] / "ingest" / "ingest.ipc", PARTS[kind], 5.0)
        pod.pushes(ITEMS)
        pod.is_exact()

    assert len(pod.exporter.starts) == 1


@pytest.mark.pod
def test_a_tenth_of_a_core_is_enough(images: Images, tmp_path: Path) -> None:
    """With 100m of CPU the exporter starts within its startup probe's time, and its counts are exact."""
    with running(images, tmp_path, patch=partial(_limit, cpu="100m")) as pod:
        pod.tell("go")
        pod.pushes(ITEMS)
        pod.is_exact()

    assert len(pod.exporter.starts) == 1


@pytest.mark.pod
def test_a_full_volume_costs_no_count(images: Images, tmp_path: Path) -> None:
    """While the state's volume is full the exporter serves exact counts and reports itself unhealthy."""
    with running(images, tmp_path) as pod:
        pod.tell("go")
        pod.pushes(ITEMS)
        filler = pod.pod.volumes["sidestep-state"] / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(1 << 26))
        assert until(lambda: "sidestep_snapshot_healthy 0" in pod.text(), PATIENCE)
        pod.pushes(ITEMS)
        filler.unlink()
        assert until(lambda: "sidestep_snapshot_healthy 1" in pod.text(), PATIENCE)
        pod.exporter.signal(signal.SIGKILL)
        assert until(lambda: len(pod.exporter.starts) == 2 and pod.exporter.started, PATIENCE)
        pod.is_exact()


@pytest.mark.pod
def test_a_frozen_exporter_is_replaced(images: Images, tmp_path: Path) -> None:
    """The liveness probe replaces an exporter that is stopped, and no count is lost."""
    with running(images, tmp_path) as pod:
        pod.tell("go")
        pod.pushes(ITEMS)
        frozen = time.monotonic()
        pod.exporter.signal(signal.SIGSTOP)
        assert until(lambda: len(pod.exporter.starts) == 2, PATIENCE)
        seconds = pod.exporter.starts[1] - frozen
        assert until(lambda: pod.exporter.started, PATIENCE)
        pod.pushes(ITEMS)
        pod.is_exact()

    assert seconds < REPLACED
    assert pod.engine.exits[1:] == []


def _buildah(*arguments: str) -> str:
    places = [f"--root={STORAGE}/root", f"--runroot={STORAGE}/run", "--storage-driver=vfs"]
    done = subprocess.run(
        ["buildah", *places, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _config(image: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_buildah("inspect", "--type", "image", image))
    settings: dict[str, Any] = found["OCIv1"]["config"]
    return settings


def _run_as(spec: Resource, user: int) -> None:
    spec["containers"][0]["securityContext"] = {"runAsUser": user, "runAsGroup": user}


def _limit(spec: Resource, cpu: str) -> None:
    named(spec["initContainers"], "sidestep")["resources"]["limits"]["cpu"] = cpu


def _status(container: Container) -> dict[str, str]:
    lines = Path(f"/proc/{container.pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _touch(container: Container, path: str) -> str:
    """Create a file in a running container as root, and return the error."""
    command = ["nsenter", f"--target={container.pid}", "--mount", "--root", "touch", path]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def _stored(series: list[dict[str, Any]]) -> dict[str, float]:
    """Return the last values of counters and histograms in Prometheus, by their text on the page."""
    found = {}
    for one in series:
        metric = {key: one["metric"][key] for key in sorted(one["metric"]) if key not in TARGET}
        name, le = metric.pop("__name__"), metric.pop("le", None)
        if name.endswith(("_total", "_bucket", "_count", "_sum")) and name not in BY_NAME:
            metric |= {} if le is None else {"le": le}
            labels = ",".join(f'{key}="{value}"' for key, value in metric.items())
            found[f"{name}{{{labels}}}"] = float(one["values"][-1][1])
    return found
