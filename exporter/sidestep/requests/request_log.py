"""Records of requests: made as requests end, and put into the queue of each output.

A snapshot holds the records that an output is not done with yet. A record that an output has, but whose
snapshot is older, is made or sent again by the exporter's successor, with the same key.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence

import msgspec

from sidestep.config.settings import Config
from sidestep.errors import ConfigError
from sidestep.metrics.ended_counter import TENANT_PARTS, add_parts_of_tenant, begin_parts_by_tenant
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Key, Number
from sidestep.metrics.timeline import Timeline
from sidestep.protocol.limits import OTHER
from sidestep.protocol.request_events import Identity
from sidestep.requests.conditions import Condition, parse
from sidestep.requests.log_file import line_sink
from sidestep.requests.record import latencies, make_record, objectives_met, output_tokens
from sidestep.requests.record_output import LOST, MAX_PENDING, RecordOutput, Write
from sidestep.requests.tenants import Tenants
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.requests.outcomes import FAILED, EndedRequest

log = logging.getLogger(__name__)

MIB = 1 << 20
GOODPUT = ("goodput_requests", "goodput_tokens")
"""Handlers of the requests that met all objectives."""
RECORDS, PENDING = "sidestep_request_records_total", "sidestep_request_records_pending"


class RequestLog:
    """Maker of all records of one exporter.

    Args:
        share: Share of the requests that get one, chosen by their ids.
    """

    def __init__(
        self,
        outputs: Sequence[RecordOutput],
        metrics: SelfMetrics,
        condition: Condition | None = None,
        share: float = 1.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.outputs = outputs
        self._metrics = metrics
        self._condition = condition or (lambda _: True)
        self._threshold = share * (1 << 32)
        self._wall = wall
        self._encoder = msgspec.json.Encoder()
        metrics.read(PENDING, lambda: [((one.name,), len(one)) for one in outputs])

    @property
    def taken(self) -> int:
        """Number of times that an output has finished with a record."""
        return sum(output.taken for output in self.outputs)

    def restore(self, output: str, lines: Sequence[bytes]) -> None:
        """Put the records of a snapshot into the queue of their output again."""
        for each in self.outputs:
            if each.name == output:
                each.restore(lines)
                return
        lose_output(self._metrics, output, lines)

    def add(self, engine: Engine, ended: EndedRequest) -> None:
        """Make the record of a request, if it is to have one."""
        record = make_record(engine, ended, self._wall())
        if not self._condition(record):
            return
        if zlib.crc32((record.id or record.key).encode()) >= self._threshold:
            return
        self._metrics.add(RECORDS)
        line = self._encoder.encode(record) + b"\n"
        for output in self.outputs:
            output.put(line)

    def lose(self, count: int) -> None:
        """Count requests that ended unseen."""
        if count:
            self._metrics.add(LOST, count, "unseen", "")


def lose_output(metrics: SelfMetrics, output: str, lines: Sequence[bytes]) -> None:
    """Count the records of a snapshot whose output is no longer configured."""
    metrics.add(LOST, len(lines), "removed", output)


def request_log(config: Config, metrics: SelfMetrics) -> RequestLog | None:
    """Return the log of requests; None if there is none."""
    destinations = {
        "file": ("--requests.log", config.requests_log),
        "traces": ("--otlp.traces-endpoint", config.otlp_traces_endpoint),
        "logs": ("--otlp.logs-endpoint", config.otlp_logs_endpoint),
    }
    outputs = [
        RecordOutput(output, flag, metrics)
        for output, (flag, destination) in destinations.items()
        if destination
    ]
    if not outputs:
        return None
    try:
        condition = parse(config.requests_log_if) if config.requests_log_if else None
    except ValueError as error:
        raise ConfigError(f"--requests.log.if: {error}") from None
    if config.requests_log:
        size = config.requests_log_size * MIB
        outputs[0].write_by(
            _writes(line_sink(config.requests_log, size, config.requests_log_files))
        )
    return RequestLog(outputs, metrics, condition, config.requests_log_share)


def _writes(sink: Callable[[bytes], None]) -> Write:
    """Return what writes records to a file, and logs its errors."""
    limited = RateLimitedLog(log)

    def write(batch: list[bytes]) -> bool:
        try:
            sink(b"".join(batch))
        except OSError as error:
            limited.warning(
                "write",
                "cannot write --requests.log: %s; up to %d records wait",
                error.strerror or error,
                MAX_PENDING,
            )
            return False
        return True

    return write


class EngineRequests:
    """Receiver of the requests of one engine, for their records, tenants and timeline, if there are such."""

    def __init__(
        self,
        requests: RequestLog | None,
        tenants: Tenants | None,
        engine: Engine,
        *,
        keeps_timeline: bool = False,
    ) -> None:
        self._requests = requests
        self._tenants = tenants
        self._engine = engine
        self._keeps_timeline = keeps_timeline
        objectives = engine.settings.objectives.names
        self.needs_gaps = bool(requests or tenants or objectives)
        self._goodput: list[int] = []
        """Slots of the counters of requests and tokens that met all objectives; empty without any."""
        self._by_tenant: list[int] = []
        """The same by tenant; empty if tenants are not counted."""
        handled = engine.layout.handled
        if objectives:
            self._goodput = [handled[name].slots[0] for name in GOODPUT]
            self._count_goodput("", 0, 0)
            if tenants is not None:
                self._begin_by_tenant()
        self._parts_by_tenant: dict[Key, Number] | None = None
        """Children of the counter of parts by tenant; None if tenants are not counted."""
        if tenants is not None and TENANT_PARTS in handled:
            self._parts_by_tenant = begin_parts_by_tenant(engine)

    def tenant(self, identity: Identity | None, adapter: str) -> str:
        """Return the tenant of a request that begins; empty if tenants are not counted."""
        return "" if self._tenants is None else self._tenants.tenant(identity, adapter)

    def end(self, ended: EndedRequest) -> None:
        """Record a request that ended."""
        tenant = "" if ended.request is None else ended.request.tenant
        if self._goodput and ended.is_service and ended.reason not in FAILED:
            met = objectives_met(self._engine, ended, latencies(ended))
            if all(met.values()):
                self._count_goodput(tenant, 1, output_tokens(ended))
        if self._parts_by_tenant is not None and ended.parts:
            add_parts_of_tenant(self._parts_by_tenant, ended.parts, self._shown(tenant))
        if self._requests is not None:
            self._requests.add(self._engine, ended)
        if self._keeps_timeline:
            self._engine.part(Timeline).add_request(ended, time.monotonic())

    def _begin_by_tenant(self) -> None:
        """Count as ``__other__`` what was counted before tenants were counted."""
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
        key = (self._shown(tenant),)
        for slot, count in zip(self._by_tenant, counts, strict=False):
            children = self._engine.keyed[slot]
            children[key] = children.get(key, 0) + count

    def _shown(self, tenant: str) -> str:
        return tenant if self._tenants is not None and tenant in self._tenants else OTHER

    def lose(self, count: int) -> None:
        """Count requests that ended unseen."""
        if self._requests is not None:
            self._requests.lose(count)
