"""Outbox of records that are due to be forwarded, without socket or clock.

Records are not acknowledged: a lost one is sent again within ``REFRESH`` seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from sidestep.federation.counted_engines import Records, counted_engines, status_of
from sidestep.federation.messages import FORWARD_VERSION, EngineStatus, Forward, Order
from sidestep.federation.store import Store
from sidestep.metrics.registry import GAUGES_EXPIRE_SECONDS

REFRESH = 10.0
"""Seconds after which an unchanged record is sent again."""
Key = tuple[str, str, int]
"""Source, engine and epoch; the source is empty for engines that this exporter counts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Due:
    """A message to send, and the state of its engine to record once it is sent."""

    key: Key
    state: object
    message: Forward


class Outbox:
    """Selection of records that are due, of engines counted here and of other exporters.

    Args:
        store: Records of other exporters, and the registry of all engines.
        records: Encoded records of the engines that this exporter counts.
        labels: Labels to add to all series.
        on_label_conflict: Called with the id of an engine that already has one of these labels.
    """

    def __init__(
        self,
        store: Store,
        records: Records,
        labels: Mapping[str, str],
        on_label_conflict: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._records = records
        self._labels = dict(labels)
        self._on_label_conflict = on_label_conflict
        self._seq = 0
        self._sent: dict[Key, tuple[object, float]] = {}
        self._changed: dict[Key, float] = {}
        """Time since which the record has unsent changes."""

    def counted(self, now: float) -> Iterator[Due | None]:
        """Yield due records of the engines that this exporter counts, and None for others.

        Each record is encoded when it is requested: items may be applied in between.
        """
        registry, own, records = self._store.registry, self._store.own, self._records
        found = list(counted_engines(registry))
        self._forget({("", engine.id, 0) for engine in found})
        for engine in found:
            version = records.version(engine)
            key = "", engine.id, 0
            status = status_of(registry, engine)
            state = version, status
            if version is None or not self._is_due(key, state, now):
                yield None
                continue
            if self._labels.keys() & engine.labels.keys():
                self._on_label_conflict(engine.id)
            self._seq += 1
            order = own.epoch, own.run, self._seq
            data = records.record(engine)
            yield Due(key, state, self._message(own.name, engine.id, order, data, status))

    def received(self, now: float) -> Iterator[Due]:
        """Yield due records of other exporters unchanged, except for the labels and the age."""
        for federated in self._store:
            # The last record of the ended epoch comes first: after the next epoch's it is rejected.
            for record in federated.records:
                key = record.source, record.engine, record.epoch
                state = record.order, record.labels
                if not self._is_due(key, state, now):
                    continue
                if self._labels.keys() & record.labels.keys():
                    self._on_label_conflict(record.engine)
                message = self._message(*key[:2], record.order, record.data, record.status)
                message.age = (
                    now - federated.sent_at
                    if record is federated.current
                    else GAUGES_EXPIRE_SECONDS
                )
                message.labels = {**self._labels, **record.labels}
                yield Due(key, state, message)

    def sent(self, due: Due, now: float) -> None:
        """Record that ``due`` was sent."""
        self._sent[due.key] = due.state, now
        self._changed.pop(due.key, None)

    def renew(self) -> None:
        """Make all records due: the upstream exporter may have restarted."""
        self._sent.clear()

    def lag(self, now: float) -> float:
        """Return the age of the oldest unsent change in seconds."""
        return now - min(self._changed.values(), default=now)

    def _message(
        self, source: str, engine: str, order: Order, data: bytes, status: EngineStatus
    ) -> Forward:
        return Forward(
            FORWARD_VERSION, source, engine, *order, 0, 1, data, status, labels=self._labels
        )

    def _is_due(self, key: Key, state: object, now: float) -> bool:
        sent, at = self._sent.get(key, (None, 0.0))
        if sent is None or sent != state:
            self._changed.setdefault(key, now)
            return True
        return now - at >= REFRESH

    def _forget(self, counted: set[Key]) -> None:
        """Drop the state of engines that are neither ``counted`` here nor forwarded for others."""
        forwarded = (record for federated in self._store for record in federated.records)
        current = counted.union((r.source, r.engine, r.epoch) for r in forwarded)
        for known in (self._sent, self._changed):
            for key in known.keys() - current:
                del known[key]
