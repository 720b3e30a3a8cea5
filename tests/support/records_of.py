"""Records of requests, made from events or from the state of a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from schedulers import WALL
from sidestep.engines.dialects import DIALECTS
from sidestep.metrics.registry import Registry, Tracking
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.request_events import Event, Identity, RequestEvents
from sidestep.requests.record import RequestRecord, make_record
from sidestep.tracking.requests.inflight import Request
from sidestep.tracking.requests.outcomes import EndedRequest

ENGINE = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})


class Kept:
    """A sink that keeps the records of an engine."""

    needs_gaps = True

    def __init__(self, registry: Registry) -> None:
        self.engine = registry.register(ENGINE)
        self.records: list[RequestRecord] = []
        self.lost = 0

    def tenant(self, identity: Identity | None, adapter: str) -> str:
        """Return no tenant."""
        del identity, adapter
        return ""

    def end(self, ended: EndedRequest) -> None:
        """Make the record."""
        self.records.append(make_record(self.engine, ended, WALL))

    def lose(self, count: int) -> None:
        """Count requests without one."""
        self.lost += count


def recorded(events: Iterable[Event], *cuts: RequestEvents) -> Kept:
    """Return the records of requests with these events, and then the items ``cuts``."""
    registry = Registry(DIALECTS.layouts(), tracking=Tracking(request_sink=lambda _: kept))
    kept = Kept(registry)
    tracker = registry.requests_of(kept.engine)
    for item in (RequestEvents(0, 0.0, 1, [*events]), *cuts):
        tracker.apply(item)
    return kept


def made_record(
    times: Mapping[str, float | None], *, wall: float | None, stamp: float, reason: str
) -> RequestRecord:
    """Return the record of a request whose state has ``times``."""
    request = Request(0.0, pauses=((5.0, 1.0),))
    for name, time in times.items():
        setattr(request, name, time)
    kept = Kept(Registry(DIALECTS.layouts()))
    kept.end(EndedRequest(1, 1, request, reason, stamp, wall))
    return kept.records[0]
