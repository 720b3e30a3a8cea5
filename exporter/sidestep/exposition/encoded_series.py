"""The encoded series of a family; those of an engine are encoded again only after it has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidestep.exposition.aggregate import Aggregator
from sidestep.exposition.aggregated_series import AggregatedSeries, Labels
from sidestep.exposition.engine_values import EngineValues, RegistryValues, Value
from sidestep.exposition.families import Family
from sidestep.exposition.label_cache import LabelCache

Encode = Callable[[bytes, Value, float], bytes]
"""Encodes a series: its encoded labels, its value, and the Unix time at which its engine began."""


class EncodedSeries:
    """Encodes the series of one family, in one format.

    Args:
        family: The family.
        labels: Encoded labels.
        encode: Encodes one series.
    """

    def __init__(self, family: Family, labels: LabelCache[bytes], encode: Encode) -> None:
        self._family = family
        self._labels = labels
        self._encode = encode
        self._all: Sequence[EngineValues] = ()
        """All engines of the last page."""
        self._engines: Sequence[EngineValues] = ()
        self._parts: list[bytes] = []

    def of(self, values: RegistryValues) -> list[bytes]:
        """Return the series of each engine; an engine can have none."""
        if values.engines != self._all:
            self._all = values.engines
            engines = self._family.engines(values)
            known = dict(zip(self._engines, self._parts, strict=True))
            self._parts = [
                self._of_engine(engine) if (part := known.get(engine)) is None else part
                for engine in engines
            ]
            self._engines = engines
        return self._parts

    def _of_engine(self, engine: EngineValues) -> bytes:
        names, children = self._family.children(engine)
        if not children:
            return b""
        encode, created = self._encode, engine.created
        labels = self._labels.get(engine, self._family, names, [key for key, _ in children])
        if len(labels) == 1:
            return encode(labels[0], children[0][1], created)
        return b"".join(
            [encode(own, value, created) for own, (_, value) in zip(labels, children, strict=True)]
        )


class EncodedSums:
    """Encodes the series of one family of which several engines share one.

    Args:
        family: The family.
        aggregated: Adds series up.
        aggregate: Adds histograms up.
        encode: Encodes one series; it gets the labels as pairs, and the time at which the oldest
            engine began.
    """

    def __init__(
        self,
        family: Family,
        aggregated: AggregatedSeries,
        aggregate: Aggregator,
        encode: Callable[[Labels, Value, float], bytes],
    ) -> None:
        self._family = family
        self._aggregated = aggregated
        self._aggregate = aggregate
        self._encode = encode
        self._engines: Sequence[EngineValues] = ()
        self._parts: list[bytes] = []

    def of(self, values: RegistryValues) -> list[bytes]:
        """Return all series."""
        engines = [*values.engines, *values.gone]
        if engines != self._engines:
            self._engines = engines
            created = min([engine.created for engine in values.engines], default=0.0)
            found = self._aggregated.series(values, self._family, self._aggregate)
            self._parts = [self._encode(labels, value, created) for labels, value in found]
        return self._parts
