"""Records and state of the engines that this exporter counts itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Protocol

from sidestep.catalog.layout import Layout
from sidestep.catalog.model import Computed
from sidestep.federation.messages import Standing
from sidestep.metrics.computed_gauges import computed_gauge
from sidestep.metrics.engine import Engine
from sidestep.metrics.record_codec import encode_record, totals_of
from sidestep.metrics.registry import Registry


class Records(Protocol):
    """A source of records whose counters never decrease within an epoch."""

    settles: float
    """Seconds after which senders will not resend what a record holds."""

    def version(self, engine: Engine) -> int | None:
        """Return the version of the record of ``engine``, or None if there is no record yet."""

    def record(self, engine: Engine) -> bytes:
        """Return the encoded record of ``engine``."""


class Present:
    """Current records, for a process without a state directory, whose end is the end of its epoch.

    Senders resend unacknowledged items to the next process, and the counters of epochs are added
    up. So a record is sent only after its items have been acknowledged.
    """

    settles = 0.5

    def version(self, engine: Engine) -> int:
        """Return the version of the record of ``engine``."""
        return engine.version

    def record(self, engine: Engine) -> bytes:
        """Return the encoded record of ``engine``."""
        return encode_record(engine, totals_of(engine))


def engines(registry: Registry) -> Iterator[Engine]:
    """Yield the engines that this exporter counts, exposed or retired."""
    for engine in (*registry.engines.values(), *registry.retired.values()):
        if not engine.federated:
            yield engine


def standing(registry: Registry, engine: Engine) -> Standing:
    """Return the state of ``engine`` to send with its record."""
    former = registry.engines.get(engine.id) is not engine
    found = (
        {name: computed_gauge(engine, name) for name in _readings(engine.layout)}
        if engine.live
        else {}
    )
    return Standing(
        up=bool(engine.streams),
        live=engine.live and not former,
        absent=engine.absent,
        former=former,
        readings={name: value for name, value in found.items() if value is not None},
    )


@functools.cache
def _readings(layout: Layout) -> tuple[str, ...]:
    """Return the names of the gauges that only the counting exporter can compute."""
    sources = (placed.row.source for placed in layout.assignments)
    return tuple(source.name for source in sources if isinstance(source, Computed))
