"""The requests and the steps in a recording of ``sidestep record``, as an exporter keeps them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.errors import ConfigError, WireError
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry, Tracking
from sidestep.metrics.timeline import StepColumns, Timeline
from sidestep.protocol.limits import printable
from sidestep.protocol.messages import FRONT_END
from sidestep.protocol.request_events import Identity
from sidestep.requests.record import RequestRecord, make_record
from sidestep.tracking.requests.outcomes import EndedRequest
from sidestep_adapters.recording.format import StreamStart, read


class _Sink:
    """Receives the requests of one engine that end, and makes their records."""

    needs_gaps = True

    def __init__(self, engine: Engine, records: list[RequestRecord]) -> None:
        self._engine = engine
        self._records = records
        self._wall = 0.0

    def tenant(self, identity: Identity | None, adapter: str) -> str:
        """Return no tenant, since a recording does not say how tenants are counted."""
        del identity, adapter
        return ""

    def end(self, ended: EndedRequest) -> None:
        """Make the record; a request without an event at its end ends with the one before."""
        self._wall = ended.wall or self._wall
        self._records.append(make_record(self._engine, ended, self._wall))

    def lose(self, count: int) -> None:
        """Leave out requests that ended unseen."""


class RecordedEngine(NamedTuple):
    """The requests of one engine that ended, and its latest steps."""

    engine: Engine
    records: list[RequestRecord]
    steps: StepColumns


def requests(path: Path) -> Iterator[RequestRecord]:
    """Yield a record of each request that ended in a recording."""
    found: list[RequestRecord] = []
    tracking = Tracking(request_sink=lambda engine: _Sink(engine, found))
    for _ in _applied(path, Registry(DIALECTS.layouts(), tracking=tracking)):
        yield from found
        found.clear()


def recorded_engines(path: Path) -> list[RecordedEngine]:
    """Return the requests and the steps of a recording by engine, of those that have any."""
    records: defaultdict[str, list[RequestRecord]] = defaultdict(list)
    tracking = Tracking(
        request_sink=lambda engine: _Sink(engine, records[engine.id]), keeps_timeline=True
    )
    registry = Registry(DIALECTS.layouts(), tracking=tracking)
    for _ in _applied(path, registry):
        pass
    found = [
        RecordedEngine(engine, records[engine.id], engine.part(Timeline).steps)
        for engine in registry.engines.values()
    ]
    return [each for each in found if each.records or each.steps.end]


def _applied(path: Path, registry: Registry) -> Iterator[None]:
    """Apply a recording to the engines of a registry, and yield after each record and at the end."""
    applier = Applier(registry)
    engines: dict[str, list[Engine]] = {}
    try:
        for record in read(path):
            if isinstance(record, StreamStart):
                engines[record.stream] = [registry.register(info) for info in record.engines]
                for engine, info in zip(engines[record.stream], record.engines, strict=True):
                    if info.role == FRONT_END:
                        engine.feeds.front_ends.add(record.stream)
                continue
            for raw in record.items:
                item = DIALECTS.decode(raw)
                applier.apply(engines[record.stream][item.engine], item)
            yield
    except (WireError, LookupError) as error:
        raise ConfigError(f"{path}: damaged: {printable(error)}") from None
    registry.release_requests()
    yield
