"""The peer that engines with several processes use: prometheus_client's multiprocess mode.

Processes are forked one after the other, each counts some steps of an engine of its own into
its files, and ends; all files are merged at a scrape, by ``MultiProcessCollector``. What
counting takes is measured in one of them: it does not depend on how many others there are. So
values a second of a core are those of counting, plus one merge a second, at the rate that
sidestep is fed with: ``RATE`` steps a second over all engines.
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
from types import SimpleNamespace

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
from sidestep.metrics.registry import Registry

PROCESSES = (8, 64, 256)
PEER = "prometheus_client, multiprocess"
VALUES = 256
RATE = 2000.0
STEPS = 3
"""Counted by each process."""
MEASURED = 200
"""And by the one that is measured."""


def page(processes: int) -> str:
    """The name of the row about a page."""
    return f"page of {processes} processes' engines, all dirty"


def counting(processes: int) -> str:
    """The name of the row about values."""
    return f"{processes} processes, {VALUES} values a step, {RATE:,.0f} steps/s, a scrape a second"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Milliseconds of CPU a page; million values a second of all CPU time spent on them."""
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
    """CPU seconds that counting a step takes, and milliseconds that a page does."""
    with tempfile.TemporaryDirectory(prefix="bench-multiprocess-") as folder:
        step = counted(folder, processes)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
        spent = [milliseconds(lambda: generate_latest(registry)) for _ in range(rounds)]
    return step, statistics.median(spent)


def counted(folder: str, processes: int) -> float:
    """Let processes leave their files in ``folder``; CPU seconds that counting a step took."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.summary.multiprocess", str(processes)],
        # prometheus_client reads it when it is imported.
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder},
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(json.loads(done.stdout))


def main() -> None:
    """Fork the processes; the last tells what its steps took."""
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
    """Be one process: CPU seconds a step, of the second half."""
    layout = compile_layout(DIALECTS["vllm"])
    metrics = ClientMetrics(layout)
    engine = Registry({"vllm": layout}, {}).register(engine_info(number))
    made = [
        SimpleNamespace(scheduler=scheduler, iteration=steps.iteration(VALUES, 1), mm_cache=None)
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
