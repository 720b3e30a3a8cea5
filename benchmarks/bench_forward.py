"""Forwarding: what it costs whoever tells and whoever is told, and how long it holds their loops.

Engines have counted steps of a real run's states; between two rounds every series of each has
changed. A slice at the teller ends with the record in which its millisecond
passes, as in the exporter; at the root a record takes some turns. The peer is what a federating
Prometheus, or a router, would do instead: render the text page and parse it.
"""

from __future__ import annotations

import argparse
import statistics
import time

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.bench_scrape import dirty
from benchmarks.bench_snapshot import fleet, new_intake
from benchmarks.table import percentile, show
from sidestep.engines.items import Family, Sample, Samples
from sidestep.exposition.text_page import render
from sidestep.federation.computed_records import Present
from sidestep.federation.messages import encode_forward, new_epoch
from sidestep.federation.outbox import Outbox
from sidestep.ingest.intake import Intake
from sidestep.metrics.self_described import add_samples
from sidestep.telemetry.cooperative import SLICE
from sidestep.transport.process import calm_collector

BOUNDS = tuple(2.0**power for power in range(-10, 10))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    show(
        "Telling of all engines once: ms of CPU, medians of rounds; slices and turns in ms by the clock",
        [
            "engines",
            "KiB a record",
            "tell",
            "its slices p50",
            "p99",
            "be told",
            "a turn p50",
            "p99",
            "again unchanged",
            "render and parse",
        ],
        [measure(engines, args.rounds) for engines in args.engines],
    )
    print()
    show(
        "What holds the loop: ms of CPU; slices downstream, turns upstream, in the order of records",
        ["of", "records", "a record", "p50", "p99", "longest"],
        [
            ["downstream, 256 engines", *spread(*telling(256, args.rounds))],
            ["upstream, one busy engine", *spread(*receiving(args.rounds))],
            ["upstream, 1,800 self-described series", *spread(*large(args.rounds))],
            ["upstream, a new epoch each time", *spread(*restarting(40))],
        ],
    )


def measure(engines: int, rounds: int) -> list[str]:
    """One row."""
    leaf, root = fleet(engines, 0), new_intake()
    outbox = Outbox(leaf, "leaf", Present(), {})
    tell: list[float] = []
    told: list[float] = []
    again: list[float] = []
    slices: list[float] = []
    turns: list[float] = []
    size = 0
    calm_collector()
    for _ in range(rounds):
        dirty(leaf.registry, leaf.registry.engines.values())
        frames: list[bytes] = []
        started, since = time.process_time(), time.perf_counter()
        for due in outbox.mine(time.monotonic()):
            if due is not None:
                frames.append(encode_forward(due.message))
                outbox.sent(due, time.monotonic())
            if time.perf_counter() - since > SLICE:
                slices.append(time.perf_counter() - since)
                since = time.perf_counter()
        tell.append(time.process_time() - started)
        size = sum(map(len, frames))
        told.append(take(root, frames, turns))
        outbox.renew()
        same = [due for due in outbox.mine(time.monotonic()) if due is not None]
        again.append(take(root, [encode_forward(due.message) for due in same], []))
    started = time.process_time()
    for _ in text_string_to_metric_families(render(leaf.registry).decode()):
        pass
    peer = time.process_time() - started
    return [
        str(engines),
        f"{size / engines / 1024:.1f}",
        ms(statistics.median(tell)),
        ms(percentile(slices, 0.5)) if slices else "-",
        ms(percentile(slices, 0.99)) if slices else "-",
        ms(statistics.median(told)),
        ms(percentile(turns, 0.5)),
        ms(percentile(turns, 0.99)),
        ms(statistics.median(again)),
        ms(peer),
    ]


