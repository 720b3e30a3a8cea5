"""A pod of an overlay with a stand-in engine, and the comparison of its page with what the engine pushed."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import shutil
import struct
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos.engine import COUNT
from chaos.stage import shown
from chaos.traffic import MODEL, Traffic
from chaos.verdict import MARKERS, compare
from chaos.watch import Page, parse

from kubelet import Pod, until
from manifests import KUSTOMIZE, ROOT, kustomized, pods
from podman import Image, Resource

PATIENCE = 300.0
PLUGIN = "/opt/sidestep/plugin"


class EnginePod:
    """A pod, and what its engine pushed.

    Attributes:
        expected: Counts of killed engines that the page must have.
    """

    def __init__(self, pod: Pod, folder: Path) -> None:
        self.pod, self.folder = pod, folder
        self.engine, self.exporter = pod.main[0], pod.container("sidestep")
        self.expected: dict[str, float] = {}
        self.source = 1
        self._gone = 0

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
        return compare(wanted, self.page() if page is None else page, derived_apart=False).worst

    def pushes(self, items: int) -> None:
        """Wait until the engine has pushed so many items more, and the page has more as well."""
        wanted, before = self.pushed + items, self.arrived(self.page())
        assert until(lambda: self.pushed >= wanted, PATIENCE)
        assert until(lambda: self.arrived(self.page()) > before, PATIENCE)

    def is_exact(self) -> None:
        """Pause the engine, and compare the page once all has arrived."""
        self.tell("pause")
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
    script = Path(__file__).with_name("pod_engine.py")
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
