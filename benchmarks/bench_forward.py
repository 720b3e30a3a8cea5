"""Forwarding: what it costs whoever tells and whoever is told, and how long it holds their loops.

Engines have counted steps of a real run's states; between two rounds every series of each has
changed. A slice at the teller ends with the record in which its millisecond
passes, as in the exporter; at the root one record is a turn. The peer is what a federating
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
from sidestep.intake import Intake
from sidestep.outbox import Outbox
from sidestep.render.text import render
from sidestep.told import Present
from sidestep.transport.process import calm_collector
from sidestep.turns import SLICE
from sidestep.wire.forwarded import encode_forward


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
