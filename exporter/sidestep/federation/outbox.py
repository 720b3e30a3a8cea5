"""Which records another exporter is to be told now, as messages; without socket or clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from sidestep.federation.computed_records import Records, engines, standing
from sidestep.federation.messages import FORWARD_VERSION, Forward
from sidestep.federation.outgoing import Outgoing
from sidestep.ingest.intake import Intake
from sidestep.metrics.registry import GAUGES_EXPIRE_SECONDS


@dataclasses.dataclass(frozen=True, slots=True)
class Due:
    """A message, and what is to be remembered once it has left."""

    key: tuple[str, ...] | tuple[str, str, int]
    state: object
    message: Forward


class Outbox:
    """What this exporter counts, and what others have told it.

    Args:
        intake: Of this exporter.
        source: What it calls itself.
        records: Of the engines that are counted here.
        labels: That all series get on the way.
        clash: Told of engines that have a label of such a name.
    """

    def __init__(
        self,
        intake: Intake,
        source: str,
        records: Records,
        labels: Mapping[str, str],
        clash: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._intake = intake
        self._source = source
        self._records = records
        self._labels = dict(labels)
        self._clash = clash
        self._outgoing = Outgoing()
        self._seq = 0

    def mine(self, now: float) -> Iterator[Due | None]:
        """Records of engines that are counted here; None stands for one that is not due.

        Each is encoded when it is asked for: items may be applied in between.
        """
        intake, records = self._intake, self._records
        counted = list(engines(intake.registry))
        words = (word.key for word in intake.forwarded.lives)
        self._outgoing.keep({*(("", engine.id) for engine in counted), *words})
        for engine in counted:
            version = records.version(engine)
            key = ("", engine.id)
            state = version, standing(intake.registry, engine)
            if version is None or not self._outgoing.due(key, state, now):
                yield None
                continue
            if self._labels.keys() & engine.labels.keys():
                self._clash(engine.id)
            self._seq += 1
            yield Due(
                key,
                state,
                Forward(
                    FORWARD_VERSION,
                    self._source,
                    engine.id,
                    intake.life,
                    intake.run,
                    self._seq,
                    0,
                    1,
                    records.record(engine),
                    state[1],
                    labels=self._labels,
                ),
            )

    def others(self, now: float) -> Iterator[Due]:
        """What other exporters said, as it came but for the labels and its age."""
        for word in list(self._intake.forwarded.lives):
            state = word.order, word.labels
            # Of a sum nobody else can know what is in it.
            if word.is_sum or not self._outgoing.due(word.key, state, now):
                continue
            if self._labels.keys() & word.labels.keys():
                self._clash(word.engine)
            # From a snapshot nobody knows when its source said so: long enough ago.
            least = GAUGES_EXPIRE_SECONDS if word.silent else 0.0
            yield Due(
                word.key,
                state,
                Forward(
                    FORWARD_VERSION,
                    *word.key,
                    *word.order,
                    0,
                    1,
                    word.record,
                    word.standing,
                    max(now - word.heard, least),
                    {**self._labels, **word.labels},
                ),
            )

    def sent(self, due: Due, now: float) -> None:
        """It has left."""
        self._outgoing.sent(due.key, due.state, now)

    def renew(self) -> None:
        """Somebody else listens, who has heard nothing yet."""
        self._outgoing.renew()

    def lag(self, now: float) -> float:
        """Seconds for which something new has not been told."""
        return self._outgoing.lag(now)
