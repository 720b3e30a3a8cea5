"""Snapshots: how long the event loop is held at a time, how long they take, how large they are.

Engines have counted steps of a real run's states; requests in flight are spread over them
and each has had output. The peer is the same state through JSON, as Pushgateway-like
exporters write theirs, in one go. A slice ends with the piece in which its millisecond
passes, as in the exporter.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.bench_scrape import add_engine
from benchmarks.steps import Steps
from benchmarks.table import show
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.dialects import DIALECTS
from sidestep.ingest.intake import Intake
from sidestep.metrics.registry import Registry
from sidestep.protocol.request_events import (
    Iteration,
    Output,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.snapshot.capture import Capture, restore
from sidestep.snapshot.schedule import SLICE
from sidestep.snapshot.state_file import StateDirectory
from sidestep.telemetry.self_metrics import SelfMetrics


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument(
        "--requests", type=int, default=65_000, help="in flight, with the most engines"
    )
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    sizes = [(engines, 0) for engines in args.engines]
    sizes.append((max(args.engines), args.requests))
    rows = [measure(fleet(*size), size[1], args.rounds) for size in sizes]
    show(
        "A snapshot: slices of the event loop, and what is beside it; medians in ms",
        [
            "engines",
            "requests",
            "MiB",
            "encode",
            "slice p50",
            "longest",
            "unchanged",
            "write",
            "restore",
            "JSON at once",
        ],
        rows,
    )


def new_intake() -> Intake:
    """One without engines."""
    layouts = {name: compile_layout(name) for name in DIALECTS}
    registry = Registry(layouts, {})
    clock, wall = time.monotonic, time.time
    return Intake(registry, SelfMetrics(), boot=1, clock=clock, wall=wall)


def fleet(engines: int, requests: int) -> Intake:
    """Engines that have worked, and their requests."""
    made = new_intake()
    apply = made.applier.apply
    steps = Steps()
    for _ in range(engines):
        add_engine(made.registry, made.applier, steps)
    for number, engine in enumerate(made.registry.engines.values()):
        own = range(number, requests, engines)
        for start in range(0, len(own), 256):
            some = own[start : start + 256]
            for events in (
                [Queued(n, 1.0, 1.0, 100) for n in some],
                [Scheduled(n, 1.5) for n in some],
                [Iteration(1.5, 2.0 + start, 2.0, [Output(2.0 + start, list(some))])],
            ):
                apply(engine, RequestEvents(0, 2.0, 1, list(events)))
    return made


def measure(of: Intake, requests: int, rounds: int) -> list[str]:
    """One row."""
    capture = Capture(of)
    encodes, slices, unchanged, writes, restores = [], [], [], [], []
    pieces: list[bytes] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        directory = StateDirectory(Path(folder))
        for _ in range(rounds):
            for engine in of.registry.engines.values():
                of.registry.touch(engine)
            pieces, took = sliced(capture)
            slices += took
            encodes.append(sum(took))
            unchanged.append(sum(sliced(capture)[1]))
            writes.append(timed(functools.partial(directory.write, pieces)))
            restores.append(timed(functools.partial(restore, new_intake(), pieces, 0.0)))
        directory.release()
    size = sum(map(len, pieces)) / 2**20
    text = timed(
        lambda: json.dumps(
            [msgspec.to_builtins(msgspec.msgpack.decode(p)) for p in pieces], default=str
        )
    )
    figures = [
        *(statistics.median(encodes), statistics.median(slices), max(slices)),
        *(
            statistics.median(unchanged),
            statistics.median(writes),
            statistics.median(restores),
            text,
        ),
    ]
    return [
        str(len(of.registry.engines)), str(requests), f"{size:.2f}", *(f"{1e3 * f:.2f}" for f in figures)
    ]  # fmt: skip


def sliced(capture: Capture) -> tuple[list[bytes], list[float]]:
    """A snapshot, and how long each of its slices took."""
    pieces, took = [], []
    since = time.perf_counter()
    for piece in capture.pieces():
        pieces.append(piece)
        if time.perf_counter() - since > SLICE:
            took.append(time.perf_counter() - since)
            since = time.perf_counter()
    took.append(time.perf_counter() - since)
    return pieces, took


def timed(call: Callable[[], object]) -> float:
    """Seconds that ``call`` takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
