"""The encoded series of families; those of an engine are encoded again only after it has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence

from sidestep.exposition.aggregated_series import AggregatedSeries, Aggregator, Labels
from sidestep.exposition.engine_values import EngineValues, RegistryValues, Value
from sidestep.exposition.families import Family, LabelCache, families

Encode = Callable[[bytes, Value, float], bytes]
"""Encodes a series: its encoded labels, its value, and the Unix time at which its engine began."""

MAX_SUMS = 50_000
"""Label sets of sums that a format keeps."""


class EncodedSeries:
    """Encodes the series of one family, each of which belongs to one engine."""

    def __init__(self, family: Family, labels: LabelCache[bytes], encode: Encode) -> None:
        self._family = family
        self._labels = labels
        self._encode = encode
        self._page: Sequence[int] = ()
        """Versions of all engines at the last page."""
        self._versions: Sequence[int] = ()
        """Versions of the engines that have the family."""
        self._parts: list[bytes] = []

    def of(self, values: RegistryValues) -> list[bytes]:
        """Return the series of each engine; an engine can have none."""
        if values.versions != self._page:
            self._page = values.versions
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
    """Encodes the series of one family, each of which can belong to several engines."""

    def __init__(
        self,
        family: Family,
        aggregated: AggregatedSeries,
        aggregate: Aggregator,
        encode_labels: Callable[[Labels], bytes],
        encode: Encode,
    ) -> None:
        self._family = family
        self._aggregated = aggregated
        self._aggregate = aggregate
        self._encode_labels = encode_labels
        self._encode = encode
        self._page: Sequence[int] = ()
        self._parts: list[bytes] = []

    def of(self, values: RegistryValues) -> list[bytes]:
        """Return all series; they begin when the oldest engine began."""
        if values.versions != self._page:
            self._page = values.versions
            created = min([engine.created for engine in values.engines], default=0.0)
            found = self._aggregated.series(values, self._family, self._aggregate)
            self._parts = [
                self._encode(self._encode_labels(labels), value, created) for labels, value in found
            ]
        return self._parts


class EncodedFamilies:
    """Encodes the series of all families in one format.

    Args:
        dropped: Labels to remove; series that become equal are aggregated.
    """

    def __init__(
        self,
        encode_labels: Callable[[Labels], bytes],
        encoder: Callable[[Family], Encode],
        aggregate: Aggregator,
        dropped: frozenset[str] = frozenset(),
    ) -> None:
        self._encode_labels = functools.lru_cache(MAX_SUMS)(encode_labels)
        self._encoder = encoder
        self._aggregate = aggregate
        self._dropped = dropped
        self._aggregated = AggregatedSeries(dropped)
        self._labels = LabelCache(lambda labels: encode_labels(tuple(sorted(labels.items()))))
        self._series: dict[Family, EncodedSeries | EncodedSums] = {}

    def of(
        self, values: RegistryValues, names: Collection[str] = ()
    ) -> Iterator[tuple[Family, list[bytes]]]:
        """Yield the families that have series, and these: all, or of the sample ``names``.

        Nothing is kept of engines and families that are gone.
        """
        self._labels.retain(values.engines)
        self._aggregated.retain(values)
        series = {
            family: self._series.get(family) or self._made(family)
            for family in families(values, names)
        }
        if not names:
            self._series = series
        for family, encoded in series.items():
            parts = encoded.of(values)
            if any(parts):
                yield family, parts

    def _made(self, family: Family) -> EncodedSeries | EncodedSums:
        encode = self._encoder(family)
        if not self._dropped and not family.is_shared:
            return EncodedSeries(family, self._labels, encode)
        return EncodedSums(family, self._aggregated, self._aggregate, self._encode_labels, encode)
