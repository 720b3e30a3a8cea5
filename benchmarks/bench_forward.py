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
from sidestep.exposition.text_page import render
from sidestep.federation.computed_records import Present
from sidestep.federation.lives import MAX_LIVES, new_life
from sidestep.federation.messages import encode_forward
from sidestep.federation.outbox import Outbox
from sidestep.ingest.intake import Intake
from sidestep.metrics.self_described import add_samples
from sidestep.protocol.self_described import Family, Sample, Samples
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
        "What holds the loop: ms of CPU; slices at a leaf, turns at a root, in the order of records",
        ["of", "records", "a record", "p50", "p99", "longest"],
        [
            ["a leaf that tells of 256 engines", *spread(*telling(256, args.rounds))],
            *(
                [f"a root, {many} exporters of one engine", *spread(*merging(many, args.rounds))]
                for many in (1, 8, 64)
            ),
            ["a root, 1,800 series that describe themselves", *spread(*large(args.rounds))],
            ["a root, a leaf that keeps nothing and starts again", *spread(*restarting(40))],
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


def merging(exporters: int, rounds: int) -> tuple[int, float, list[float]]:
    """Likewise of turns at a root that is told of one engine by so many exporters."""
    root = new_intake(merge=True)
    leaves = [fleet(1, 0) for _ in range(exporters)]
    outboxes = [Outbox(leaf, f"leaf-{n}", Present(), {}) for n, leaf in enumerate(leaves)]
    turns: list[float] = []
    for number in range(rounds + 1):
        if number == 1:
            # The first words are of engines that are new.
            turns.clear()
        for leaf, outbox in zip(leaves, outboxes, strict=True):
            dirty(leaf.registry, leaf.registry.engines.values())
            for frame in frames_of(outbox):
                turns += turns_of(root, frame)
        root.pass_time(time.monotonic())
        turns += rest_of(root)
    return exporters * rounds, sum(turns), turns


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
        leaf.life = new_life(time.time() + number, number)
        for frame in frames_of(Outbox(leaf, "leaf", Present(), {})):
            found = turns_of(root, frame)
            # From then on the oldest become one.
            turns += found if number > MAX_LIVES else []
    return processes - MAX_LIVES - 1, sum(turns), turns


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
