"""The exporter's process: started, queried, killed, stopped and continued."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sidestep.config.settings import SETTINGS

START = 120.0
PAUSE = 0.01


class ExporterProcess:
    """An exporter whose process changes; address, flags and log file stay.

    Args:
        folder: Folder of its log.
        flags: Flags of ``sidestep serve``, after those for address and log.
        path: Path that engines connect to, for an exporter that serves no pages.
    """

    def __init__(self, folder: Path, flags: Sequence[str], path: Path | None = None) -> None:
        self.log = folder / "exporter.log"
        self.port = free_port()
        self._flags = list(flags)
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Id of the running process.

        Raises:
            RuntimeError: No process runs.
        """
        if self._process is None:
            raise RuntimeError("no exporter runs")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Return whether a process runs or is stopped."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> float:
        """Start a process and wait until it is ready; return the monotonic time of its start.

        Raises:
            RuntimeError: It has ended, or is not ready in time.
        """
        started = self.begin()
        self.await_ready()
        return started

    def await_ready(self) -> None:
        """Wait until the process that was begun is ready.

        Raises:
            RuntimeError: It has ended, or is not ready in time.
        """
        deadline = time.monotonic() + START
        while not self.ready():
            if not self.running or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the exporter does not start: {self.said()[-600:]}")
            time.sleep(PAUSE)

    def begin(self) -> float:
        """Start a process without waiting for it; return the monotonic time."""
        command = [sys.executable, "-m", "sidestep", "serve", *self._flags]
        address = f"127.0.0.1:{self.port}" if self._path is None else ""
        command += ["--web.listen-address", address]
        command += ["--log.stats-interval", "0", "--log.level", "info"]
        started = time.monotonic()
        environ = {**os.environ, "SIDESTEP_SHUTDOWN_LINGER": "0"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        return started

    def ready(self) -> bool:
        """Return whether ``/-/ready`` succeeds, or the socket exists where no pages are served."""
        if self._path is not None:
            return self._path.is_socket()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        try:
            connection.request("GET", "/-/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM, and wait until the process has ended."""
        self._end(signal.SIGTERM)

    def halt(self) -> None:
        """Send SIGSTOP: the process keeps its sockets."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def said(self, since: int = 0) -> str:
        """Return what the process has logged, from byte ``since`` on."""
        with contextlib.suppress(FileNotFoundError):
            return self.log.read_bytes()[since:].decode(errors="replace")
        return ""

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def knows(flag: str) -> bool:
    """Return whether this release has a setting of that name."""
    return any(setting.flag == flag for setting in SETTINGS)


def free_port() -> int:
    """Return a port that is free at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def keys(folder: Path) -> tuple[list[str], Mapping[str, str]]:
    """Return key pairs for both ends: the exporter's flags, and the engine's environment."""
    for name in ("exporter", "engine"):
        command = [sys.executable, "-m", "sidestep", "keygen", "--out", str(folder), name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    authorized = folder / "authorized"
    authorized.mkdir()
    (folder / "engine.pub").rename(authorized / "engine.pub")
    flags = ["--ingest.curve-key", str(folder / "exporter.key")]
    flags += ["--ingest.authorized-keys", str(authorized)]
    return flags, {
        "SIDESTEP_SERVER_KEY": str(folder / "exporter.pub"),
        "SIDESTEP_CLIENT_KEY": str(folder / "engine.key"),
    }
