"""Memory per sample: by how much an exporter's process grows with its engines.

All resident memory counts: series, cached texts and pages, and what the allocator has not
returned. The peer is the same exporter with prometheus_client's objects in it, fed and
scraped in the same way; it caches no page.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.flow import SETTLE, flowing
from benchmarks.process import SERVE, ExporterProcess
from benchmarks.summary.ingest import CLIENT as INSIDE
from benchmarks.summary.pages import samples
from benchmarks.summary.rows import Figure, Row, Topic

PEER = "prometheus_client in the exporter"
FEW, MANY = 8, 256
NAME = f"resident memory, {FEW} to {MANY} engines, scraped"
SCRAPES = 3
LIMIT = 250.0
MIB = 1 << 20


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return bytes per sample."""
    seconds = 1.0 if quick else 4.0
    ours, theirs = (growth(command, seconds) for command in (SERVE, INSIDE))
    return {NAME: Figure(ours, theirs)}


def growth(command: tuple[str, ...], seconds: float) -> float:
    """Return the bytes by which many engines exceed few, per additional sample."""
    (few, fewer), (many, more) = (held(command, engines, seconds) for engines in (FEW, MANY))
    return (many - few) / (more - fewer)


def held(command: tuple[str, ...], engines: int, seconds: float) -> tuple[int, int]:
    """Return resident bytes, and samples on the page."""
    with ExporterProcess(command) as exporter:
        with flowing(exporter.endpoint, engines, 4.0, 64):
            for _ in range(SCRAPES):
                time.sleep(seconds / SCRAPES)
                page = exporter.get("/metrics")
        time.sleep(SETTLE)
        pages = Path(f"/proc/{exporter.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE"), samples(page)


MEMORY = Topic("Memory", (Row(NAME, "bytes/sample", PEER, limit=LIMIT),), measure)
