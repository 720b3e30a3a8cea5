"""What one core of the exporter takes in of the tap's raw events: ``bench_events``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from benchmarks.bench_events import CLIENT, run, tokens
from benchmarks.process import SERVE
from benchmarks.summary.rows import Figure, Row, Topic

ENGINES = 4
REQUESTS = 256
PEER = "the same state machine with prometheus_client"
NAME = f"{ENGINES} engines, {REQUESTS} requests each: tokens"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Million tokens a second of the exporter's CPU time, medians of the rounds."""
    feed = tokens(REQUESTS)
    seconds, rounds = (1.0, 1) if quick else (4.0, 3)
    found: dict[tuple[str, ...], list[float]] = {SERVE: [], CLIENT: []}
    for _ in range(rounds):
        for command, rates in found.items():
            rates.append(run(feed, command, ENGINES, seconds) / 1e6)
    return {NAME: Figure(statistics.median(found[SERVE]), statistics.median(found[CLIENT]))}


EVENTS = Topic(
    "The exporter: raw request events", (Row(NAME, "M events/s", PEER, more=True),), measure
)
