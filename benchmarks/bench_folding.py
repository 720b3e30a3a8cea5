"""What folding costs an engine: how late its step thread wakes while its exporter is away.

Three engines in turns, one process each: without a publisher, with one whose exporter takes
everything, and with one whose ring is full so that every item is folded. Each sleeps until its
next step is due, pushes a step of 256 latencies that all differ, and notes how late it was: the pause that the
publisher thread, the neighbours and the system cause together. What the first shows is
theirs. ``--fifo`` runs the engines before all other processes (root), so that it is ours alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.process import ExporterProcess
from benchmarks.table import percentile, show
from sidestep.engines.items import VllmStep
from sidestep.engines.vllm.wire import SchedulerStats
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher

KINDS = ("no publisher", "exporter there", "folding")
PAUSE_LIMIT_MS = 0.5


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=int, default=200, help="steps a second")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fifo", action="store_true")
    parser.add_argument("--engine", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(engine(args.engine, args.endpoint, args.rate, args.seconds, args.fifo)))
        return
    found: dict[str, list[dict[str, object]]] = {kind: [] for kind in KINDS}
    for _ in range(args.rounds):
        for kind in KINDS:
            found[kind].append(one(kind, args))
    show(
        f"Step thread at {args.rate} steps/s of 256 latencies; late in us, of {args.rounds} rounds",
        ["", "late p50", "p99", "p99.9", "push p50", "p99", "p99.9", "publisher CPU %", "folded"],
        [row(kind, found[kind]) for kind in KINDS],
    )
    late = [value for result in found["folding"] for value in numbers(result["late"])]
    if percentile(late, 0.99) > PAUSE_LIMIT_MS * 1e3:
        print(f"\nover {PAUSE_LIMIT_MS} ms at p99 while folding")


def one(kind: str, args: argparse.Namespace) -> dict[str, object]:
    """One engine of a process of its own."""
    command = [
        *(sys.executable, "-m", "benchmarks.bench_folding", "--engine", kind),
        *("--rate", str(args.rate), "--seconds", str(args.seconds)),
        *(["--fifo"] if args.fifo else []),
    ]
    if kind == "exporter there":
        with ExporterProcess() as exporter:
            return run([*command, "--endpoint", exporter.endpoint])
    with tempfile.TemporaryDirectory() as folder:
        return run([*command, "--endpoint", f"ipc://{folder}/nobody.ipc"])


def run(command: Sequence[str]) -> dict[str, object]:
    """What an engine has found."""
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def engine(kind: str, endpoint: str, rate: int, seconds: float, fifo: bool) -> dict[str, object]:
    """Step, and note."""
    publisher = None
    if kind != "no publisher":
        described = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})
        publisher = Publisher(endpoint, "s", [described])
        time.sleep(1.0)
    while kind == "folding" and publisher is not None and not publisher.folded:
        # Fill the ring, as an outage of half a minute or so would.
        if publisher.queued < 1000:
            publisher.push(step())
        else:
            time.sleep(0.01)
    if fifo:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    late, push = [], []
    started = cpu_seconds(publisher)
    due = time.perf_counter() + 0.1
    end = due + seconds
    while due < end:
        made = step()
        time.sleep(max(due - time.perf_counter(), 0.0))
        late.append(1e6 * (time.perf_counter() - due))
        before = time.perf_counter()
        if publisher is not None:
            publisher.push(made)
        push.append(1e6 * (time.perf_counter() - before))
        due += 1.0 / rate
    busy = cpu_seconds(publisher)
    folded = publisher.folded if publisher is not None else 0
    return {"late": late, "push": push, "cpu": 100 * (busy - started) / seconds, "folded": folded}


def cpu_seconds(publisher: Publisher | None) -> float:
    """Of the publisher's thread."""
    if publisher is None or publisher._thread is None or publisher._thread.ident is None:
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(publisher._thread.ident))


def step() -> VllmStep:
    """A step whose latencies all differ."""
    now = time.monotonic()
    latencies = [0.01 + 1e-6 * n for n in range(256)]
    found = IterationStats(256, inter_token_latencies_iter=latencies)
    return VllmStep(0, now, now, SchedulerStats(num_running_reqs=256), found)


def row(kind: str, results: Sequence[dict[str, object]]) -> list[str]:
    """One engine's figures."""
    late = [value for result in results for value in numbers(result["late"])]
    push = [value for result in results for value in numbers(result["push"])]
    cpu = sorted(float(str(result["cpu"])) for result in results)[len(results) // 2]
    figures = [percentile(v, share) for v in (late, push) for share in (0.5, 0.99, 0.999)]
    return [kind, *(f"{f:.1f}" for f in figures), f"{cpu:.2f}", str(results[-1]["folded"])]


def numbers(value: object) -> list[float]:
    """A list from JSON."""
    return list(value) if isinstance(value, list) else []


if __name__ == "__main__":
    main()
