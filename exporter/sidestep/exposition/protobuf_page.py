"""The engines' families in Prometheus' protobuf format, with native histograms.

A histogram's bytes are kept until it changes. Exemplars are not told: nothing that engines send
says which request an observation is of.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from sidestep.exposition import proto_format as messages
from sidestep.exposition.aggregate import merged_histograms
from sidestep.exposition.families import Family, families, is_shared, labels_with
from sidestep.exposition.family_snapshot import Copy, combined_of, copies
from sidestep.metrics.engine import Engine, Key, Number
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeHistogram
from sidestep.metrics.registry import Registry

AT_ONCE = 300
"""Children that are encoded between two turns of the loop: two microseconds each."""
DEAR = 40
"""What a histogram that has changed costs of them."""
NEW = 5
"""What one costs whose labels are not known."""

Pair = tuple[str, str]


Due = tuple[Histogram, Histogram]
"""A histogram that is to be encoded: as an engine keeps it, and as it was when it was copied."""
Shown = bytes | Due
"""What is told of a histogram: its bytes, or what they are to be made of."""


def shown(histogram: Histogram) -> Shown:
    """What a page of now shows of it."""
    if not isinstance(histogram, NativeHistogram):
        return histogram, histogram.copy()
    if isinstance(histogram.encoded, bytes):
        return histogram.encoded
    return histogram, histogram.copy_on_write()


def pieces(registry: Registry, names: Collection[str] = ()) -> Iterator[list[bytes]]:
    """The page; the registry may change between two of them, yet a family is of one moment.

    A piece is a family, or nothing where the next one takes a while.
    """
    for family in list(families(registry, names)):
        if is_shared(family):
            yield from _combined(registry, family)
        else:
            found = copies(registry, family, shown)
            # To copy the state of a thousand engines takes most of a slice.
            yield []
            yield from _Family(registry, family).pieces(found)


def _combined(registry: Registry, family: Family) -> Iterator[list[bytes]]:
    """A family of which several engines have a series."""
    made = _Family(registry, family)
    created = min([engine.created for engine in registry.engines.values()], default=0.0)
    found = copies(registry, family, lambda histogram: histogram.copy())
    yield []
    for one in combined_of(family, found, merged_histograms):
        if one is None:
            yield []
            continue
        labels, value = one
        if isinstance(value, Histogram):
            made.add(messages.labels(labels), (value, value), created)
        else:
            made.add(messages.labels(labels), value, created)
        yield []
    yield made.whole()


class _Family:
    """The children of one family."""

    def __init__(self, registry: Registry, family: Family) -> None:
        self._family = family
        self._kind = family.kind
        self._both = registry.native is None or registry.native.both
        self._metrics: list[bytes] = []

    def pieces(self, found: Iterable[Copy[Shown]]) -> Iterator[list[bytes]]:
        """The family, after as many empty pieces as it takes turns."""
        spent = 0
        for engine, _, names, children in found:
            for key, value in children:
                own = engine.label_cache.get((self._family.name, key))
                if own is None:
                    own = self._labels(engine, names, key)
                    spent += NEW
                if isinstance(value, tuple):
                    spent += DEAR
                self.add(own, value, engine.created)
                spent += 1
                if spent >= AT_ONCE:
                    yield []
                    spent = 0
        yield self.whole()

    def whole(self) -> list[bytes]:
        """The family, where it has children."""
        family = self._family
        if not self._metrics:
            return []
        return messages.family(family.name, self._kind, family.help, self._metrics)

    def add(self, own: bytes, value: Number | Shown, created: float) -> None:
        """One child, by its labels."""
        if isinstance(value, bytes):
            encoded = value
        elif isinstance(value, tuple):
            kept, state = value
            encoded = self._encoded(kept, state, created)
        else:
            encoded = messages.single(self._kind, value, created)
        self._metrics.append(messages.metric(own, encoded))

    def _labels(self, engine: Engine, names: Key, key: Key) -> bytes:
        family = self._family
        found = messages.labels(sorted(labels_with(engine, family, names, key).items()))
        placed = family.places.get(engine.layout.dialect)
        # Others come and go: adapters and the like.
        if placed is not None and placed.storage in ("scalars", "histogram"):
            engine.label_cache[family.name, key] = found
        return found

    def _encoded(self, kept: Histogram, state: Histogram, created: float) -> bytes:
        """The bytes of ``state``, which are kept where it is that of ``kept``."""
        if isinstance(state, NativeHistogram) and isinstance(state.encoded, bytes):
            # Another page had it, too, and what was lent may have changed since.
            return state.encoded
        found = self._histogram(state, created)
        if isinstance(state, NativeHistogram) and isinstance(kept, NativeHistogram):
            if kept.encoded is state:
                kept.encoded = found
            state.encoded = found
        return found

    def _histogram(self, state: Histogram, created: float) -> bytes:
        counts = state.cumulative
        if isinstance(state, NativeHistogram):
            bounds = (*state.bounds, math.inf) if self._both else ()
            return messages.histogram(state.sum, bounds, counts, state)
        # One without native buckets: a summary, or several of other bounds.
        if self._kind == "summary":
            return messages.summary(counts[-1], state.sum, (), created)
        return messages.histogram(state.sum, (*state.bounds, math.inf), counts)
