"""Processes to measure: an exporter, with its page and its CPU time, and workers.

A worker runs the measured code: it reads a case a line, and writes a result a line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar, final

from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.dialects import DIALECTS
from sidestep.exposition.pages import CACHE_SECONDS

START = 120.0
"""Seconds that an exporter may take until it is ready."""

SERVE = ("-m", "sidestep", "serve")


@final
class ExporterProcess:
    """A running exporter, as a context manager.

    Args:
        command: Arguments of ``python``; the program takes the flags of ``sidestep serve``.
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
        # Without ``_created`` series, which sidestep's text does not have.
        environ = {
            **os.environ,
            "PROMETHEUS_DISABLE_CREATED_SERIES": "true",
            "SIDESTEP_SHUTDOWN_LINGER": "0",
        }
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
        """Fetch the body of a page without decompressing it."""
        request = urllib.request.Request(self.url + path, headers=dict(headers or {}))
        with urllib.request.urlopen(request, timeout=60.0) as response:
            body: bytes = response.read()
        return body

    @property
    def totals(self) -> Mapping[str, float]:
        """Sum of the series of each sample name on a fresh metrics page."""
        # After this time no cached page is served.
        time.sleep(2 * CACHE_SECONDS)
        return totals(self.get("/metrics").decode())

    @property
    def cpu_seconds(self) -> float:
        """User and system time of all threads so far; Linux only."""
        return cpu_seconds(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid


def cpu_seconds(pid: int) -> float:
    """Return user and system time of all threads of a process so far; Linux only."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    # proc_pid_stat(5): the name may hold blanks, and ends with the last parenthesis.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def totals(page: str) -> Mapping[str, float]:
    """Return the sum of the series of each sample name."""
    found: dict[str, float] = defaultdict(float)
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] += float(value)
    return found


def observations(page_totals: Mapping[str, float]) -> int:
    """Return the observations of the engines' histograms, without legacy names."""
    names = (row.name for row in compile_layout(DIALECTS["vllm"]).histograms)
    return int(sum(page_totals.get(f"{name}_count", 0.0) for name in names))


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


VLLM = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "none",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of a process that imports vLLM and measures."""
GAP = 0.005
"""Seconds between two calls, as between two steps of an engine."""
PROCESSES, ROUNDS = 3, 3
"""Processes of each mode, and measurements of each case in a process."""
FLUSHED = 0.3
"""Seconds within which a publisher sends all that was recorded."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Nanoseconds of the calling thread per call with and without gap, and of the process per call.

    Attributes:
        switches: Voluntary context switches of the other threads per call.
        instructions: Instructions of the process per call; 0 if they are not counted.
    """

    gap: list[int]
    process: float = 0.0
    switches: float = 0.0
    instructions: float = 0.0
    hot: list[int] = dataclasses.field(default_factory=list)
    recorded: int = 0


Answer = TypeVar("Answer")
Case = TypeVar("Case")


@final
class Worker:
    """A process that runs ``python -m`` with these arguments, as a context manager."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        inherited = {**os.environ, **VLLM}
        # prometheus_client reads it when it is imported.
        inherited.pop("PROMETHEUS_MULTIPROC_DIR", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, **environ},
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        # Closes the pipes, which ends the worker.
        self._process.communicate(timeout=30.0)

    def run(self, case: Any) -> Result:
        """Measure ``case``, a dataclass."""
        return self.ask(case, Result)

    def ask(self, case: Any, kind: type[Answer]) -> Answer:
        """Measure ``case``, a dataclass, and return the answer as one of ``kind``."""
        to, answers = self._process.stdin, self._process.stdout
        if to is None or answers is None:
            raise RuntimeError("a worker has pipes")
        to.write(json.dumps(dataclasses.asdict(case)) + "\n")
        to.flush()
        answer = answers.readline()
        if not answer:
            raise SystemExit("a worker has died; its error stands above")
        return kind(**json.loads(answer))


def cases(answers: IO[str]) -> Iterator[tuple[dict[str, Any], Callable[[Any], None]]]:
    """Yield each case that a worker is given, and a function for its result, a dataclass."""

    def answer(result: Any) -> None:
        answers.write(json.dumps(dataclasses.asdict(result)) + "\n")
        answers.flush()

    for line in sys.stdin:
        yield json.loads(line), answer


def costs_in_turns(
    kind: type[Answer],
    modes: Sequence[str],
    measured: Sequence[Case],
    start: Callable[[str, str, contextlib.ExitStack], Worker],
    *,
    quick: bool,
) -> dict[tuple[Case, str], Answer]:
    """Measure cases in all modes, in turns, and return the least costs by case and mode.

    What else runs on the machine only adds. So does a process's luck with its memory: two of the same
    code differ by a third where steps are small, in all their rounds.

    Args:
        kind: A dataclass of numbers.
        modes: Names of the modes.
        measured: The cases.
        start: Starts the process of a mode, given the exporter's endpoint.
        quick: Whether one process of each mode is enough.
    """
    found: dict[tuple[Case, str], list[Any]] = {}
    for _ in range(1 if quick else PROCESSES):
        with ExporterProcess() as exporter, contextlib.ExitStack() as stack:
            workers = {mode: start(mode, exporter.endpoint, stack) for mode in modes}
            for case in [*measured] * ROUNDS:
                for mode, worker in workers.items():
                    cost: Any = worker.ask(case, kind)
                    found.setdefault((case, mode), []).append(dataclasses.astuple(cost))
    return {key: kind(*map(min, zip(*costs, strict=True))) for key, costs in found.items()}


def own_output() -> IO[str]:
    """Return the pipe for answers, and redirect all other output to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def effort(quick: bool) -> tuple[int, int]:
    """Return the calls of a round and the number of rounds; a single round may be off by a factor of two."""
    return (40, 3) if quick else (200, 5)


def mean(results: Sequence[Result], *, hot: bool = False) -> float:
    """Return microseconds per call: the mean of the median round, so one disturbed round has no effect."""
    rounds = [result.hot if hot else result.gap for result in results]
    return statistics.median(map(statistics.fmean, rounds)) / 1e3


def process(results: Sequence[Result]) -> float:
    """Return microseconds of the whole process per call, in the median round."""
    return statistics.median(result.process for result in results) / 1e3


def clock_overhead() -> int:
    """Return the nanoseconds of two readings of the thread's clock around an empty call."""
    clock = time.thread_time_ns
    spent = []
    for _ in range(10_000):
        begin = clock()
        _nothing()
        spent.append(clock() - begin)
    return int(statistics.median(spent))


def _nothing() -> None:
    """Do nothing."""


def wait(done: Callable[[], bool]) -> None:
    """Wait until ``done`` holds, for two minutes at most."""
    deadline = time.monotonic() + START
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit("the exporter does not answer")
        time.sleep(0.01)
