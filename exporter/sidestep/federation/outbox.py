"""Records that another exporter has to get now, as messages; without socket or clock.

No answer is needed: a record that is lost on the way is sent again within ``REFRESH`` seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from sidestep.federation.computed_records import Records, engines, standing
from sidestep.federation.messages import FORWARD_VERSION, Forward, Order, Standing
from sidestep.federation.store import Store
from sidestep.metrics.registry import SILENT, Registry
from sidestep.telemetry.self_metrics import SelfMetrics

REFRESH = 10.0
"""Seconds after which a record is sent again though it did not change."""
Key = tuple[str, str, int]
"""Source, engine and epoch; of the engines counted here the source is empty."""


class Counted(Protocol):
    """The counters of this exporter, and the records that it received.

    Attributes:
        registry: Its engines.
        federation: Records of other exporters.
        metrics: Its own metrics.
        epoch: Of its counters.
        run: Number of this process among those that continued the epoch.
    """

    registry: Registry
    federation: Store
    metrics: SelfMetrics
    epoch: int
    run: int


@dataclasses.dataclass(frozen=True, slots=True)
class Due:
    """A message, and the state of its engine to be remembered once it has left."""

    key: Key
    state: object
    message: Forward


class Outbox:
    """Decides which records are due: of the engines counted here, and those to be passed on.

    Args:
        counted: This exporter's counters and records.
        source: The name of this exporter.
        records: Encoded records of the engines that are counted here.
        labels: Labels to add to all series.
        clash: Called with an engine that has a label of such a name already.
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
        """Since when there is something new to send."""

    def mine(self, now: float) -> Iterator[Due | None]:
        """Yield records of engines that are counted here; None stands for one that is not due.

        Each is encoded when it is asked for: items may be applied in between.
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
        """Yield other exporters' records as they came, but for the labels and the age."""
        for federated in self._exporter.federation:
            # The ended epoch's last record goes first: after the next epoch's it would be refused.
            for record in federated.records:
                key = record.source, record.engine, record.epoch
                state = record.order, record.labels
                if not self._is_due(key, state, now):
                    continue
                if self._labels.keys() & record.labels.keys():
                    self._clash(record.engine)
                message = self._message(*key[:2], record.order, record.data, record.standing)
                message.age = now - federated.heard if record is federated.current else SILENT
                message.labels = {**self._labels, **record.labels}
                yield Due(key, state, message)

    def sent(self, due: Due, now: float) -> None:
        """Note that ``due`` has left."""
        self._sent[due.key] = due.state, now
        self._changed.pop(due.key, None)

    def renew(self) -> None:
        """Let all records be due: another process may be listening."""
        self._sent.clear()

    def lag(self, now: float) -> float:
        """Return the seconds for which something new has waited."""
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
        """Forget all that is neither ``counted`` here nor passed on."""
        passed = (record for federated in self._exporter.federation for record in federated.records)
        kept = counted.union((r.source, r.engine, r.epoch) for r in passed)
        for known in (self._sent, self._changed):
            for key in known.keys() - kept:
                del known[key]
