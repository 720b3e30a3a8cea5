"""Processes of a run: an exporter, an engine that pushes to it, and a scraper that watches."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, final

from chaos.cores import waited
from chaos.engine import COUNT, STAMPS, stamp_offset
from chaos.exporter import ExporterProcess, free_port, keys
from chaos.proxy import ProxyThread
from chaos.traffic import ENGINES, MODEL, Traffic
from chaos.verdict import LEARNED
from chaos.watch import Watch

PATIENCE = 60.0
"""Most seconds for anything that must happen."""
LOOK = 0.02
ROOT = Path(__file__).parents[1]
REPEATED = 0.2
"""Twice the seconds for which the exporter may repeat a page that it has rendered."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        state: Whether the exporter has a state directory.
        quick: Short times, for a quick check and for CI.
        work: Microseconds of Python for which the engine's step thread works on each item.
    """

    transport: str = "ipc"
    rate: float = 2000.0
    seed: int = 1
    rounds: int = 5
    quick: bool = False
    state: bool = False
    work: float = 0.0


class EngineProcess:
    """The process that pushes.

    Attributes:
        seed: Seed of its traffic.
        source: Number of the process in its stream, from 1.
        waited: Seconds for which its threads waited for a core, once it is dead.
    """

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        options: Options,
        source: int,
        environ: Mapping[str, str],
        *,
        hold: bool = False,
    ) -> None:
        self.seed = options.seed + source
        self.source = source
        self.waited = 0.0
        self._progress = folder / f"pushed-{source}"
        command = [sys.executable, "-m", "chaos.engine", "--endpoint", endpoint]
        command += ["--seed", str(self.seed), "--source", str(source)]
        command += ["--rate", str(options.rate), "--work", str(options.work)]
        command += ["--progress", str(self._progress), *(["--hold"] if hold else [])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environ},
        )
        self.report()
        self.resident = self._resident()

    @property
    def pushed(self) -> int:
        """Return the number of pushed items, from the file that outlives the process."""
        return int(COUNT.unpack_from(self._progress.read_bytes())[0])

    def unsent(self, arrived: int) -> float:
        """Return the seconds between the pushes of the first item that did not arrive and the last one.

        The number of items would not do: an engine that got no core pushes many items at once.
        """
        progress, last = self._progress.read_bytes(), self.pushed - 1
        if arrived > last:
            return 0.0
        first = max(arrived, last - STAMPS + 1)
        begin, end = (COUNT.unpack_from(progress, stamp_offset(item))[0] for item in (first, last))
        return float(end - begin) / 1e9

    @property
    def growth(self) -> int:
        """Return the growth of resident memory since the start, in bytes."""
        return self._resident() - self.resident

    @property
    def waiting(self) -> float:
        """Return the seconds that its threads have waited for a core."""
        return waited(self._process.pid)

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return the answer; see ``chaos.engine``.

        Raises:
            RuntimeError: The engine has ended.
        """
        to, answers = self._process.stdin, self._process.stdout
        if to is None or answers is None:
            raise RuntimeError("an engine has pipes")
        to.write(f"{command}\n")
        to.flush()
        line = answers.readline()
        if not line:
            raise RuntimeError("the engine has died; its error stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def report(self) -> dict[str, Any]:
        """Return the engine's report."""
        return self.ask("report")

    def stop(self) -> dict[str, Any]:
        """Drain, close and end the engine; return its last report."""
        report = self.ask("stop")
        self._process.wait(30.0)
        self._close()
        return report

    def kill(self) -> None:
        """Send SIGKILL."""
        self.waited = self.waiting
        self._process.kill()
        self._process.wait()
        self._close()

    def _resident(self) -> int:
        statm = Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii")
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@final
class Stage:
    """All processes of one run of one fault; use it as a context.

    Attributes:
        expected: Counts of dead engines that the page must have.
        recoveries: Seconds from an exporter's start until all series were back.
        growth: Most bytes by which an engine's resident memory grew.
        notes: Remarks for readers of the figures.
        broken: Promises of this fault that did not hold.
        reset: Whether an exporter without a state directory has ended.
        rounds: Number of times that the fault happened.
        items: Items of dead engines that have arrived.
        unsent: Seconds of items that were lost with each dead engine.
        waited: Seconds for which threads of dead processes waited for a core.
        disk: Whether the state directory is a small disk.
    """

    def __init__(self, folder: Path, options: Options, *, proxied: bool = False) -> None:
        self.folder = folder
        self.options = options
        self.random = Random(options.seed)
        self.state = folder / "state"
        self.expected: dict[str, float] = {}
        self.recoveries: list[float] = []
        self.notes: list[str] = []
        self.broken: list[str] = []
        self.unsent: list[float] = []
        self.waited = 0.0
        self.growth = self.rounds = self.items = 0
        self.reset = self.disk = False
        self._environ: Mapping[str, str] = {}
        flags = self._flags()
        self.exporter = ExporterProcess(folder, flags)
        self.proxy: ProxyThread | None = None
        self._near = self.endpoint
        if proxied:
            ipc = self.endpoint.startswith("ipc://")
            near = f"ipc://{folder}/proxy.ipc" if ipc else "tcp://127.0.0.1:0"
            self.proxy = ProxyThread(near, self.endpoint, options.seed)
            self._near = self.proxy.proxy.near

    def __enter__(self) -> Stage:
        self.state.mkdir(exist_ok=True)
        self.exporter.start()
        self.watch = Watch(self.exporter.port, MODEL)
        self.engine = self._engine(1)
        self.wait_for(lambda: bool(self.watch.page))
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.engine.kill()
        self.watch.close()
        if self.exporter.running:
            self.exporter.kill()
        if self.proxy is not None:
            self.proxy.close()

    def wait(self, seconds: float) -> None:
        """Wait, and record the growth of the engine's memory."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.growth = max(self.growth, self.engine.growth)
            time.sleep(min(left, 0.1))

    def between(self, least: float, most: float) -> float:
        """Return a random time, by the seed."""
        return self.random.uniform(least, most)

    def wait_for(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Return whether ``condition`` became true in time."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                return False
            self.wait(LOOK)
        return True

    def drained(self) -> bool:
        """Return whether the exporter has acknowledged all items of the engine."""
        report = self.engine.report()
        return bool(report["connected"] and report["drained"])

    def lose_exporter(self, *, kill: bool = True) -> None:
        """End the exporter with SIGKILL or SIGTERM."""
        self.reset = self.reset or not self.options.state
        self.waited += waited(self.exporter.pid)
        if kill:
            self.exporter.kill()
        else:
            self.exporter.terminate()

    def revive(self, known: str = "") -> None:
        """Start an exporter if it died by itself, as an orchestrator would.

        Args:
            known: Last words of its log that are a known failure of a library.
        """
        if not self.exporter.running:
            last = " ".join(self.exporter.said().splitlines()[-1:])
            said = self.notes if known and known in last else self.broken
            said.append(f"the exporter died: {last}")
            self.reset = self.reset or not self.options.state
            self.restore_exporter()

    def restore_exporter(self) -> None:
        """Start another exporter; measure the time until every series is back."""
        # A part that few requests have may not come again.
        wanted = {series for series in self.watch.page if not series.startswith(LEARNED)}
        started = self.exporter.start()
        back = self.wait_for(lambda: self.watch.at > started and wanted <= self.watch.page.keys())
        if back:
            self.recoveries.append(self.watch.at - started)
        else:
            self.broken.append(f"not all series were back {PATIENCE:.0f} s after a restart")

    def replace_engine(self) -> None:
        """Start another process of the same stream, which pushes nothing before ``go``.

        Once it is connected, the exporter applies no more items of its predecessor.
        """
        self.engine = self._engine(self.engine.source + 1, hold=True)
        if not self.wait_for(lambda: bool(self.engine.report()["connected"])):
            self.broken.append(f"an engine's successor was not connected within {PATIENCE:.0f} s")

    def fresh_page(self) -> Mapping[str, float]:
        """Return a page that was rendered after this call.

        It has all that the exporter had acknowledged before, even on a busy machine.
        """
        after = time.monotonic() + REPEATED
        if not self.wait_for(lambda: self.watch.requested > after):
            self.broken.append(f"no page within {PATIENCE:.0f} s")
        return self.watch.page

    def put(self, traffic: Traffic, items: int, *, died: bool) -> None:
        """Add items of a dead engine to those that the page must have."""
        for key, value in shown(traffic, items, died=died).items():
            self.expected[key] = self.expected.get(key, 0.0) + value

    @property
    def endpoint(self) -> str:
        """Endpoint of the exporter."""
        return self._endpoint

    def _engine(self, source: int, *, hold: bool = False) -> EngineProcess:
        return EngineProcess(
            self.folder, self._near, self.options, source, self._environ, hold=hold
        )

    def _flags(self) -> Sequence[str]:
        flags: list[str] = []
        if self.options.transport == "ipc":
            self._endpoint = f"ipc://{self.folder}/ingest/ingest.ipc"
        else:
            self._endpoint = f"tcp://127.0.0.1:{free_port()}"
        if self.options.transport == "curve":
            flags, self._environ = keys(self.folder)
        if self.options.state:
            flags = [*flags, "--state.dir", str(self.state)]
        return [*flags, "--ingest.endpoint", self._endpoint]


def shown(traffic: Traffic, items: int, *, died: bool = False) -> dict[str, float]:
    """Return the values of a page for the first ``items`` of a process."""
    tallies = traffic.tallies(items, died=died)
    pages = (tally.page(engine, MODEL) for tally, engine in zip(tallies, ENGINES, strict=True))
    return {key: value for page in pages for key, value in page.items()}
