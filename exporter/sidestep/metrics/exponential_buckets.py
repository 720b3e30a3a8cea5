"""Exponential buckets, as native histograms have them: which one holds a value, by schema.

Bucket ``i`` of schema ``s`` holds what is above ``2**((i - 1) / 2**s)`` and at most
``2**(i / 2**s)``: schema 3 has eight to a power of two, so that what is read out of a bucket is
wrong by 4.4 % at most.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from sidestep.catalog.buckets import Bounds
from sidestep.errors import WireError
from sidestep.protocol.limits import VALUE_LIMIT
from sidestep.protocol.native_buckets import FINEST, NativeBuckets

ZERO_THRESHOLD = 2.0**-128
"""What is not above it is counted as nothing: the zero bucket."""
MAX_BUCKETS = 160
"""Buckets of one histogram; where it would have more, the resolution halves."""


DIVISIONS: Sequence[Bounds] = [
    tuple(0.5 * 2.0 ** (part / (1 << schema)) for part in range(1 << schema))
    for schema in range(FINEST + 1)
]
"""By schema: upper bounds of the buckets of a power of two, as fractions of ``frexp``: 0.5 and up.

A logarithm would err where a value lies on a bound; these do not."""


def index_of(schema: int, value: float) -> int:
    """The bucket of a value over ``ZERO``."""
    fraction, exponent = math.frexp(value)
    if schema >= 0:
        return bisect_left(DIVISIONS[schema], fraction) + ((exponent - 1) << schema)
    return -(-(bisect_left(DIVISIONS[0], fraction) + exponent - 1) >> -schema)


def upper(schema: int, index: int) -> float:
    """The upper bound of a bucket: the largest value it holds."""
    if schema < 0:
        return math.ldexp(1.0, index << -schema)
    power, part = divmod(index, 1 << schema)
    return math.ldexp(DIVISIONS[schema][part], power + 1)


def coarser(buckets: Mapping[int, int], steps: int = 1) -> dict[int, int]:
    """Counts by index, of a schema that is lower by ``steps``: each takes two buckets together."""
    found: dict[int, int] = {}
    for index, count in buckets.items():
        wider = -(-index >> steps)
        found[wider] = found.get(wider, 0) + count
    return found


def as_classic(native: NativeBuckets) -> tuple[Bounds, list[int]]:
    """The same as bounds and counts, not cumulative, with one more that is empty for +Inf."""
    found = sorted(zip(native.indices, map(int, native.counts), strict=True))
    bounds = (0.0, *(upper(native.schema, index) for index, _ in found))
    return bounds, [int(native.zeros), *(count for _, count in found), 0]


def check(native: NativeBuckets, count: int) -> None:
    """Whether ``native`` are the buckets of so many observations.

    Raises:
        WireError: They are not.
    """
    indices, schema = native.indices, native.schema
    if not len(indices) == len(native.counts) == len(set(indices)):
        raise WireError("bad_bounds", "native buckets and their counts do not fit")
    lowest, highest = index_of(schema, math.nextafter(ZERO_THRESHOLD, 1.0)), index_of(schema, 2 * VALUE_LIMIT)
    if indices and not lowest <= min(indices) <= max(indices) <= highest:
        raise WireError("bad_bounds", "a native bucket that no value has")
    counts = [n if isinstance(n, int) else _number(n) for n in (native.zeros, *native.counts)]
    if min(counts) < 0:
        raise WireError("bad_item", "a native bucket cannot have this count")
    if sum(counts) != count:
        raise WireError("bad_item", "native buckets hold another number of observations")


def _number(text: str) -> int:
    """A count that 64 bits do not hold; a negative one where it is none."""
    return int(text) if text.isascii() and text.isdecimal() else -1
