"""Records and status of the engines that this exporter counts itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Protocol

from sidestep.catalog.layout import Layout
from sidestep.catalog.model import Computed
from sidestep.federation.messages import EngineStatus
from sidestep.metrics.computed_gauges import computed_gauge
from sidestep.metrics.engine import Engine
from sidestep.metrics.record_codec import encode_record, totals_of
from sidestep.metrics.registry import Registry


class Records(Protocol):
    """Records of engines whose counters never decrease within an epoch."""

    delay: float
    """Seconds after which senders will not resend what a record holds."""

    def version(self, engine: Engine) -> int | None:
        """Return the version of the record of ``engine``, or None if there is no record yet."""

    def record(self, engine: Engine) -> bytes:
        """Return the encoded record of ``engine``."""


class CurrentRecords:
    """Current records, for a process without a state directory, whose end is the end of its epoch.

    Senders resend unacknowledged items to the next process, and the counters of epochs are added
    up. So a record is sent only after its items have been acknowledged.
    """

    delay = 0.5

    def version(self, engine: Engine) -> int:
        """Return the version of the record of ``engine``."""
        return engine.version

    def record(self, engine: Engine) -> bytes:
        """Return the encoded record of ``engine``."""
        return encode_record(engine, totals_of(engine))


def counted_engines(registry: Registry) -> Iterator[Engine]:
    """Return the engines that this exporter counts, exposed and retired."""
    return (engine for engine in registry if not engine.federated)


def status_of(registry: Registry, engine: Engine) -> EngineStatus:
    """Return the status of ``engine`` to send with its record."""
    is_retired = registry.engines.get(engine.id) is not engine
    names = _computed_names(engine.layout) if engine.live else ()
    found = ((name, computed_gauge(engine, name)) for name in names)
    return EngineStatus(
        up=engine.is_up,
        live=engine.live and not is_retired,
        absent=engine.absent,
        retired=is_retired,
        computed={name: value for name, value in found if value is not None},
    )


@functools.cache
def _computed_names(layout: Layout) -> tuple[str, ...]:
    """Return the names of the gauges that only the counting exporter can compute."""
    sources = (assignment.row.source for assignment in layout.assignments)
    return tuple(source.name for source in sources if isinstance(source, Computed))
