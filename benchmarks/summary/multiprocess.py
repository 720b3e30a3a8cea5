"""The peer for engines with several processes: prometheus_client's multiprocess mode.

Processes are forked one after the other; each counts some steps of an engine into its files
and ends. A scrape merges all files with ``MultiProcessCollector``. The cost of counting is
measured in one process, as it does not depend on the others. Values per second of a core
include the counting and one merge a second, at sidestep's rate of ``RATE`` steps a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from benchmarks.client import ClientMetrics
from benchmarks.process import SERVE
from benchmarks.steps import Steps, engine_info
from benchmarks.summary.ingest import Feed
from benchmarks.summary.pages import costs, fleet, milliseconds
from benchmarks.summary.rows import LEFT_OUT, Figure, Row, Topic
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.vllm.wire import VllmStep
from sidestep.metrics.registry import Registry

PROCESSES = (8, 64, 256)
PEER = "prometheus_client, multiprocess"
VALUES = 256
RATE = 2000.0
STEPS = 3
"""Steps that each process counts."""
MEASURED = 200
"""Steps that the measured process counts."""


def page(processes: int) -> str:
    """Return the name of the row about a page."""
    return f"page of {processes} processes' engines, all dirty"


def counting(processes: int) -> str:
    """Return the name of the row about values."""
    return f"{processes} processes, {VALUES} values a step, {RATE:,.0f} steps/s, a scrape a second"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return milliseconds of CPU per page, and million values per second of CPU time."""
    feed = Feed(VALUES, 1, "recorded")
    found = {}
    for processes in PROCESSES:
        if quick and processes == PROCESSES[-1]:
            found[page(processes)] = found[counting(processes)] = Figure(why=LEFT_OUT)
            continue
        rounds = 1 if quick else 3
        step, merge = merged(processes, rounds)
        found[page(processes)] = Figure(costs(fleet(processes), rounds)["all dirty"], merge)
        run = feed.run(SERVE, processes, RATE, 1.5 if quick else 5.0, 1.0)
        values = RATE * run.observed / run.steps
        found[counting(processes)] = Figure(
            run.per_core / 1e6, values / (RATE * step + merge / 1e3) / 1e6
        )
    return found


def merged(processes: int, rounds: int) -> tuple[float, float]:
    """Return the CPU seconds of counting a step, and the milliseconds of a page."""
    with tempfile.TemporaryDirectory(prefix="bench-multiprocess-") as folder:
        step = counted(folder, processes)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
        spent = [milliseconds(lambda: generate_latest(registry)) for _ in range(rounds)]
    return step, statistics.median(spent)


def counted(folder: str, processes: int) -> float:
    """Let processes write their files in ``folder``; return the CPU seconds of counting a step."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.summary.multiprocess", str(processes)],
        # prometheus_client reads it when it is imported.
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder},
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(json.loads(done.stdout))


def main() -> None:
    """Fork the processes; the last prints the cost of its steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("processes", type=int)
    args = parser.parse_args()
    steps = Steps()
    for number in range(args.processes):
        last = number == args.processes - 1
        child = os.fork()
        if not child:
            spent = count(steps, number, MEASURED if last else STEPS)
            if last:
                print(json.dumps(spent), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit("a process that counts has failed; its error stands above")


def count(steps: Steps, number: int, calls: int) -> float:
    """Count as one process; return the CPU seconds per step of the second half."""
    layout = compile_layout(DIALECTS["vllm"])
    metrics = ClientMetrics(layout)
    engine = Registry({"vllm": layout}).register(engine_info(number))
    made = [
        VllmStep(0, 0.0, 0.0, scheduler, steps.iteration(VALUES, 1))
        for scheduler in steps.schedulers[20 : 20 + calls]
    ]
    spent = []
    for call in range(calls):
        started = time.thread_time_ns()
        metrics.record(engine, made[call % len(made)])
        spent.append((time.thread_time_ns() - started) / 1e9)
    return statistics.fmean(spent[calls // 2 :])


MULTIPROCESS = Topic(
    "Many processes: counting and merging",
    (
        *(Row(page(processes), "ms", PEER) for processes in PROCESSES),
        *(Row(counting(processes), "M values/s", PEER, more=True) for processes in PROCESSES),
    ),
    measure,
)

if __name__ == "__main__":
    main()
