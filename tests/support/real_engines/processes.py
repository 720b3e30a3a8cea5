"""Processes that a test runs: a server, an exporter, and how they are waited for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

START = 300.0
"""Seconds until an engine must answer; it takes 15 to 45 on an idle machine."""
STOP = 90.0
ROOT = Path(__file__).parents[3]
CODE = [str(ROOT / "exporter"), str(ROOT / "adapters")]
"""This checkout's, whichever one the interpreters have installed."""
FOREIGN = ("SIDESTEP_", "VLLM_", "SGLANG_", "PROMETHEUS_", "PYTHONPATH", "COV_")
"""What a test's processes do not inherit."""


async def until(
    condition: Callable[[], bool | Awaitable[bool]], timeout: float = 60.0, what: str = ""
) -> None:
    """Return when ``condition`` holds.

    Raises:
        AssertionError: It did not within ``timeout`` seconds.
    """
    try:
        async with asyncio.timeout(timeout):
            while True:
                holds = condition()
                if not (holds if isinstance(holds, bool) else await holds):
                    await asyncio.sleep(0.05)
                    continue
                return
    except TimeoutError:
        raise AssertionError(f"not within {timeout:.0f} s: {what or condition}") from None


class Process:
    """A child in a process group of its own; what it prints goes to ``log``.

    It runs this checkout's code, after what a PYTHONPATH in ``environ`` has.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.log = log
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        paths = [*filter(None, [environ.get("PYTHONPATH")]), *CODE]
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                command,
                env={**inherited, **environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the child, and of its group."""
        return self._child.pid

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._child.poll()

    def send(self, number: int) -> None:
        """Send a signal to the child alone."""
        self._child.send_signal(number)

    async def ready(self, condition: Callable[[], Awaitable[bool]], timeout: float) -> None:
        """Wait for ``condition``; an early end fails at once, with what was printed last."""

        async def ended_or_ready() -> bool:
            assert self.code is None, f"ended with {self.code}:\n{self.output[-6000:]}"
            return await condition()

        try:
            await until(ended_or_ready, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output[-6000:]}") from None

    async def stop(self, number: int = signal.SIGTERM, timeout: float = STOP) -> int:
        """Ask it to end and wait; its exit code."""
        if self.code is None:
            self.send(number)
            await until(lambda: self.code is not None, timeout, f"end of {self._child.args!r}")
        return self._child.wait()

    def alive(self) -> list[int]:
        """Processes of its group that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError, IndexError):
                    state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                    if int(group) == self.pid and state != "Z":
                        found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """End whatever is left of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._child.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.stop()
        finally:
            self.kill()


class ExporterProcess(Process):
    """``sidestep serve`` on a port that it chooses itself."""

    def __init__(self, endpoint: str, log: Path, *more: str) -> None:
        self._logged = log.stat().st_size if log.exists() else 0
        flags = ["--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", endpoint, *more]
        super().__init__([sys.executable, "-m", "sidestep", "serve", *flags], {}, log)
        self.url = ""

    async def started(self) -> Self:
        """Wait until it serves its page."""

        async def announced() -> bool:
            found = re.search(r"metrics on (http://\S+?),? ", self.output[self._logged :])
            self.url = found[1] if found else ""
            return bool(found)

        await self.ready(announced, 30.0)
        return self

    async def page(self) -> str:
        """Its metrics page."""
        return await fetch(self.url)


class Server(Process):
    """An engine that serves HTTP at ``base``, its own metrics page included."""

    def __init__(
        self, base: str, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> None:
        super().__init__(command, environ, log)
        self.base = base

    async def started(self) -> Self:
        """Wait until it takes requests."""

        async def healthy() -> bool:
            try:
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(f"{self.base}/health") as answer,
                ):
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await self.ready(healthy, START)
        return self

    async def page(self) -> str:
        """The engine's own metrics page."""
        return await fetch(f"{self.base}/metrics")


class VllmServer(Server):
    """An OpenAI server on the tiny model.

    Args:
        python: The interpreter of vLLM's environment.
        arguments: Beyond those that every server here gets.
        command: Start ``vllm serve``, which alone knows data parallelism.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        home: Path,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        *,
        command: bool = False,
    ) -> None:
        port = free_port()
        start = (
            [str(python.with_name("vllm")), "serve", str(model)]
            if command
            else [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        )
        flags = shlex.split(
            f"--served-model-name tiny --load-format dummy --dtype float32 --host 127.0.0.1"
            f" --port {port} --max-model-len 2048 --enforce-eager --block-size 32"
        )
        settings = {**engine_environ(home), **(environ or {})}
        log = home / f"vllm-{port}.log"
        super().__init__(f"http://127.0.0.1:{port}", [*start, *flags, *arguments], settings, log)


def engine_environ(home: Path) -> dict[str, str]:
    """For a vLLM without network, on this machine's CPU, that leaves nothing behind."""
    return {
        **offline(home),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def offline(home: Path) -> dict[str, str]:
    """For any engine: it fetches nothing, writes under ``home``, computes in one thread."""
    return {
        "HOME": str(home),
        "TMPDIR": str(home),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def at_start(home: Path, code: str) -> str:
    """A folder for PYTHONPATH whose code every interpreter runs first."""
    folder = home / "start"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return str(folder)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def fetch(url: str) -> str:
    """The body at ``url``."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
        answer.raise_for_status()
        return await answer.text()
