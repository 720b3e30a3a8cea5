"""A real SGLang on the CPU, and the streams that it publishes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from ports import free_port
from real_engines.processes import ROOT, Process, Server, offline

INSTALLED = ROOT / "build/sglang-venv/bin/python"
"""The interpreter of the environment that tools/setup_sglang.sh makes."""
STAND_INS = Path(__file__).with_name("sglang_stand_ins")
"""Folder of packages that SGLang imports and that cannot be installed without a GPU."""
TWO_RANKS = ["--dp-size", "2"]
TWO_RANKS_ENVIRON = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""A core for each rank: by default SGLang needs a NUMA node per rank."""
POOL = 4096
"""Tokens of KV cache: few enough that a mixed load evicts blocks."""
RETRACTING = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}
"""Environment in which SGLang admits too many requests, and has to retract some."""


class Sharing(Process):
    """A process that deletes SGLang's files in shared memory, which SGLang leaves behind."""

    _shared: frozenset[Path] = frozenset()

    async def ready(self, condition: Callable[[], Awaitable[bool]], timeout: float) -> None:
        """Wait as ``Process`` does, then record which files are shared."""
        await super().ready(condition, timeout)
        self._shared = frozenset(path for pid in self.alive() for path in shared_files(pid))

    def kill(self) -> None:
        """Kill all that is left of its group, and delete the shared files."""
        super().kill()
        for path in self._shared:
            path.unlink(missing_ok=True)


class SglangServer(Sharing, Server):
    """SGLang's server on the tiny model.

    Its schedulers and its detokenizer are in its process group and end with it.

    Args:
        python: The interpreter of SGLang's environment.
        arguments: Arguments in addition to those of every server.
        environ: A PYTHONPATH in it comes after the stand-ins.
        port: That of an earlier server; 0: a free one.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        home: Path,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        *,
        port: int = 0,
    ) -> None:
        port = port or free_port()
        flags = shlex.split(
            f"--model-path {model} --served-model-name tiny --load-format dummy --dtype float32"
            f" --host 127.0.0.1 --port {port} --context-length 2048"
            f" --device cpu --attention-backend torch_native --sampling-backend pytorch"
            f" --grammar-backend none --disable-overlap-schedule --disable-cuda-graph"
            f" --mem-fraction-static 0.1 --max-total-tokens {POOL} --max-running-requests 16"
            # Without it the scheduler of an idle server keeps a core busy.
            f" --sleep-on-idle --enable-metrics"
        )
        command = [str(python), "-m", "sglang.launch_server", *flags, *arguments]
        settings = {**sglang_environ(home), **(environ or {})}
        paths = [str(STAND_INS), *filter(None, [settings.get("PYTHONPATH")])]
        settings["PYTHONPATH"] = os.pathsep.join(paths)
        log = home / f"sglang-{port}.log"
        super().__init__(port, command, settings, log)


def interpreter() -> Path:
    """Return the Python of SGLang's environment, which a variable may set."""
    return Path(os.environ.get("SIDESTEP_SGLANG_PYTHON", INSTALLED))


def shared_files(pid: int) -> Iterator[Path]:
    """Yield SGLang's files in shared memory that a process has open."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            path = link.readlink()
            if path.is_relative_to("/dev/shm") and path.name.startswith("sglang_"):
                yield path


def sglang_environ(home: Path) -> dict[str, str]:
    """Return the environment of an SGLang on the CPU without network and kernels."""
    return {
        **offline(home),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        # Else each /health is a request to the engine.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }


@dataclasses.dataclass(frozen=True)
class Feeds:
    """Endpoints of a server's streams; each rank has a port, or a socket file, of its own."""

    kv_port: int
    load_port: int
    forward_pass_path: Path

    @classmethod
    def chosen(cls, home: Path, ranks: int = 1) -> Self:
        """Choose free ports, and a path in ``home``."""
        first = free_ports(2 * ranks)
        return cls(first, first + ranks, home / "forward")

    @property
    def flags(self) -> list[str]:
        """Arguments that make a server publish all streams."""
        kv_events = {
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{self.kv_port}",
            "bind": True,
            "topic": "kv",
        }
        return [
            "--kv-events-config",
            json.dumps(kv_events),
            # SGLang binds this endpoint to wildcard addresses only.
            "--load-publish-endpoint",
            f"tcp://0.0.0.0:{self.load_port}",
            "--enable-forward-pass-metrics",
            "--forward-pass-metrics-ipc-name",
            f"ipc://{self.forward_pass_path}",
        ]


class Message(NamedTuple):
    """A message of a stream with its payload decoded."""

    topic: str
    number: int
    payload: Any


class Listener:
    """A subscriber that keeps all messages of a stream."""

    def __init__(self, endpoint: str) -> None:
        self.heard: list[Message] = []
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _listen(self) -> None:
        while True:
            topic, number, payload = await self._socket.recv_multipart()
            self.heard.append(
                Message(
                    topic.decode(), int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)
                )
            )


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive ports that nothing listens on now."""
    while True:
        first = free_port()
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("0.0.0.0", port))
        except (OSError, OverflowError):
            continue
        return first


async def post(url: str) -> None:
    """Send an empty POST request, as control endpoints take it."""
    async with aiohttp.ClientSession() as session, session.post(url) as answer:
        answer.raise_for_status()
