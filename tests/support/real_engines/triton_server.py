"""A real Triton on the CPU, its models and its own metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp

from pages import get
from ports import free_ports
from real_engines.processes import ROOT, ExporterProcess, Process

INSTALLED = ROOT / "build/triton-venv/bin/python"
"""The interpreter of the environment that tools/setup_triton.sh makes."""
SOURCES = Path(__file__).with_name("triton_models")
VERSIONS: Mapping[str, Sequence[int]] = {"cached": (1, 3)}
"""Versions of models that have others than version 1."""
MODELS = ("batched", "cached", "chain", "queued", "raising", "refusing", "streaming")
"""Models of the mixed load; the others are slow."""
START = 60.0
"""Seconds until Triton must answer; it takes 1.5, and 1 for each Python model."""
EXIT = 45.0
"""Seconds until it must have ended; it stops waiting for requests after 30."""

Versions = dict[tuple[str, str], dict[str, Any]]


class Ended(NamedTuple):
    """Exit code of a process, and ``seconds`` from the signal to the end."""

    code: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Place:
    """Folder and ports of a server, which stay the same across restarts."""

    python: Path
    home: Path
    http: int
    grpc: int
    metrics: int

    @classmethod
    def chosen(cls, python: Path, home: Path, *more: str) -> Self:
        """Choose free ports, and make a model repository in ``home`` with ``MODELS`` and ``more``."""
        place = cls(python, home, *free_ports(3))
        for name in (*MODELS, *more):
            place.add(name, VERSIONS.get(name, (1,)))
        return place

    @property
    def base(self) -> str:
        """URL of the HTTP API."""
        return f"http://127.0.0.1:{self.http}"

    @property
    def page(self) -> str:
        """URL of Triton's own metrics page."""
        return f"http://127.0.0.1:{self.metrics}/metrics"

    @property
    def repository(self) -> Path:
        """Model repository; a copy, as Triton writes beside what it imports."""
        return self.home / "models"

    @property
    def shared(self) -> str:
        """Prefix of the names of its files in shared memory."""
        return f"sidestep-triton-{self.http}-"

    def add(self, name: str, versions: Sequence[int], repository: Path | None = None) -> None:
        """Add a model of ``SOURCES`` to the repository, or versions of one that is there."""
        model = (repository or self.repository) / name
        model.mkdir(parents=True, exist_ok=True)
        source = SOURCES / name / "config.pbtxt"
        if not (model / source.name).exists():
            shutil.copy(source, model)
        for version in versions:
            folder = model / str(version)
            folder.mkdir()
            # An ensemble needs a folder, even an empty one.
            if "python" in source.read_text():
                shutil.copy(SOURCES / "model.py", folder)
                # A file of this name prevents bytecode, which Triton would take for a change of the model.
                (folder / "__pycache__").touch()

    def touch(self, name: str) -> None:
        """Make Triton see a model's files as changed."""
        os.utime(self.repository / name / "1/model.py")


class TritonServer(Process):
    """One process of the server at ``place``."""

    def __init__(
        self,
        place: Place,
        models: Sequence[str] = MODELS,
        arguments: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.place = place
        self.headers = dict(headers or {})
        packages = Path(sysconfig.get_path("purelib", vars=_installed_in(place.python)))
        server = packages / "pytriton/tritonserver"
        flags = {
            "model-repository": place.repository,
            "model-control-mode": "explicit",
            "backend-directory": server / "backends",
            "cache-directory": server / "caches",
            "cache-config": "local,size=1048576",
            "backend-config": f"python,shm-region-prefix-name={place.shared}",
            "http-address": "127.0.0.1",
            "http-port": place.http,
            "grpc-address": "127.0.0.1",
            "grpc-port": place.grpc,
            "metrics-port": place.metrics,
            "metrics-interval-ms": 500,
            "allow-gpu-metrics": "false",
        }
        command = [
            str(server / "bin/tritonserver"),
            *(f"--{name}={value}" for name, value in flags.items()),
            *(f"--load-model={model}" for model in models),
            *arguments,
        ]
        environ = {"TRITON_SERVER_CPU_ONLY": "1", "MODEL_PACKAGES": str(packages)}
        super().__init__(command, environ, place.home / "triton.log")

    async def started(self) -> Self:
        """Wait until all models are loaded; Triton does not listen before."""

        async def healthy() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                await get(f"{self.place.base}/v2/health/ready")
                return True
            return False

        await self.ready(healthy, START)
        return self

    async def page(self) -> str:
        """Fetch Triton's own metrics page."""
        return await get(self.place.page)

    async def statistics(self, *models: str) -> Versions:
        """Fetch Triton's statistics by model and version, of all models at once or one by one."""
        found: list[dict[str, Any]] = []
        # An idle connection would delay Triton's shutdown.
        headers = {"Connection": "close", **self.headers}
        async with aiohttp.ClientSession(headers=headers) as session:
            for path in [f"{model}/stats" for model in models] or ["stats"]:
                async with session.get(f"{self.place.base}/v2/models/{path}") as answer:
                    answer.raise_for_status()
                    found += (await answer.json())["model_stats"]
        return {(one["name"], one["version"]): one for one in found}

    async def end(self, number: int = signal.SIGTERM) -> Ended:
        """Send a signal, and wait for the end."""
        begun = time.monotonic()
        code = await self.stop(number, EXIT)
        return Ended(code, time.monotonic() - begun)

    def kill(self) -> None:
        """Kill all that is left of its group, and delete its shared files."""
        super().kill()
        for left in self.shared():
            left.unlink(missing_ok=True)

    def shared(self) -> list[Path]:
        """Return its files in shared memory."""
        return list(Path("/dev/shm").glob(f"{self.place.shared}*"))


def exporter_of(target: str, home: Path, name: str = "exporter", *more: str) -> ExporterProcess:
    """Return an exporter that polls ``target`` five times a second."""
    flags = ["--triton", often(target), *more] if target else more
    return ExporterProcess(ingest(home, name), home / f"{name}.log", *flags)


def ingest(home: Path, name: str) -> str:
    """Return the ingest endpoint of the exporter of that name."""
    return f"ipc://{home}/{name}.ipc"


def often(target: str) -> str:
    """Set an interval of 0.2 s unless ``target`` has one."""
    where, *options = target.split(",")
    return target if "interval=" in target else ",".join([where, "interval=0.2", *options])


def interpreter() -> Path:
    """Return the Python of Triton's environment, which a variable may set."""
    return Path(os.environ.get("SIDESTEP_TRITON_PYTHON", INSTALLED))


def _installed_in(python: Path) -> dict[str, str]:
    home = str(python.parents[1])
    return {"base": home, "platbase": home}
