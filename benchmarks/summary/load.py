"""A large fleet at a fixed rate, scraped every second: what is dropped, how long a scrape takes."""

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
"""So many scrapes that one of them is less than their hundredth."""
PEER = "prometheus_client in the exporter, at a tenth of the rate"
SLOWER = 10
"""At the whole rate it needs minutes for what comes in a second."""
WHAT = f"{ENGINES} engines, {RATE:,.0f} steps/s x {VALUES:,} values"
DROPPED = f"{WHAT}: steps dropped"
SHARE = f"{WHAT}: CPU for that rate"
TAIL = f"{WHAT}: p99 of a scrape"
LONGEST = f"{WHAT}: the longest scrape"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Steps, percent of a core, milliseconds."""
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
    """Steps that a full ring has cost."""
    return float(run.dropped)


def share(run: Run) -> float:
    """Percent of a core for ``RATE``, at the cost of a step as it was."""
    return 100 * run.cpu / run.steps * RATE


def tail(run: Run) -> float:
    """Milliseconds of a scrape, p99; of up to a hundred scrapes that is the longest."""
    return percentile(run.scrapes, 0.99) * 1e3 if run.scrapes else 0.0


def longest(run: Run) -> float:
    """Milliseconds; mostly the first one, of whose page no text exists yet."""
    return max(run.scrapes, default=0.0) * 1e3


LOAD = Topic(
    "A large fleet, scraped every second",
    (
        Row(DROPPED, "steps", PEER, limit=0),
        Row(SHARE, "% of a core", PEER, limit=50),
        Row(TAIL, "ms", PEER, limit=150),
        Row(LONGEST, "ms", PEER),
    ),
    measure,
)
