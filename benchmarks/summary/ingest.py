"""What one core of the exporter takes in: ``bench_ingest``, and statsd_exporter where it is found."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from benchmarks.bench_ingest import PEERS, Feed
from benchmarks.summary import statsd
from benchmarks.summary.rows import Figure, Row, Topic

ENGINES = 16
VALUES = 256
INSIDE = "prometheus_client in the exporter"
SPREADS = {
    "recorded": "latencies as recorded",
    "alike": "one latency in ten unlike",
    "mixed": "all latencies unlike",
}


STATSD = f"{ENGINES} engines, latencies as recorded, against {statsd.NAME}"


def rows() -> Iterator[Row]:
    """Steps of three kinds, and the first of them against statsd_exporter."""
    for spread in SPREADS:
        target = 14 if spread == "recorded" else None
        yield Row(named(spread), "M values/s", INSIDE, target, more=True)
    yield Row(STATSD, "M values/s", statsd.NAME, 20, more=True)


def named(spread: str) -> str:
    """The row's name."""
    return f"{ENGINES} engines, {VALUES} values a step, {SPREADS[spread]}"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Million values a second of the exporter's CPU time, medians of the rounds."""
    found: dict[str, Figure] = {}
    for spread in SPREADS:
        feed = Feed(VALUES, 1, spread)
        per_core: dict[str, list[float]] = {peer: [] for peer in PEERS}
        for _ in range(1 if quick else 3):
            for peer, command in PEERS.items():
                run = feed.run(command, ENGINES, 0.0, 1.0 if quick else 3.0, 0.0)
                per_core[peer].append(run.per_core / 1e6)
        theirs, ours = (statistics.median(per_core[peer]) for peer in PEERS)
        found[named(spread)] = Figure(ours, theirs)
    recorded = found[named("recorded")].ours
    binary = statsd.binary()
    found[STATSD] = (
        Figure(recorded, why=statsd.ABSENT)
        if binary is None
        else Figure(recorded, statsd.per_core(binary, 200_000 if quick else 1_000_000) / 1e6)
    )
    return found


INGEST = Topic("The exporter: values a second of one core", tuple(rows()), measure)
