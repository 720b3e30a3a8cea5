"""The engines' families in Prometheus' protobuf format, with native histograms.

A histogram's bytes are kept until it changes. Exemplars are not told: nothing that engines send
says which request an observation is of.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from sidestep.engine import Engine, Key, Number
from sidestep.histogram import Histogram
from sidestep.native import NativeHistogram
from sidestep.registry import Registry
from sidestep.render import messages
from sidestep.view import Family, children, combined, families, is_shared, labels_of

AT_ONCE = 1000
"""Children that are encoded between two turns of the loop: a microsecond each."""
DEAR = 40
"""What a histogram that has changed costs of them."""

Pair = tuple[str, str]
State = bytes | Number | NativeHistogram
"""Of a child: as bytes, as a number, or a copy of its own."""


def pieces(registry: Registry, names: Collection[str] = ()) -> Iterator[list[bytes]]:
    """The page; the registry may change between two of them, yet a family is of one moment.

    A piece is a family, or nothing where the next one takes a while.
    """
    for family in list(families(registry, names)):
        if is_shared(family):
            told = ((sorted(own.items()), value) for own, value in combined(registry, family))
            yield from combined_pieces(registry, family, told)
            continue
        made = _Family(registry, family)
        for engine in registry.engines.values():
            for key, value in children(engine, family):
                made.add(_labels(engine, family, key), value, engine.created)
        yield from made.pieces()


def combined_pieces(
    registry: Registry, family: Family, told: Iterable[tuple[Iterable[Pair], Number | Histogram]]
) -> Iterator[list[bytes]]:
    """A family of which several engines have a series: with its labels in their order."""
    made = _Family(registry, family)
    first = min((engine.created for engine in registry.engines.values()), default=0.0)
    for own, value in told:
        made.add(messages.labels(own), value, first)
    yield from made.pieces()


def _labels(engine: Engine, family: Family, key: Key) -> bytes:
    found = engine.marks.get((family.name, key))
    if found is None:
        found = messages.labels(sorted(labels_of(engine, family, key).items()))
        placed = family.places.get(engine.layout.dialect)
        # Others come and go: adapters and the like.
        if placed is not None and placed.where in ("scalars", "histogram"):
            engine.marks[family.name, key] = found
    return found


class _Family:
    """The children of one family, as of the moment when they are added."""

    def __init__(self, registry: Registry, family: Family) -> None:
        self._family = family
        self._kind = family.kind
        self._both = registry.native is None or registry.native.both
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

    def pieces(self) -> Iterator[list[bytes]]:
        """The family, after as many empty pieces as it takes turns."""
        metrics: list[bytes] = []
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
            metrics.append(messages.metric(own, encoded))
            spent += 1
            if spent >= AT_ONCE:
                yield []
                spent = 0
        name, text = self._family.name, self._family.help
        yield messages.family(name, self._kind, text, metrics) if metrics else []

    def _native(self, state: NativeHistogram) -> bytes:
        bounds = (*state.bounds, math.inf) if self._both else ()
        return messages.histogram(state.sum, bounds, state.cumulative, state)

    def _plain(self, value: Histogram, created: float) -> bytes:
        """Of one without native buckets: a summary."""
        counts = value.cumulative
        if self._kind == "summary":
            return messages.summary(counts[-1], value.sum, (), created)
        return messages.histogram(value.sum, (*value.bounds, math.inf), counts)
