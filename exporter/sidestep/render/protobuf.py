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

AT_ONCE = 1000
"""Children that are encoded between two turns of the loop: a microsecond each."""
DEAR = 25
"""What a histogram that has changed costs of them."""

State = bytes | Number | NativeHistogram
"""Of a child: as bytes, as a number, or a copy of its own."""


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
        metrics = made.metrics
        yield messages.family(family.name, family.kind, family.help, metrics) if metrics else []


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
        self._found: list[tuple[bytes, float, Number | Histogram, State]] = []
        """Labels, since when it counts, what an engine keeps, and its state of that moment."""

    def add(self, own: bytes, value: Number | Histogram, created: float) -> None:
        """One child."""
        state: State
        if isinstance(value, NativeHistogram):
            if isinstance(value.encoded, bytes):
                state = value.encoded
            else:
                # Whatever comes meanwhile says that this is not its state any more.
                value.encoded = state = value.copy()
        elif isinstance(value, Histogram):
            state = self._plain(value, created)
        else:
            state = value
        self._found.append((own, created, value, state))

    def encode(self) -> Iterator[None]:
        """Encode all, some at a time."""
        spent = 0
        for own, created, value, state in self._found:
            if isinstance(state, bytes):
                encoded = state
            elif isinstance(state, NativeHistogram):
                encoded = self._native(state)
                spent += DEAR
                if isinstance(value, NativeHistogram) and value.encoded is state:
                    value.encoded = encoded
            else:
                encoded = messages.single(self._kind, state, created)
            self.metrics.append(messages.metric(own, encoded))
            spent += 1
            if spent >= AT_ONCE:
                yield
                spent = 0

    def _native(self, state: NativeHistogram) -> bytes:
        bounds = (*state.bounds, math.inf) if self._both else ()
        return messages.histogram(state.sum, bounds, state.cumulative, state)

    def _plain(self, value: Histogram, created: float) -> bytes:
        """Of one without native buckets: a summary."""
        counts = value.cumulative
        if self._kind == "summary":
            return messages.summary(counts[-1], value.sum, (), created)
        return messages.histogram(value.sum, (*value.bounds, math.inf), counts)
