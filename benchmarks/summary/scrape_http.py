"""A scrape over HTTP with gzip, as Prometheus does it, against prometheus_client's own server.

Between two scrapes of sidestep each engine sends a step, so that most of the page has changed;
the cost of ingest is measured without scrapes, and subtracted. The peer is
``prometheus_client.start_http_server`` with the same families, labels and values.

The event loop's delay is what a small request waits while another process scrapes every second.
"""

from __future__ import annotations

import http.client
import signal
import statistics
import sys
import time
from collections.abc import Mapping

from prometheus_client import disable_created_metrics, start_http_server

from benchmarks.flow import SETTLE, flowing
from benchmarks.process import ExporterProcess
from benchmarks.scraper import scraping
from benchmarks.summary.pages import client_registry, fleet
from benchmarks.summary.rows import Figure, Row, Topic

PEER = "prometheus_client's HTTP server"
ENGINES = 256
INTERVAL = 1.0
OF = f"scrape over HTTP with gzip, {ENGINES} engines"
WAIT = f"{OF}, until it has arrived"
CPU = f"{OF}, CPU of the process"
DELAY = f"a small request beside scrapes, {ENGINES} engines, p99"
LOST = f"items lost or dropped meanwhile, {ENGINES} engines"
PAUSE = 0.005
"""Seconds between two small requests."""
SERVER = ("-m", "benchmarks.summary.scrape_http")


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return milliseconds per scrape, medians."""
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
        # The first page is the most expensive: nothing is cached yet.
        scraped(exporter, 1)
        our_cpu, our_wait = scraped(exporter, count, rest)
        with scraping(f"{exporter.url}/metrics", INTERVAL):
            delay = delayed(exporter.url, count * INTERVAL)
        totals = exporter.totals
    lost = sum(
        totals[name] for name in ("sidestep_lost_items_total", "sidestep_folded_items_total")
    )
    return {
        DELAY: Figure(delay * 1e3),
        LOST: Figure(lost),
        WAIT: Figure(our_wait * 1e3, their_wait * 1e3),
        CPU: Figure(our_cpu * 1e3, their_cpu * 1e3),
    }


def scraped(process: ExporterProcess, count: int, rest: float = 0.0) -> tuple[float, float]:
    """Return CPU seconds per scrape, without the share ``rest`` of a core, and its duration."""
    spent = []
    before, started = process.cpu_seconds, time.monotonic()
    for number in range(count):
        time.sleep(max(started + number * INTERVAL - time.monotonic(), 0.0))
        asked = time.perf_counter()
        process.get("/metrics", {"Accept-Encoding": "gzip"})
        spent.append(time.perf_counter() - asked)
    cpu = process.cpu_seconds - before - rest * (time.monotonic() - started)
    return cpu / count, statistics.median(spent)


def delayed(url: str, seconds: float) -> float:
    """Return the 99th percentile of seconds that small requests take."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    spent: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        asked = time.perf_counter()
        connection.request("GET", "/-/healthy")
        connection.getresponse().read()
        spent.append(time.perf_counter() - asked)
        time.sleep(PAUSE)
    connection.close()
    return statistics.quantiles(spent, n=100)[-1]


def main() -> None:
    """Run the peer: serve where ``--web.listen-address`` says until SIGTERM."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    client = client_registry(fleet(ENGINES))
    host, _, port = sys.argv[sys.argv.index("--web.listen-address") + 1].rpartition(":")
    start_http_server(int(port), addr=host, registry=client)
    signal.sigwait({signal.SIGTERM})


HTTP = Topic(
    "A scrape: as Prometheus sees it",
    (
        Row(WAIT, "ms", PEER),
        Row(CPU, "ms", PEER),
        Row(DELAY, "ms", limit=15),
        Row(LOST, "items", limit=0),
    ),
    measure,
)

if __name__ == "__main__":
    main()
