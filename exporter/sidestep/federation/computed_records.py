"""What this exporter says of the engines that it counts itself."""

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
    """Where records come from that nothing takes back."""

    settles: float
    """Seconds after which senders have let go of what a record holds."""

    def version(self, engine: Engine) -> int | None:
        """Of the record of ``engine``; None where there is none yet."""

    def record(self, engine: Engine) -> bytes:
        """It."""


class Present:
    """Records of now: this process's end is that of its counts, and so of their life.

    What a sender has not heard to be applied it sends again to the next process, whose counts
    add to this one's: so a record waits until that has been heard.
    """

    settles = 0.5

    def version(self, engine: Engine) -> int:
        """Of the record of ``engine``."""
        return engine.version

    def record(self, engine: Engine) -> bytes:
        """It."""
        return encode_record(engine, totals_of(engine))


def engines(registry: Registry) -> Iterator[Engine]:
    """Those that are counted here, shown or only remembered."""
    for engine in (*registry.engines.values(), *registry.retired.values()):
        if not engine.federated:
            yield engine


def standing(registry: Registry, engine: Engine) -> Standing:
    """How ``engine`` is."""
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
    """What only whoever counts can compute."""
    sources = (placed.row.source for placed in layout.assignments)
    return tuple(source.name for source in sources if isinstance(source, Computed))
