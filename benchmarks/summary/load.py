"""A large fleet at a fixed rate, scraped every second: dropped steps, CPU and scrape duration."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.process import SERVE
from benchmarks.summary.ingest import CLIENT, Feed, Run
from benchmarks.summary.rows import Figure, Row, Topic
from benchmarks.table import percentile

ENGINES = 256
VALUES = 1024
RATE = 2000.0
SECONDS = 120.0
"""Seconds, and scrapes: enough for a 99th percentile that is not the longest one."""
PEER = "prometheus_client in the exporter, at a tenth of the rate"
SLOWER = 10
"""Divisor of the peer's rate: at the full rate it takes minutes for the items of a second."""
WHAT = f"{ENGINES} engines, {RATE:,.0f} steps/s x {VALUES:,} values"
DROPPED = f"{WHAT}: steps dropped"
SHARE = f"{WHAT}: CPU for that rate"
TAIL = f"{WHAT}: p99 of a scrape"
LONGEST = f"{WHAT}: the longest scrape"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return dropped steps, percent of a core, and milliseconds."""
    feed = Feed(VALUES, 1, "recorded")
    seconds = 5.0 if quick else SECONDS
    ours = feed.run(SERVE, ENGINES, RATE, seconds, 1.0)
    theirs, why = None, ""
    try:
        theirs = feed.run(CLIENT, ENGINES, RATE / SLOWER, 5.0, 1.0)
    except SystemExit as failure:
        why = str(failure)
    asked = {DROPPED: dropped, SHARE: share, TAIL: tail, LONGEST: longest}
    return {
        name: Figure(of(ours), of(theirs) if theirs is not None else None, why)
        for name, of in asked.items()
    }


def dropped(run: Run) -> float:
    """Return the steps dropped because a ring was full."""
    return float(run.dropped)


def share(run: Run) -> float:
    """Return percent of a core for ``RATE``, at the measured cost of a step."""
    return 100 * run.cpu / run.steps * RATE


def tail(run: Run) -> float:
    """Return the 99th percentile of a scrape in milliseconds; of up to 100 scrapes it is the longest."""
    return percentile(run.scrapes, 0.99) * 1e3 if run.scrapes else 0.0


def longest(run: Run) -> float:
    """Return the longest scrape in milliseconds, mostly the first, which finds nothing cached."""
    return max(run.scrapes, default=0.0) * 1e3


LOAD = Topic(
    "A large fleet, scraped every second",
    (
        Row(DROPPED, "steps", PEER, limit=0),
        Row(SHARE, "% of a core", PEER),
        Row(TAIL, "ms", PEER),
        Row(LONGEST, "ms", PEER),
    ),
    measure,
)
