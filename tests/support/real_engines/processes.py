"""Processes of engines and exporters that a test runs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import aiohttp

from exporters import until
from pages import get
from ports import free_port

START = 900.0
"""Seconds until an engine must answer; it takes 15 to 45 on an idle machine, and minutes on a busy one."""
STOP = 90.0
ROOT = Path(__file__).parents[3]
CODE = [str(ROOT / "exporter"), str(ROOT / "adapters")]
"""This checkout's packages, whatever the interpreters have installed."""
FOREIGN = ("SIDESTEP_", "VLLM_", "SGLANG_", "PROMETHEUS_", "PYTHONPATH", "COV_")
"""Prefixes of variables that processes do not inherit."""


class Process:
    """A child in a process group of its own, whose output goes to ``log``.

    This checkout's code follows any PYTHONPATH in ``environ``.
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
        """Process id of the child and of its group."""
        return self._child.pid

    @property
    def output(self) -> str:
        """Output so far."""
        return self.log.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Exit code, or None while the child runs."""
        return self._child.poll()

    def send(self, number: int) -> None:
        """Send a signal to the child, not to its group."""
        self._child.send_signal(number)

    async def ready(self, condition: Callable[[], Awaitable[bool]], timeout: float) -> None:
        """Wait for ``condition``; fail at once, with the last output, if the child ends before."""

        async def ended_or_ready() -> bool:
            assert self.code is None, f"ended with {self.code}:\n{self.output[-6000:]}"
            return await condition()

        try:
            await until(ended_or_ready, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output[-6000:]}") from None

    async def stop(self, number: int = signal.SIGTERM, timeout: float = STOP) -> int:
        """Send a signal, wait for the end and return the exit code."""
        if self.code is None:
            self.send(number)
            await until(lambda: self.code is not None, timeout, f"end of {self._child.args!r}")
        return self._child.wait()

    def alive(self) -> list[int]:
        """Return the processes of its group that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError, IndexError):
                    state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                    if int(group) == self.pid and state != "Z":
                        found.append(int(entry.name))
        return found

    def titled(self, text: str) -> list[int]:
        """Return the processes of its group that run and have ``text`` in their command line."""
        found = []
        for pid in self.alive():
            with contextlib.suppress(OSError):
                if text in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                    found.append(pid)
        return found

    def kill(self) -> None:
        """Kill all that is left of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._child.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.stop()
        finally:
            self.kill()


class ExporterProcess(Process):
    """``sidestep serve`` on a free port."""

    def __init__(self, endpoint: str, log: Path, *more: str) -> None:
        self._logged = log.stat().st_size if log.exists() else 0
        flags = ["--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", endpoint]
        flags += ["--shutdown.linger", "0", *more]
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
        """Fetch the metrics page."""
        return await get(self.url)


class Server(Process):
    """An engine that serves HTTP at a port of this host, with a metrics page of its own."""

    def __init__(
        self, port: int, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> None:
        super().__init__(command, environ, log)
        self.port = port
        self.base = f"http://127.0.0.1:{port}"

    async def started(self) -> Self:
        """Wait until it accepts requests."""

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
        """Fetch the engine's own metrics page."""
        return await get(f"{self.base}/metrics")


class VllmServer(Server):
    """vLLM's OpenAI server on the tiny model.

    Args:
        python: The interpreter of vLLM's environment.
        arguments: Arguments in addition to those of every server.
        command: Start ``vllm serve``, which data parallelism requires.
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
        command: bool = False,
        port: int = 0,
    ) -> None:
        port = port or free_port()
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
        super().__init__(port, [*start, *flags, *arguments], settings, log)


def engine_environ(home: Path) -> dict[str, str]:
    """Return the environment of a vLLM on the CPU without network."""
    return {
        **offline(home),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def offline(home: Path) -> dict[str, str]:
    """Return the environment of any engine: no network, files under ``home``, one thread."""
    return {
        "HOME": str(home),
        "TMPDIR": str(home),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def at_start(home: Path, code: str) -> str:
    """Make a folder for PYTHONPATH whose code every interpreter runs at its start."""
    folder = home / "start"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return str(folder)
