"""The engines' families in Prometheus' protobuf format, with native histograms.

A histogram's bytes are kept until it changes. Exemplars are not told: nothing that engines send
says which request an observation is of.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from sidestep.engine import Engine, Key, Number
from sidestep.histogram import Histogram
from sidestep.native import NativeHistogram
from sidestep.registry import Registry
from sidestep.render import messages
from sidestep.view import Family, children, combined, families, is_shared, labels_of

AT_ONCE = 40
"""Histograms that are encoded between two turns of the loop: some 25 microseconds each."""


def pieces(registry: Registry, names: Collection[str] = ()) -> Iterator[list[bytes]]:
    """The page; the registry may change between two of them, yet a family is of one moment.

    A piece is a family, or nothing where the next one takes a while.
    """
    both = registry.native is None or registry.native.both
    first = min((engine.created for engine in registry.engines.values()), default=0.0)
    for family in list(families(registry, names)):
        made = _Family(family, both=both)
        if is_shared(family):
            for own, value in combined(registry, family):
                made.add(messages.labels(sorted(own.items())), value, first)
        else:
            for engine in registry.engines.values():
                for key, value in children(engine, family):
                    made.add(_labels(engine, family, key), value, engine.created)
        for _ in made.encode():
            yield []
        if made.metrics:
            yield messages.family(family.name, family.kind, family.help, made.metrics)


def _labels(engine: Engine, family: Family, key: Key) -> bytes:
    found = engine.marks.get((family.name, key))
    if found is None:
        found = messages.labels(sorted(labels_of(engine, family, key).items()))
        engine.marks[family.name, key] = found
    return found


class _Family:
    """The children of one family, as of the moment when they are added.

    Attributes:
        metrics: As bytes, once ``encode`` is through.
    """

    def __init__(self, family: Family, *, both: bool) -> None:
        self.metrics: list[bytes] = []
        self._kind = family.kind
        self._both = both
        self._later: list[tuple[int, bytes, NativeHistogram, NativeHistogram]] = []
        """Place, labels, histogram, and its state of that moment."""

    def add(self, own: bytes, value: Number | Histogram, created: float) -> None:
        """One child."""
        if isinstance(value, NativeHistogram):
            if isinstance(value.encoded, bytes):
                self.metrics.append(messages.metric(own, value.encoded))
                return
            # Whatever comes meanwhile says that this is not its state any more.
            value.encoded = state = value.copy()
            self._later.append((len(self.metrics), own, value, state))
            self.metrics.append(b"")
        elif isinstance(value, Histogram):
            self.metrics.append(messages.metric(own, self._plain(value, created)))
        else:
            text = messages.single(self._kind, value, created)
            self.metrics.append(messages.metric(own, text))

    def encode(self) -> Iterator[None]:
        """Encode what is not kept, some at a time."""
        for number, (place, own, histogram, state) in enumerate(self._later, 1):
            encoded = self._encoded(state)
            if histogram.encoded is state:
                histogram.encoded = encoded
            self.metrics[place] = messages.metric(own, encoded)
            if not number % AT_ONCE:
                yield

    def _encoded(self, state: NativeHistogram) -> bytes:
        bounds = (*state.bounds, math.inf) if self._both else ()
        return messages.histogram(state.sum, bounds, state.cumulative, state)

    def _plain(self, value: Histogram, created: float) -> bytes:
        """Of one without native buckets: a summary."""
        counts = value.cumulative
        if self._kind == "summary":
            return messages.summary(counts[-1], value.sum, (), created)
        return messages.histogram(value.sum, (*value.bounds, math.inf), counts)
