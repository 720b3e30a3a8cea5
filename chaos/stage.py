"""What a fault happens to: an exporter, an engine that pushes to it, and a scraper that watches."""

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

from chaos.engine import COUNT
from chaos.exporter import ExporterProcess, free_port, keys
from chaos.proxy import ProxyThread
from chaos.traffic import ENGINES, MODEL, Traffic
from chaos.watch import Watch

PATIENCE = 60.0
"""Seconds for anything that must happen in the end."""
LOOK = 0.02
ROOT = Path(__file__).parents[1]
SETTLED = 0.5
"""Seconds for which a page must stay the same to be the last one."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run was asked for.

    Attributes:
        state: Whether the exporter keeps its state in a directory.
        quick: Short times, for a look and for CI.
        work: Microseconds of Python that the engine's step thread does an item.
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
        seed: Of its traffic.
        source: Likewise; the first process of a stream is 1.
    """

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        options: Options,
        source: int,
        environ: Mapping[str, str],
    ) -> None:
        self.seed = options.seed + source
        self.source = source
        self._progress = folder / f"pushed-{source}"
        command = [sys.executable, "-m", "chaos.engine", "--endpoint", endpoint]
        command += ["--seed", str(self.seed), "--source", str(source)]
        command += ["--rate", str(options.rate), "--work", str(options.work)]
        command += ["--progress", str(self._progress)]
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
        """Items, as its file says: also of one that is dead."""
        return int(COUNT.unpack(self._progress.read_bytes())[0])

    @property
    def growth(self) -> int:
        """Bytes of resident memory since it was started."""
        return self._resident() - self.resident

    def ask(self, command: str) -> dict[str, Any]:
        """Its answer to a command; see ``chaos.engine``.

        Raises:
            RuntimeError: It is gone.
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
        """Where it stands."""
        return self.ask("report")

    def stop(self) -> dict[str, Any]:
        """Drain, say goodbye, end; its last report."""
        report = self.ask("stop")
        self._process.wait(30.0)
        self._close()
        return report

    def kill(self) -> None:
        """``kill -9``."""
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
        expected: What engines that are dead by now have put on the page.
        recoveries: Seconds from an exporter's start until all series were back.
        growth: Bytes by which an engine's resident memory grew at most.
        notes: What a reader of the figures should know.
        broken: Promises of the fault's own that did not hold.
        reset: Whether an exporter ended that nobody kept the state of.
        rounds: How often the fault happened.
        items: What of engines that are dead by now has arrived.
        unsent: Items that each of them took along.
        disk: Whether the state directory is a small disk of its own.
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
        self.unsent: list[int] = []
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
        """Let it go on, and note how the engine's memory grows."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.growth = max(self.growth, self.engine.growth)
            time.sleep(min(left, 0.1))

    def between(self, least: float, most: float) -> float:
        """A time by the seed."""
        return self.random.uniform(least, most)

    def wait_for(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Whether ``condition`` came to hold in time."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                return False
            self.wait(LOOK)
        return True

    def drained(self) -> bool:
        """Whether the exporter has said that it has all of the engine's."""
        report = self.engine.report()
        return bool(report["connected"] and report["drained"])

    def lose_exporter(self, *, kill: bool = True) -> None:
        """The exporter ends, by SIGKILL or SIGTERM."""
        self.reset = self.reset or not self.options.state
        if kill:
            self.exporter.kill()
        else:
            self.exporter.terminate()

    def revive(self, known: str = "") -> None:
        """Start an exporter in place of one that nobody ended, as an orchestrator would.

        Args:
            known: What it says last where that is nobody's here to mend.
        """
        if not self.exporter.running:
            last = " ".join(self.exporter.said().splitlines()[-1:])
            said = self.notes if known and known in last else self.broken
            said.append(f"the exporter died: {last}")
            self.reset = self.reset or not self.options.state
            self.restore_exporter()

    def restore_exporter(self) -> None:
        """Another one starts; note how long it takes until every series is back."""
        wanted = self.watch.page.keys()
        started = self.exporter.start()
        back = self.wait_for(lambda: self.watch.at > started and wanted <= self.watch.page.keys())
        if back:
            self.recoveries.append(self.watch.at - started)
        else:
            self.broken.append(f"not all series were back {PATIENCE:.0f} s after a restart")

    def replace_engine(self) -> None:
        """Another process of the same stream."""
        self.engine = self._engine(self.engine.source + 1)

    def settled(self) -> Mapping[str, float]:
        """The page once it has stopped changing."""
        page, since = self.watch.page, time.monotonic()
        deadline = since + PATIENCE
        while time.monotonic() < min(since + SETTLED, deadline):
            time.sleep(LOOK)
            if self.watch.page != page:
                page, since = self.watch.page, time.monotonic()
        return page

    def put(self, traffic: Traffic, items: int, *, died: bool) -> None:
        """The page owes these items of an engine that is dead."""
        for key, value in shown(traffic, items, died=died).items():
            self.expected[key] = self.expected.get(key, 0.0) + value

    @property
    def endpoint(self) -> str:
        """Where the exporter listens."""
        return self._endpoint

    def _engine(self, source: int) -> EngineProcess:
        return EngineProcess(self.folder, self._near, self.options, source, self._environ)

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
    """What a page shows for the first ``items`` of a process."""
    tallies = traffic.tallies(items, died=died)
    pages = (tally.page(engine, MODEL) for tally, engine in zip(tallies, ENGINES, strict=True))
    return {key: value for page in pages for key, value in page.items()}
