"""The encoded series of a family; those of an engine are encoded again only after it has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidestep.exposition.aggregated_series import AggregatedSeries, Aggregator, Labels
from sidestep.exposition.engine_values import EngineValues, RegistryValues, Value
from sidestep.exposition.families import Family, LabelCache

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
        self._page: Sequence[int] = ()
        """Versions of all engines at the last page."""
        self._versions: Sequence[int] = ()
        """Those of the engines that have the family."""
        self._parts: list[bytes] = []

    def of(self, values: RegistryValues, versions: Sequence[int]) -> list[bytes]:
        """Return the series of each engine; an engine can have none.

        Args:
            values: The values of all engines.
            versions: ``values.versions()``.
        """
        if versions != self._page:
            self._page = versions
            engines = self._family.engines(values)
            known = dict(zip(self._versions, self._parts, strict=True))
            self._parts = [
                self._of_engine(engine) if (part := known.get(engine.version)) is None else part
                for engine in engines
            ]
            self._versions = [engine.version for engine in engines]
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
        self._page: Sequence[int] = ()
        self._parts: list[bytes] = []

    def of(self, values: RegistryValues, versions: Sequence[int]) -> list[bytes]:
        """Return all series."""
        if versions != self._page:
            self._page = versions
            created = min([engine.created for engine in values.engines], default=0.0)
            found = self._aggregated.series(values, self._family, self._aggregate)
            self._parts = [self._encode(labels, value, created) for labels, value in found]
        return self._parts
