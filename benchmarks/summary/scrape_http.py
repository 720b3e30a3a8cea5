"""A scrape as Prometheus does it, over HTTP with gzip, against prometheus_client's own server.

sidestep's exporter has engines that do a step between two scrapes, so that most of its page has
changed each time; what taking in the steps costs is measured without scrapes, and taken off.
Who comes at even intervals finds a page that was made ahead; who does not waits for its making.
The peer is ``prometheus_client.start_http_server`` over the same families, labels and values.
"""

from __future__ import annotations

import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

from prometheus_client import disable_created_metrics, start_http_server

from benchmarks.flow import SETTLE, flowing
from benchmarks.process import ExporterProcess
from benchmarks.summary.pages import client_registry, fleet
from benchmarks.summary.rows import Figure, Row, Topic

PEER = "prometheus_client's HTTP server"
ENGINES = 256
INTERVAL = 1.0
UNEVEN = (0.0, 0.35, -0.3, 0.1, -0.35, 0.3, -0.1)
"""Seconds by which scrapes come late, by turns: no interval says when the next one is due."""
OF = f"scrape over HTTP with gzip, {ENGINES} engines"
WAIT = f"{OF}, out of turn, until it has arrived"
AHEAD = f"{OF}, at even intervals, until it has arrived"
CPU = f"{OF}, at even intervals, CPU of the process"
SERVER = ("-m", "benchmarks.summary.scrape_http")


def measure(quick: bool) -> Mapping[str, Figure]:
    """Milliseconds a scrape, medians."""
    count = 3 if quick else 12
    with ExporterProcess(SERVER) as server:
        their_cpu, their_wait = scraped(server, count)
    with (
        ExporterProcess() as exporter,
        flowing(exporter.endpoint, ENGINES, 1 / INTERVAL, 64),
    ):
        time.sleep(SETTLE)
        before, started = exporter.cpu_seconds, time.monotonic()
        time.sleep(count * INTERVAL)
        rest = (exporter.cpu_seconds - before) / (time.monotonic() - started)
        _, our_wait = scraped(exporter, count, rest, UNEVEN)
        scraped(exporter, 3)
        our_cpu, ahead = scraped(exporter, count, rest)
    return {
        WAIT: Figure(our_wait * 1e3, their_wait * 1e3),
        AHEAD: Figure(ahead * 1e3, their_wait * 1e3),
        CPU: Figure(our_cpu * 1e3, their_cpu * 1e3),
    }


def scraped(
    process: ExporterProcess, count: int, rest: float = 0.0, late: Sequence[float] = (0.0,)
) -> tuple[float, float]:
    """CPU seconds a scrape, less the share ``rest`` of a core, and seconds until it was there."""
    spent = []
    before, started = process.cpu_seconds, time.monotonic()
    for number in range(count):
        due = started + number * INTERVAL + late[number % len(late)]
        time.sleep(max(due - time.monotonic(), 0.0))
        asked = time.perf_counter()
        process.get("/metrics", {"Accept-Encoding": "gzip"})
        spent.append(time.perf_counter() - asked)
    cpu = process.cpu_seconds - before - rest * (time.monotonic() - started)
    return cpu / count, statistics.median(spent)


def main() -> None:
    """Be the peer: serve where ``--web.listen-address`` says, until told to end."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    client = client_registry(fleet(ENGINES))
    host, _, port = sys.argv[sys.argv.index("--web.listen-address") + 1].rpartition(":")
    start_http_server(int(port), addr=host, registry=client)
    signal.sigwait({signal.SIGTERM})


HTTP = Topic(
    "A scrape: as Prometheus sees it",
    (Row(WAIT, "ms", PEER), Row(AHEAD, "ms", PEER), Row(CPU, "ms", PEER)),
    measure,
)

if __name__ == "__main__":
    main()
