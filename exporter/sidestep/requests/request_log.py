"""Records of requests: made as requests end, and put into the queue of each output.

A snapshot holds the records that an output is not done with yet. A record that an output has, but whose
snapshot is older, is made or sent again by the exporter's successor, with the same key.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence

import msgspec

from sidestep.metrics.engine import Engine
from sidestep.protocol.limits import OTHER
from sidestep.protocol.request_events import Identity
from sidestep.requests.conditions import Condition
from sidestep.requests.record import (
    FAILED,
    latencies,
    make_record,
    objectives_met,
    output_tokens,
)
from sidestep.requests.record_queue import LOST, RecordQueue
from sidestep.requests.tenants import Tenants
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.requests.outcomes import EndedRequest

GOODPUT = ("goodput_requests", "goodput_tokens")
"""Handlers of the requests that met all objectives."""
RECORDS, PENDING = "sidestep_request_records_total", "sidestep_request_records_pending"


class RequestLog:
    """Maker of all records of one exporter.

    Args:
        queues: One for each output.
        metrics: Self-metrics that count records.
        condition: Which requests get a record.
        share: Share of the requests that get one, chosen by their ids.
        wall: Unix time.

    Attributes:
        queues: See the argument.
    """

    def __init__(
        self,
        queues: Sequence[RecordQueue],
        metrics: SelfMetrics,
        condition: Condition | None = None,
        share: float = 1.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.queues = queues
        self._metrics = metrics
        self._condition = condition or Condition()
        self._threshold = share * (1 << 32)
        self._wall = wall
        self._encoder = msgspec.json.Encoder()
        metrics.read(PENDING, lambda: [((one.output,), len(one)) for one in queues])

    @property
    def taken(self) -> int:
        """Number of times that an output has finished with a record."""
        return sum(queue.taken for queue in self.queues)

    def restore(self, output: str, lines: Sequence[bytes]) -> None:
        """Put the records of a snapshot into the queue of their output again."""
        for queue in self.queues:
            if queue.output == output:
                queue.restore(lines)
                return
        lose_output(self._metrics, output, lines)

    def add(self, engine: Engine, ended: EndedRequest) -> None:
        """Make the record of a request, if it is to have one."""
        record = make_record(engine, ended, self._wall())
        if not self._condition.matches(record):
            return
        if zlib.crc32((record.id or record.key).encode()) >= self._threshold:
            return
        self._metrics.add(RECORDS)
        line = self._encoder.encode(record) + b"\n"
        for queue in self.queues:
            queue.put(line)

    def lose(self, count: int) -> None:
        """Count requests that ended unseen."""
        if count:
            self._metrics.add(LOST, count, "unseen", "")


def lose_output(metrics: SelfMetrics, output: str, lines: Sequence[bytes]) -> None:
    """Count the records of a snapshot whose output is no longer configured."""
    metrics.add(LOST, len(lines), "removed", output)


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
        self._by_tenant: list[int] = []
        """The same by tenant; empty if tenants are not counted."""
        if engine.settings.objectives.names:
            handled = engine.layout.handled
            self._goodput = [handled[name].slots[0] for name in GOODPUT]
            self._count_goodput("", 0, 0)
            if tenants is not None:
                self._begin_by_tenant()

    def tenant(self, identity: Identity | None, adapter: str) -> str:
        """Return the tenant of a request that begins; empty if tenants are not counted."""
        return "" if self._tenants is None else self._tenants.tenant(identity, adapter)

    def end(self, ended: EndedRequest) -> None:
        """Record a request that ended."""
        if self._goodput and ended.reason not in FAILED:
            met = objectives_met(self._engine, ended, latencies(ended))
            if all(met.values()):
                tenant = "" if ended.request is None else ended.request.tenant
                self._count_goodput(tenant, 1, output_tokens(ended))
        if self._requests is not None:
            self._requests.add(self._engine, ended)

    def _begin_by_tenant(self) -> None:
        """Count for no shown tenant what was counted before tenants were."""
        engine = self._engine
        handled = engine.layout.handled
        self._by_tenant = [handled[f"tenant_{name}"].slots[0] for name in GOODPUT]
        for total, slot in zip(self._goodput, self._by_tenant, strict=True):
            children = engine.keyed[slot]
            children.pop((OTHER,), None)
            children[(OTHER,)] = (engine.values[total] or 0) - sum(children.values())

    def _count_goodput(self, tenant: str, *counts: int) -> None:
        values = self._engine.values
        for slot, count in zip(self._goodput, counts, strict=True):
            values[slot] = (values[slot] or 0) + count
        key = (tenant,) if self._tenants is not None and tenant in self._tenants else (OTHER,)
        for slot, count in zip(self._by_tenant, counts, strict=False):
            children = self._engine.keyed[slot]
            children[key] = children.get(key, 0) + count

    def lose(self, count: int) -> None:
        """Count requests that ended unseen."""
        if self._requests is not None:
            self._requests.lose(count)
