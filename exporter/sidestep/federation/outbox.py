"""Outbox of records that are due to be forwarded, without socket or clock.

Records are not acknowledged: a lost one is sent again within ``REFRESH`` seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from sidestep.federation.computed_records import Records, engines, standing
from sidestep.federation.messages import FORWARD_VERSION, Forward, Order, Standing
from sidestep.federation.store import Store
from sidestep.metrics.registry import GAUGES_EXPIRE_SECONDS, Registry
from sidestep.telemetry.self_metrics import SelfMetrics

REFRESH = 10.0
"""Seconds after which an unchanged record is sent again."""
Key = tuple[str, str, int]
"""Source, engine and epoch; the source is empty for engines that this exporter counts."""


class Counted(Protocol):
    """The counters of this exporter, and the records that it received.

    Attributes:
        registry: Engines and their series.
        federation: Records of other exporters.
        metrics: Self-metrics.
        epoch: Epoch of the counters.
        run: Number of this process among those that continued the epoch.
    """

    registry: Registry
    federation: Store
    metrics: SelfMetrics
    epoch: int
    run: int


@dataclasses.dataclass(frozen=True, slots=True)
class Due:
    """A message to send, and the state of its engine to record once it is sent."""

    key: Key
    state: object
    message: Forward


class Outbox:
    """Selection of records that are due, of engines counted here and of other exporters.

    Args:
        counted: This exporter's counters and records.
        source: Name of this exporter.
        records: Encoded records of the engines that this exporter counts.
        labels: Labels to add to all series.
        clash: Called with the id of an engine that already has one of these labels.
    """

    def __init__(
        self,
        counted: Counted,
        source: str,
        records: Records,
        labels: Mapping[str, str],
        clash: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._exporter = counted
        self._source = source
        self._records = records
        self._labels = dict(labels)
        self._clash = clash
        self._seq = 0
        self._sent: dict[Key, tuple[object, float]] = {}
        self._changed: dict[Key, float] = {}
        """Time since which the record has unsent changes."""

    def mine(self, now: float) -> Iterator[Due | None]:
        """Yield due records of the engines that this exporter counts, and None for others.

        Each record is encoded when it is requested: items may be applied in between.
        """
        exporter, records = self._exporter, self._records
        counted = list(engines(exporter.registry))
        self._forget({("", engine.id, 0) for engine in counted})
        for engine in counted:
            version = records.version(engine)
            key = "", engine.id, 0
            state = version, standing(exporter.registry, engine)
            if version is None or not self._is_due(key, state, now):
                yield None
                continue
            if self._labels.keys() & engine.labels.keys():
                self._clash(engine.id)
            self._seq += 1
            order = exporter.epoch, exporter.run, self._seq
            data = records.record(engine)
            yield Due(key, state, self._message(self._source, engine.id, order, data, state[1]))

    def others(self, now: float) -> Iterator[Due]:
        """Yield due records of other exporters unchanged, except for the labels and the age."""
        for federated in self._exporter.federation:
            # The last record of the ended epoch comes first: after the next epoch's it is rejected.
            for record in federated.records:
                key = record.source, record.engine, record.epoch
                state = record.order, record.labels
                if not self._is_due(key, state, now):
                    continue
                if self._labels.keys() & record.labels.keys():
                    self._clash(record.engine)
                message = self._message(*key[:2], record.order, record.data, record.standing)
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
        self, source: str, engine: str, order: Order, data: bytes, state: Standing
    ) -> Forward:
        return Forward(
            FORWARD_VERSION, source, engine, *order, 0, 1, data, state, labels=self._labels
        )

    def _is_due(self, key: Key, state: object, now: float) -> bool:
        sent, at = self._sent.get(key, (None, 0.0))
        if sent is None or sent != state:
            self._changed.setdefault(key, now)
            return True
        return now - at >= REFRESH

    def _forget(self, counted: set[Key]) -> None:
        """Drop the state of engines that are neither ``counted`` here nor forwarded for others."""
        forwarded = (
            record for federated in self._exporter.federation for record in federated.records
        )
        current = counted.union((r.source, r.engine, r.epoch) for r in forwarded)
        for known in (self._sent, self._changed):
            for key in known.keys() - current:
                del known[key]
