"""A real exporter under attack: an honest engine beside the attackers, and measurements of the exporter."""

from __future__ import annotations

import contextlib
import http.client
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from chaos.exporter import ExporterProcess, free_port

from sidestep.engines.vllm.wire import VllmStep
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher

PACE = 0.005
"""Seconds between two steps of the honest engine."""
LOOK = 0.25
"""Seconds between two measurements of the exporter."""
PATIENCE = 30.0
PAUSE = 0.05
MIB = 1 << 20
LIMITS = ("--limits.memory-soft", "256", "--limits.memory-hard", "384")
"""Limits below those of the defaults: libzmq receives more until the watchdog has decided."""


class Honest:
    """An engine that pushes through the real publisher and counts what it pushed.

    Attributes:
        pushed: Tokens so far.
    """

    def __init__(self, endpoint: str) -> None:
        info = EngineInfo("honest", "vllm", {"engine": "honest", "model_name": "m"})
        self._publisher = Publisher(endpoint, "honest", [info], flush_interval=0.02)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.pushed = 0
        self._thread.start()

    def stop(self) -> None:
        """Send everything and close the publisher."""
        self._stop.set()
        self._thread.join()
        self._publisher.close(PATIENCE)

    def _run(self) -> None:
        while not self._stop.wait(PACE):
            step = IterationStats(3, inter_token_latencies_iter=[0.01, 0.02, 0.03])
            self._publisher.push(VllmStep(0, time.monotonic(), time.time(), None, step))
            self.pushed += 3


class Siege:
    """An exporter on a path and a port, with its honest engine.

    Args:
        folder: Folder of its path and its log.
        flags: Flags of ``sidestep serve``.
        pod: Pod in which the exporter is started.

    Attributes:
        lag: Longest delay of its event loop, as it reports it.
        late: Longest delay of the thread that measures, caused by the machine.
        descriptors: Most descriptors that it had open.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str] = LIMITS,
        pod: contextlib.AbstractContextManager[None] = contextlib.nullcontext(),  # noqa: B008
    ) -> None:
        self.path = folder / "ingest.ipc"
        self.port = free_port()
        self.lag = self.late = 0.0
        self.descriptors = 0
        endpoints = (f"ipc://{self.path}", f"tcp://127.0.0.1:{self.port}")
        named = [part for endpoint in endpoints for part in ("--ingest.endpoint", endpoint)]
        self.process = ExporterProcess(folder, [*named, *flags])
        with pod:
            self.process.begin()
        self.process.await_ready()
        self.honest = Honest(endpoints[0])
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()

    @property
    def web_port(self) -> int:
        """Port of the pages."""
        return self.process.port

    def page(self) -> str:
        """Return the metrics page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.web_port, timeout=PATIENCE)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def value(self, family: str, page: str = "") -> float:
        """Return the sum of a family's samples."""
        found = re.findall(rf"^{family}(?:{{[^}}]*}})? (\S+)$", page or self.page(), re.MULTILINE)
        return sum(map(float, found))

    def counted(self) -> int:
        """Return the tokens of the honest engine on the page."""
        name = 'vllm:generation_tokens_total{engine="honest"'
        found = [line for line in self.page().splitlines() if line.startswith(name)]
        return sum(int(line.rpartition(" ")[2]) for line in found)

    def status(self, name: str) -> int:
        """Return a field of the process's status, such as its resident memory, in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
        return 0 if found is None else int(found[1]) * 1024 // MIB

    def open_files(self) -> int:
        """Return the number of descriptors that are open now."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def settled(self, seconds: float = PATIENCE) -> bool:
        """Return whether all tokens that the honest engine has pushed so far arrive in time."""
        wanted = self.honest.pushed
        return self.waits_for(lambda: self.counted() >= wanted, seconds)

    def waits_for(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Return whether ``condition`` becomes true in time; a page that fails is requested again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if condition():
                    return True
            time.sleep(PAUSE)
        return False

    def end(self) -> None:
        """Stop the measurements and the honest engine; the exporter continues."""
        self._stop.set()
        self._watch.join()
        self.honest.stop()

    def _look(self) -> None:
        due = time.monotonic() + LOOK
        while not self._stop.wait(LOOK):
            self.late = max(self.late, time.monotonic() - due)
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.descriptors = max(self.descriptors, self.open_files())
                self.lag = max(self.lag, self.value("sidestep_loop_lag_seconds"))
            due = time.monotonic() + LOOK


@contextlib.contextmanager
def besieged(flags: Sequence[str] = LIMITS) -> Iterator[Siege]:
    """Run a siege in a directory of its own, and kill the exporter at the end."""
    with tempfile.TemporaryDirectory() as directory:
        siege = Siege(Path(directory), flags)
        try:
            yield siege
        finally:
            siege._stop.set()
            siege.end()
            siege.process.kill()
