"""Request routers that poll the pod's page every 50 ms: ``bench_views``."""

from __future__ import annotations

import time
from collections.abc import Mapping

from benchmarks.bench_views import BARE, SETTLE, cost, flowing
from benchmarks.process import ExporterProcess
from benchmarks.summary.rows import Figure, Row, Topic

REPLICAS = 4
ENGINES = 16
PEER = "a bare aiohttp, the same bytes each time"
TARGET = 1.6 / 10
"""Beside the limit of 10 % of a core, where the peer takes 1.6 %."""
POLLED = f"{REPLICAS} replicas poll the pod's page every 50 ms, {ENGINES} engines"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Percent of a core that polls add while items flow."""
    seconds = 2.0 if quick else 8.0
    with ExporterProcess(BARE) as bare:
        alone, _ = cost(bare, REPLICAS, seconds)
    with ExporterProcess() as exporter, flowing(exporter.endpoint, ENGINES, 50.0, 64):
        time.sleep(SETTLE)
        without, _ = cost(exporter, 0, seconds)
        polled, _ = cost(exporter, REPLICAS, seconds)
    return {POLLED: Figure(polled - without, alone)}


ROUTERS = Topic("Request routers", (Row(POLLED, "% of a core", PEER, TARGET, limit=10),), measure)
