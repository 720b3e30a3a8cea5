"""An exporter process to measure: started, asked for its page and its CPU time, stopped."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import final

from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.dialects import DIALECTS
from sidestep.exposition.page_cache import CACHE_SECONDS

START = 30.0
"""Seconds that an exporter may take until it is ready."""

SERVE = ("-m", "sidestep", "serve")


@final
class ExporterProcess:
    """A running exporter; use it as a context.

    Args:
        command: What follows ``python``; takes the flags of ``sidestep serve``.
    """

    def __init__(self, command: Sequence[str] = SERVE) -> None:
        self._folder = tempfile.mkdtemp(prefix="bench-")
        self.endpoint = f"ipc://{self._folder}/ingest.ipc"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        flags = {
            "ingest.endpoint": self.endpoint,
            "web.listen-address": f"127.0.0.1:{port}",
            "log.stats-interval": "0",
            "log.level": "warning",
        }
        given = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
        # What the peer would show beside, sidestep does not have in text either.
        environ = {**os.environ, "PROMETHEUS_DISABLE_CREATED_SERIES": "true"}
        self._process = subprocess.Popen([sys.executable, *command, *given], env=environ)

    def __enter__(self) -> ExporterProcess:
        deadline = time.monotonic() + START
        while True:
            try:
                self.get("/-/ready")
            except (urllib.error.URLError, ConnectionError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        """The body of a page, as it travels."""
        request = urllib.request.Request(self.url + path, headers=dict(headers or {}))
        with urllib.request.urlopen(request, timeout=60.0) as response:
            body: bytes = response.read()
        return body

    @property
    def totals(self) -> Mapping[str, float]:
        """The metrics page as of now: per sample name the sum over its series."""
        # No page answers any more that was made before.
        time.sleep(2 * CACHE_SECONDS)
        return totals(self.get("/metrics").decode())

    @property
    def cpu_seconds(self) -> float:
        """User and system time of all threads so far; Linux only."""
        return cpu_seconds(self._process.pid)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process so far; Linux only."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    # proc_pid_stat(5): the name may hold blanks, and ends with the last parenthesis.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def totals(page: str) -> Mapping[str, float]:
    """Per sample name the sum over its series."""
    found: dict[str, float] = defaultdict(float)
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] += float(value)
    return found


def observations(page_totals: Mapping[str, float]) -> int:
    """Values that the engines' histograms have counted; a second name of one does not count."""
    names = (row.name for row in compile_layout(DIALECTS["vllm"]).histograms)
    return int(sum(page_totals.get(f"{name}_count", 0.0) for name in names))


def free_port() -> int:
    """One that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
