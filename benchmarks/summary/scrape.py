"""Rendering of the text page against ``generate_latest``: equal families, labels and values in one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from prometheus_client import disable_created_metrics, generate_latest

from benchmarks.summary.pages import (
    STATES,
    client_registry,
    compare,
    costs,
    fleet,
    renderer,
    samples,
)
from benchmarks.summary.rows import Figure, Row, Topic

PEER = "generate_latest"
SIZES = {"1k": 1_000, "10k": 10_000, "100k": 100_000}
TARGETS = {"all dirty": 15, "none dirty": 300}


def named(size: str, state: str) -> str:
    """Return the name of a row."""
    return f"text page of {size} samples, {state}"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return milliseconds of CPU per page, medians; the smallest pages are parsed and compared."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    one = samples(b"".join(renderer(fleet(1))()))
    found = {}
    for number, (size, wanted) in enumerate(SIZES.items()):
        registry = fleet(max(wanted // one, 1))
        client = client_registry(registry)
        if number == 0:
            compare(b"".join(renderer(registry)()), generate_latest(client))
        spent = costs(registry, 3 if quick else 9, partial(generate_latest, client))
        for state in STATES:
            found[named(size, state)] = Figure(spent[state], spent["peer"])
    return found


SCRAPE = Topic(
    "A scrape: making the page",
    tuple(
        Row(named(size, state), "ms", PEER, TARGETS.get(state) if size == "100k" else None)
        for size in SIZES
        for state in STATES
    ),
    measure,
)
