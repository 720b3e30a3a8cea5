"""Native histograms: exponential buckets beside the classic buckets of the same series."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping

from sidestep.catalog.buckets import SCHEMA, SCHEMAS, Bounds
from sidestep.metrics.exponential_buckets import (
    MAX_BUCKETS,
    ZERO_THRESHOLD,
    as_classic,
    coarser,
    index_of,
    upper,
)
from sidestep.metrics.histogram import Histogram, rebucket
from sidestep.protocol.engine_totals import Buckets, NativeBuckets
from sidestep.protocol.limits import COARSEST, VALUE_LIMIT


@dataclasses.dataclass(frozen=True, slots=True)
class NativeSettings:
    """Settings of native histograms.

    Attributes:
        schemas: Schemas that the operator has set, by bucket family.
        both: Whether protobuf pages contain the classic buckets, too.
    """

    schemas: Mapping[str, int]
    wall: Callable[[], float]
    both: bool = False

    def histogram(self, bounds: Bounds, family: str) -> NativeHistogram:
        """Return an empty native histogram of a bucket family."""
        schema = self.schemas.get(family, SCHEMAS.get(family, SCHEMA))
        return NativeHistogram(bounds, schema, self.wall())


class NativeHistogram(Histogram):
    """A classic histogram with exponential buckets for the same observations.

    Attributes:
        schema: Schema of the buckets; it decreases where there are too many buckets.
        zeros: Observations of at most ``ZERO_THRESHOLD``.
        buckets: Counts of all other observations, by bucket index.
        created: Unix time at which the counts began; 0.0 where that is unknown.
    """

    __slots__ = ("buckets", "created", "schema", "zeros")

    def __init__(self, bounds: Bounds, schema: int = SCHEMA, created: float = 0.0) -> None:
        super().__init__(bounds)
        self.schema = schema
        self.created = created
        self.zeros = 0
        self.buckets: dict[int, int] = {}

    def observe(self, value: float) -> int:
        """Count one value; return 1 if it was refused, else 0."""
        if super().observe(value):
            return 1
        self._count_native(value, 1)
        return 0

    def observe_run(self, value: float, count: int) -> int:
        """Count the same value ``count`` times; return how many observations were refused."""
        refused = super().observe_run(value, count)
        if not refused:
            self._count_native(value, count)
        return refused

    def _observe_weights(self, observations: list[tuple[float, int]]) -> int:
        refused = super()._observe_weights(observations)
        for value, count in observations:
            if 0.0 <= value <= VALUE_LIMIT:
                self._count_native(value, count)
        return refused

    def add(self, counts: list[int], total: float, native: NativeBuckets | None = None) -> None:
        """Add counts per classic bucket, not cumulative, and the sum of the observations.

        Without ``native``, each observation counts at the upper bound of its classic bucket.
        """
        super().add(counts, total)
        if native is None:
            # The values above the highest bound are unknown: they count just above it.
            last = math.nextafter(self.bounds[-1], math.inf) if self.bounds else 0.0
            for bound, count in zip((*self.bounds, last), counts, strict=True):
                if count:
                    self._count_native(bound, count)
            return
        added = dict(zip(native.indices, map(int, native.counts), strict=True))
        if native.schema > self.schema:
            added = coarser(added, native.schema - self.schema)
        self._coarsen(native.schema)
        for index, count in added.items():
            if count:
                self.buckets[index] = self.buckets.get(index, 0) + count
        self.zeros += int(native.zeros)
        self.created = min(self.created, native.created or self.created)
        self._limit_buckets()

    def _coarsen(self, schema: int) -> None:
        """Reduce the resolution to that of ``schema``, if it is finer."""
        if schema < self.schema:
            self.buckets = coarser(self.buckets, self.schema - schema)
            self.schema = schema

    def merge(self, other: Histogram) -> None:
        """Add the observations of ``other``, which has equal bounds."""
        self.add(other.counts, other.sum, other.to_wire().native)

    def with_bounds(self, bounds: Bounds) -> NativeHistogram:
        """Return the same observations under other bounds.

        Each observation counts at the upper bound of its native bucket.
        """
        found = NativeHistogram(bounds, self.schema, self.created)
        found.slo_counter = self.slo_counter
        native = self._native()
        found.add(rebucket(*as_classic(native), bounds), self.sum, native)
        return found

    def to_wire(self) -> Buckets:
        """Return the state as a wire struct."""
        return Buckets(self.sum, [*self.counts], self._native())

    def copy(self) -> NativeHistogram:
        """Return a copy of the current state."""
        found = NativeHistogram.__new__(NativeHistogram)
        found.bounds, found.counts, found.sum = self.bounds, self.counts.copy(), self.sum
        found.schema, found.zeros, found.created = self.schema, self.zeros, self.created
        found.buckets, found.exemplars = self.buckets.copy(), self.exemplars
        found.slo_counter = None
        return found

    def _native(self) -> NativeBuckets:
        counts: list[int | str] = [*self.buckets.values()]
        return NativeBuckets(self.schema, self.zeros, [*self.buckets], counts, self.created)

    def _count_native(self, value: float, count: int) -> None:
        if value <= ZERO_THRESHOLD:
            self.zeros += count
            return
        if not count:
            return
        buckets, index = self.buckets, index_of(self.schema, value)
        buckets[index] = buckets.get(index, 0) + count
        if len(buckets) > MAX_BUCKETS:
            self._limit_buckets()

    def _count_sorted(self, values: list[float]) -> None:
        """Count ``values``, sorted and valid and at least one, a bucket at a time."""
        super()._count_sorted(values)
        start, end = 0, len(values)
        if values[0] <= ZERO_THRESHOLD:
            start = bisect_right(values, ZERO_THRESHOLD)
            self.zeros += start
            if start == end:
                return
        schema, buckets = self.schema, self.buckets
        last = index_of(schema, values[-1])
        while True:
            index = index_of(schema, values[start])
            if index == last:
                break
            after = bisect_right(values, upper(schema, index), start)
            buckets[index] = buckets.get(index, 0) + after - start
            start = after
        buckets[last] = buckets.get(last, 0) + end - start
        self._limit_buckets()

    def _limit_buckets(self) -> None:
        """Reduce the resolution until there are at most ``MAX_BUCKETS`` buckets."""
        while len(self.buckets) > MAX_BUCKETS and self.schema > COARSEST:
            self._coarsen(self.schema - 1)
