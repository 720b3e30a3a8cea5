"""An engine that another exporter counts, and its registration among the engines exposed here."""

from __future__ import annotations

import dataclasses
from hashlib import blake2b

import msgspec

from sidestep.errors import WireError
from sidestep.federation.aggregate import Aggregate
from sidestep.federation.messages import EngineStatus, Order
from sidestep.metrics.description_limits import check_engines, check_update, excess
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import (
    ENGINE_EXPIRES_SECONDS,
    GAUGES_EXPIRE_SECONDS,
    MAX_ENGINES,
    Registry,
)
from sidestep.protocol.limits import MAX_LABEL_CHARS
from sidestep.protocol.messages import EngineInfo, check_engine, check_printable
from sidestep.protocol.records import Head


class SourceRecord(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A source's record of one engine, as the source sent it; see ``federation.messages.Forward``.

    Attributes:
        data: The encoded record.
        labels: Labels that exporters on the way have added.
    """

    source: str
    engine: str
    epoch: int
    run: int
    seq: int
    data: bytes
    status: EngineStatus
    labels: dict[str, str]

    @property
    def order(self) -> Order:
        """The position among all records of this source and engine: the highest is the newest."""
        return self.epoch, self.run, self.seq


@dataclasses.dataclass(slots=True)
class FederatedEngine:
    """An engine of a source; its counters are ``base`` + ``current``.

    Attributes:
        engine: Engine in this exporter's registry.
        info: Description of ``engine``.
        current: The newest record of the source.
        sent_at: Monotonic time at which the source sent it.
        base: The encoded sum of all ended epochs' last records; empty while none has ended.
        ended: The last record of the epoch that ended last; part of ``base``, kept for forwarding.
    """

    engine: Engine
    info: EngineInfo
    current: SourceRecord
    sent_at: float
    base: bytes = b""
    ended: SourceRecord | None = None

    @property
    def records(self) -> list[SourceRecord]:
        """Records to forward, in the order in which they were sent."""
        return [self.current] if self.ended is None else [self.ended, self.current]

    @property
    def size(self) -> int:
        """Total bytes of all records."""
        return len(self.base) + sum(len(record.data) for record in self.records)

    def includes(self, order: Order) -> bool:
        """Return whether the exposed counters include the record of this order."""
        for record in self.records:
            if record.epoch == order[0]:
                return order <= record.order
        return False

    def repeats(self, record: SourceRecord) -> bool:
        """Return whether ``record`` has the same series as the current one."""
        known = self.current
        found = known.epoch, known.data, known.labels
        return found == (record.epoch, record.data, record.labels)

    def is_silent(self, now: float) -> bool:
        """Return whether the gauges are too old to be exposed."""
        return now - self.sent_at >= GAUGES_EXPIRE_SECONDS

    def publish(self, registry: Registry, head: Head, total: Aggregate) -> WireError | None:
        """Replace all series by ``total``, and info metrics by those of ``head``.

        Returns:
            The error of the last self-described family that was left out.
        """
        self.engine.set_info(head.core_info, self.info.info)
        self.engine.description.excess_bytes = excess(registry, self.info)
        return total.publish(registry, self.engine)

    def update_exposure(self, registry: Registry, now: float) -> None:
        """Expose, hide or retire the engine according to its current record.

        Raises:
            WireError: The registry has too many engines.
        """
        engine, status = self.engine, self.current.status
        recent = not self.is_silent(now)
        streams = {self.current.epoch} if status.up and recent else set()
        live = status.live and recent
        engine.seen_at = max(engine.seen_at, self.sent_at)
        found = streams, live, status.absent, status.computed
        if (engine.streams, engine.live, engine.absent, engine.computed) != found:
            engine.streams, engine.live, engine.absent, engine.computed = found
            registry.touch(engine)
        gone = status.absent or now - engine.seen_at >= ENGINE_EXPIRES_SECONDS
        if status.retired or (gone and not streams):
            if engine.id in registry.engines:
                registry.retire(engine)
        elif engine.id in registry.retired:
            if len(registry.engines) >= MAX_ENGINES:
                raise registry.over_limit("engines", f"more than {MAX_ENGINES} engines")
            registry.restore(engine)


def describe(registry: Registry, record: SourceRecord, head: Head, name: str) -> EngineInfo:
    """Return the engine's description, including labels that exporters on the way have added.

    Args:
        registry: Registry of the engine.
        record: Record of the engine.
        head: Description of the engine at its source.
        name: Id of the engine in this exporter.

    Raises:
        WireError: The description is invalid.
    """
    known = head.engine
    # An engine's own label wins over one that was added.
    labels = {**record.labels, **known.labels}
    bounds = _bounds(registry, head)
    info = EngineInfo(name, known.dialect, labels, known.info, bounds, known.features, known.closed)
    check_engine(info)
    infos = head.core_info.items()
    check_printable((name, text) for name, labels in infos for text in labels.values())
    return info


def engine_for(registry: Registry, info: EngineInfo, known: FederatedEngine | None) -> Engine:
    """Return the engine of ``known`` if ``info`` describes it, or a new, unregistered engine.

    Args:
        registry: Registry of the engine.
        info: Description of the engine; ``id`` is its id in this exporter.
        known: Engine that has this description, or that the new one replaces.

    Raises:
        WireError: The engine is invalid or over a limit.
    """
    if known is not None and has_same_series(known.info, info):
        if info == known.info:
            return known.engine
        check_update(registry, info)
    else:
        check_engines(registry, 0, [info])
    layout = registry.layouts[info.dialect]
    engine = Engine(layout, info, registry.overrides, registry.native, created=registry.wall())
    engine.federated, engine.live = True, False
    if known is not None:
        engine.created, engine.seen_at = known.engine.created, known.engine.seen_at
    return engine


def check_retired(registry: Registry, record: SourceRecord) -> None:
    """Reject a retired engine that is unknown here if the registry has too many of them.

    Raises:
        WireError: The engine would evict engines whose counters only this exporter has.
    """
    if record.status.retired and len(registry.retired) >= MAX_ENGINES:
        raise registry.over_limit("engines", f"more than {MAX_ENGINES} retired engines")


def has_same_series(known: EngineInfo, info: EngineInfo) -> bool:
    """Return whether both describe the same series: labels and dialect are equal."""
    return (known.dialect, known.labels) == (info.dialect, info.labels)


def new_id(registry: Registry, record: SourceRecord) -> str:
    """Return an unused engine id, which is readable and deterministic.

    Raises:
        WireError: The id is in use.
    """
    found = f"{record.source}/{record.engine}"
    if len(found) > MAX_LABEL_CHARS or found in registry:
        key = repr((record.source, record.engine)).encode()
        digest = blake2b(key, digest_size=8).hexdigest()
        found = f"{found[: MAX_LABEL_CHARS - len(digest) - 1]}/{digest}"
    if found in registry:
        raise WireError("engine_conflict", f"{found} exists already")
    return found


def _bounds(registry: Registry, head: Head) -> dict[str, list[float]]:
    """Return the bounds of each bucket family at the source."""
    found = dict(head.engine.bounds)
    layout = registry.layouts.get(head.engine.dialect)
    if layout is None:
        raise WireError("unknown_dialect", head.engine.dialect)
    rows = dict(zip(layout.histogram_names, layout.histograms, strict=True))
    for name, bounds in zip(head.histograms, head.bounds, strict=True):
        row = rows.get(name)
        if row is not None and row.buckets:
            found[row.buckets] = bounds
    return found
