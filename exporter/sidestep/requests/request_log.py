"""The log of requests: records are made as requests end, and written by a thread of their own.

A snapshot holds the records that are not written yet. A record whose line is in the file, but whose
snapshot is older, is made or written again by the exporter's successor, with the same key.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

import msgspec

from sidestep.metrics.engine import Engine
from sidestep.protocol.request_events import Identity
from sidestep.requests.conditions import Condition
from sidestep.requests.log_file import LineSink
from sidestep.requests.record import (
    FAILED,
    latencies,
    make_record,
    objectives_met,
    output_tokens,
)
from sidestep.requests.tenants import Tenants
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.requests.outcomes import EndedRequest

log = logging.getLogger(__name__)

MAX_PENDING = 20_000
"""Records that wait to be written, some 16 MB; more are lost and counted."""
BATCH = 1000
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 3.0
"""Seconds that the last records have to be written when the exporter stops."""
GOODPUT = ("goodput_requests", "goodput_tokens")
"""Handlers of the requests that met all objectives."""
RECORDS, LOST, PENDING = (
    "sidestep_request_records_total",
    "sidestep_request_records_lost_total",
    "sidestep_request_records_pending",
)


class RequestLog:
    """All records of one exporter.

    Args:
        metrics: Self-metrics that count records.
        condition: Which requests get a record.
        share: Share of the requests that get one, chosen by their ids.
        wall: Unix time.
    """

    def __init__(
        self,
        sink: LineSink,
        metrics: SelfMetrics,
        condition: Condition | None = None,
        share: float = 1.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._sink = sink
        self._metrics = metrics
        self._condition = condition or Condition()
        self._threshold = share * (1 << 32)
        self._wall = wall
        self._encoder = msgspec.json.Encoder()
        self._pending: deque[bytes] = deque()
        self._has_work = threading.Event()
        self._is_closing = False
        self._lines = RateLimitedLog(log)
        self._thread = threading.Thread(target=self._run, name="sidestep-requests", daemon=True)
        metrics.read(PENDING, lambda: [((), len(self._pending))])

    def start(self) -> None:
        """Start to write."""
        self._thread.start()

    def close(self) -> None:
        """Write the last records, unless that takes longer than ``CLOSE_SECONDS``."""
        self._is_closing = True
        self._has_work.set()
        self._thread.join(CLOSE_SECONDS)
        if self._pending:
            log.warning("%d records of requests are not written", len(self._pending))

    @property
    def pending(self) -> list[bytes]:
        """The lines that are not written yet."""
        return list(self._pending)

    def restore(self, lines: Iterable[bytes]) -> None:
        """Write lines of a snapshot again."""
        self._pending.extend(lines)
        self._has_work.set()

    def add(self, engine: Engine, ended: EndedRequest) -> None:
        """Make the record of a request, if it is to have one."""
        record = make_record(engine, ended, self._wall())
        if not self._condition.matches(record):
            return
        if zlib.crc32((record.id or record.key).encode()) >= self._threshold:
            return
        self._metrics.add(RECORDS)
        if len(self._pending) >= MAX_PENDING:
            self.lose(1, "full")
            self._lines.warning(
                "full",
                "records of requests are lost: --requests.log takes them too slowly or not at all",
            )
            return
        self._pending.append(self._encoder.encode(record) + b"\n")
        self._has_work.set()

    def lose(self, count: int, reason: str) -> None:
        """Count records that cannot be written."""
        if count:
            self._metrics.add(LOST, count, reason)

    def _run(self) -> None:
        while True:
            self._has_work.wait()
            self._has_work.clear()
            while self._pending:
                batch = list(islice(self._pending, BATCH))
                try:
                    self._sink.write(b"".join(batch))
                except OSError as error:
                    self._lines.warning(
                        "write",
                        "cannot write --requests.log: %s; the last %d records wait",
                        error.strerror or error,
                        MAX_PENDING,
                    )
                    if self._is_closing:
                        return
                    time.sleep(RETRY_SECONDS)
                    continue
                for _ in batch:
                    self._pending.popleft()
            if self._is_closing:
                return


class EngineRequests:
    """Receiver of the requests of one engine.

    Args:
        requests: Log of their records; None: there is none.
        tenants: Tenants that are counted; None: none are.
    """

    def __init__(
        self, requests: RequestLog | None, tenants: Tenants | None, engine: Engine
    ) -> None:
        self._requests = requests
        self._tenants = tenants
        self._engine = engine
        self._goodput: list[int] = []
        """Slots of the counters of requests and tokens that met all objectives; empty without any."""
        if engine.objectives is not None and engine.objectives.names:
            handled = engine.layout.handled
            self._goodput = [handled[name].slots[0] for name in GOODPUT]
            self._count_goodput(0, 0)

    def tenant(self, identity: Identity | None, adapter: str) -> str:
        """Return the tenant of a request that begins; empty if tenants are not counted."""
        return "" if self._tenants is None else self._tenants.tenant(identity, adapter)

    def end(self, ended: EndedRequest) -> None:
        """Record a request that ended."""
        if self._goodput and ended.reason not in FAILED:
            met = objectives_met(self._engine, ended, latencies(ended))
            if all(met.values()):
                self._count_goodput(1, output_tokens(ended))
        if self._requests is not None:
            self._requests.add(self._engine, ended)

    def _count_goodput(self, *counts: int) -> None:
        values = self._engine.values
        for slot, count in zip(self._goodput, counts, strict=True):
            values[slot] = (values[slot] or 0) + count

    def lose(self, count: int) -> None:
        """Count requests that ended unseen."""
        if self._requests is not None:
            self._requests.lose(count, "unseen")