def telling(engines: int, rounds: int) -> tuple[int, float, list[float]]:
    """Records, ms of CPU of all, and seconds of each slice of a leaf that tells of ``engines``."""
    leaf = fleet(engines, 0)
    outbox = Outbox(leaf, "leaf", Present(), {})
    slices: list[float] = []
    records = 0
    for _ in range(rounds):
        dirty(leaf.registry, leaf.registry.engines.values())
        since = time.thread_time()
        for due in outbox.mine(time.monotonic()):
            if due is not None:
                records += 1
                encode_forward(due.message)
                outbox.sent(due, time.monotonic())
            if time.thread_time() - since > SLICE:
                slices.append(time.thread_time() - since)
                since = time.thread_time()
        slices.append(time.thread_time() - since)
    return records, sum(slices), slices


def receiving(rounds: int) -> tuple[int, float, list[float]]:
    """Likewise of turns upstream, for one engine of which every series has changed."""
    leaf, root = fleet(1, 0), new_intake()
    outbox = Outbox(leaf, "leaf", Present(), {})
    turns: list[float] = []
    for _ in range(rounds):
        dirty(leaf.registry, leaf.registry.engines.values())
        for frame in frames_of(outbox):
            turns += turns_of(root, frame)
    return rounds, sum(turns), turns


def large(rounds: int) -> tuple[int, float, list[float]]:
    """Likewise of records of an engine with nearly as many series as one may have."""
    leaf, root = fleet(1, 0), new_intake()
    (engine,) = leaf.registry.engines.values()
    for number in range(28):
        own = Family(f"own_{number}_seconds", "histogram", ["k"], help="H", bounds=[*BOUNDS])
        own.samples = [Sample([f"v{child}"], observations=[0.3, 3.0]) for child in range(64)]
        add_samples(leaf.registry, engine, Samples(0, 1.0, [own]))
    outbox = Outbox(leaf, "leaf", Present(), {})
    turns: list[float] = []
    for _ in range(rounds):
        dirty(leaf.registry, [engine])
        for frame in frames_of(outbox):
            turns += turns_of(root, frame)
    return rounds, sum(turns), turns


def restarting(processes: int) -> tuple[int, float, list[float]]:
    """Likewise of processes that follow each other under one name, of which each begins at 0."""
    leaf, root = fleet(1, 0), new_intake()
    turns: list[float] = []
    for number in range(processes):
        leaf.epoch = new_epoch(time.time() + number, number)
        for frame in frames_of(Outbox(leaf, "leaf", Present(), {})):
            turns += turns_of(root, frame)
    return processes, sum(turns), turns


def frames_of(outbox: Outbox) -> list[bytes]:
    """All that is to be told now, each record in one frame."""
    found: list[bytes] = []
    for due in outbox.mine(time.monotonic()):
        if due is not None:
            found.append(encode_forward(due.message))
            outbox.sent(due, time.monotonic())
    return found


def turns_of(root: Intake, frame: bytes) -> list[float]:
    """Seconds of CPU of each turn that ``frame`` takes."""
    root.take(b"leaf", [frame], time.monotonic())
    return rest_of(root)


def rest_of(root: Intake) -> list[float]:
    """Likewise of all that waits."""
    found: list[float] = []
    while root.busy:
        since = time.thread_time()
        root.work()
        found.append(time.thread_time() - since)
    return found


def spread(records: int, seconds: float, slices: list[float]) -> list[str]:
    """Cells of a row."""
    return [
        f"{records:,}",
        ms(seconds / records),
        ms(percentile(slices, 0.5)),
        ms(percentile(slices, 0.99)),
        ms(max(slices)),
    ]


def take(root: Intake, frames: list[bytes], turns: list[float]) -> float:
    """Be told all of ``frames``; seconds of CPU."""
    started = time.process_time()
    for frame in frames:
        root.take(b"leaf", [frame], time.monotonic())
        while root.busy:
            since = time.perf_counter()
            root.work()
            turns.append(time.perf_counter() - since)
    return time.process_time() - started


def ms(seconds: float) -> str:
    """For the table."""
    return f"{seconds * 1e3:.2f}"


if __name__ == "__main__":
    main()
