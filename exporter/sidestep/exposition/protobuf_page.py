"""The engines' families in Prometheus' protobuf format, with native histograms.

The bytes of a histogram are cached until it changes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from sidestep.exposition import proto_format
from sidestep.exposition.aggregate import aggregate_histograms
from sidestep.exposition.aggregated_series import AggregatedSeries
from sidestep.exposition.families import Family, families, is_shared, series_labels
from sidestep.exposition.family_snapshot import EngineSnapshot, snapshot_family
from sidestep.metrics.engine import Engine, Key, Number
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeHistogram
from sidestep.metrics.registry import Registry

PER_SLICE = 300
"""Series to encode before yielding to the event loop: two microseconds each."""
CHANGED_COST = 40
"""Cost of a changed histogram, in series."""
NEW_LABELS_COST = 5
"""Cost of a series whose labels are not cached, in series."""

Unencoded = tuple[Histogram, Histogram]
"""A histogram to encode: the engine's own, and its copy of that moment."""
HistogramSnapshot = bytes | Unencoded
"""Encoded bytes, or a histogram to encode."""


def snapshot_histogram(histogram: Histogram) -> HistogramSnapshot:
    """Return the present state of a histogram."""
    if not isinstance(histogram, NativeHistogram):
        return histogram, histogram.copy()
    if isinstance(histogram.encoded, bytes):
        return histogram.encoded
    return histogram, histogram.copy_on_write()


def pieces(registry: Registry, names: Collection[str] = ()) -> Iterator[list[bytes]]:
    """Yield the page; the registry may change between pieces, yet each family is of one moment.

    A piece is a family, or empty if the next one takes a while.
    """
    for family in list(families(registry, names)):
        if is_shared(family):
            yield from _aggregated(registry, family)
        else:
            found = snapshot_family(registry, family, snapshot_histogram)
            # Copying the state of a thousand engines takes most of a slice.
            yield []
            yield from _Family(registry, family).pieces(found)


def _aggregated(registry: Registry, family: Family) -> Iterator[list[bytes]]:
    """Yield a family in which several engines share a series."""
    made = _Family(registry, family)
    created = min([engine.created for engine in registry.engines.values()], default=0.0)
    aggregated = AggregatedSeries(registry)
    for one in aggregated.series(family, lambda histogram: histogram.copy(), aggregate_histograms):
        if one is None:
            yield []
            continue
        labels, value = one
        if isinstance(value, Histogram):
            made.add(proto_format.labels(labels), (value, value), created)
        else:
            made.add(proto_format.labels(labels), value, created)
        yield []
    yield made.finish()


class _Family:
    """The encoded series of one family."""

    def __init__(self, registry: Registry, family: Family) -> None:
        self._family = family
        self._kind = family.kind
        self._both = registry.native is None or registry.native.both
        self._metrics: list[bytes] = []

    def pieces(self, found: Iterable[EngineSnapshot[HistogramSnapshot]]) -> Iterator[list[bytes]]:
        """Yield the family, after empty pieces at which to yield to the event loop."""
        spent = 0
        for engine, names, children in found:
            for key, value in children:
                label_bytes = engine.label_cache.get((self._family.name, key))
                if label_bytes is None:
                    label_bytes = self._labels(engine, names, key)
                    spent += NEW_LABELS_COST
                if isinstance(value, tuple):
                    spent += CHANGED_COST
                self.add(label_bytes, value, engine.created)
                spent += 1
                if spent >= PER_SLICE:
                    yield []
                    spent = 0
        yield self.finish()

    def finish(self) -> list[bytes]:
        """Return the encoded family; empty without series."""
        family = self._family
        if not self._metrics:
            return []
        return proto_format.family(family.name, self._kind, family.help, self._metrics)

    def add(self, label_bytes: bytes, value: Number | HistogramSnapshot, created: float) -> None:
        """Add one series by its encoded labels."""
        if isinstance(value, bytes):
            encoded = value
        elif isinstance(value, tuple):
            histogram, state = value
            encoded = self._encoded(histogram, state, created)
        else:
            encoded = proto_format.single(self._kind, value, created)
        self._metrics.append(proto_format.metric(label_bytes, encoded))

    def _labels(self, engine: Engine, names: Key, key: Key) -> bytes:
        family = self._family
        found = proto_format.labels(sorted(series_labels(engine, family, names, key).items()))
        placed = family.assignments.get(engine.layout.dialect)
        # Other label values, such as adapters, come and go.
        if placed is not None and placed.storage in ("scalars", "histogram"):
            engine.label_cache[family.name, key] = found
        return found

    def _encoded(self, histogram: Histogram, state: Histogram, created: float) -> bytes:
        """Encode ``state``, and cache the bytes in ``histogram`` if it has not changed since."""
        if isinstance(state, NativeHistogram) and isinstance(state.encoded, bytes):
            # Another page encoded it, and the engine's histogram may have changed since.
            return state.encoded
        found = self._histogram(state, created)
        if isinstance(state, NativeHistogram) and isinstance(histogram, NativeHistogram):
            if histogram.encoded is state:
                histogram.encoded = found
            state.encoded = found
        return found

    def _histogram(self, state: Histogram, created: float) -> bytes:
        counts = state.cumulative
        if isinstance(state, NativeHistogram):
            bounds = (*state.bounds, math.inf) if self._both else ()
            return proto_format.histogram(state.sum, bounds, counts, state, state.exemplars)
        # No native buckets: a summary, or an aggregate of different bounds.
        if self._kind == "summary":
            return proto_format.summary(counts[-1], state.sum, (), created)
        bounds = (*state.bounds, math.inf)
        return proto_format.histogram(state.sum, bounds, counts, exemplars=state.exemplars)
